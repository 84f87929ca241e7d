"""The tensors of a plan as the library reports them, held against what the runtime can fill and what the contract says.

``_runtime.KNOWN_INPUTS`` is the table of inputs by name, TensorRT-LLM's and ours, and the packer writes their values.
A plan has no names for its dynamic sizes: the symbols T, B and S are the contract's.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch
from types import ModuleType
from typing import Any

from tensorrt_llm_ext._runtime import KNOWN_INPUTS
from tensorrt_llm_ext.errors import ContractError, IncompatibleEngine
from tensorrt_llm_ext.recipes.contract import Contract, TensorSpec

HOST = "host_"  # upstream's prefix of what the CPU reads at enqueue; the library itself reports these as on the device
DYNAMIC = -1

_CACHE = "a key-value cache: build it with --kv_cache_type disabled"
_PROMPT_TABLE = "prompt-table embeddings: build it with --max_prompt_embedding_table_size 0"
_SPECULATIVE = "speculative decoding: build it with --speculative_decoding_mode none"
_REFUSED = {  # name pattern of an input of upstream's: what it is for, and what to build instead
    "*_lora_*": "LoRA weights: build it without --lora_plugin, from a checkpoint with the weights merged",
    "spec_decoding_*": _SPECULATIVE,
    "prompt_embedding_table": _PROMPT_TABLE,
    "tasks": _PROMPT_TABLE,
    "prompt_vocab_size": _PROMPT_TABLE,
    "*kv_cache_*": _CACHE,
    "past_key_value_*": _CACHE,
    "sequence_length": _CACHE,
    "host_past_key_value_lengths": _CACHE,
    "cache_indirection": _CACHE,
    "mrope_*": "positions of images: build a model that reads text",
    "all_reduce_workspace": "several GPUs: build it for one",
    "hidden_states_input": "pipeline parallelism: build it for one GPU",
    "attention_mask": "padded attention: build it with --gpt_attention_plugin and --remove_input_padding enable",
}


def read_tensors(trt: ModuleType, engine: Any, contract: Contract) -> tuple[TensorSpec, ...]:
    """Enumerate every input and output of a plan.

    Raises IncompatibleEngine for an input that the runtime cannot fill, ContractError for a tensor that is read from
    elsewhere than the contract says. Names, types and shapes are compared by ``open_engine``.
    """
    promised = {tensor.name: tensor for tensor in contract.tensors}
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    tensors = tuple(_tensor(trt, engine, name, promised.get(name)) for name in names)
    _check_inputs([tensor.name for tensor in tensors if tensor.role == "input"])
    for tensor in tensors:
        _check_location(trt, engine, tensor, promised.get(tensor.name))
    return tensors


def _tensor(trt: ModuleType, engine: Any, name: str, promised: TensorSpec | None) -> TensorSpec:
    sizes = tuple(engine.get_tensor_shape(name))
    shape = tuple(_symbol(promised, axis, len(sizes)) if size == DYNAMIC else size for axis, size in enumerate(sizes))
    is_input = engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
    dtype = engine.get_tensor_dtype(name)
    known = {
        trt.DataType.FLOAT: "float32",
        trt.DataType.HALF: "float16",
        trt.DataType.BF16: "bfloat16",
        trt.DataType.INT32: "int32",
        trt.DataType.INT64: "int64",
    }
    location = "host" if name.startswith(HOST) else "device"
    return TensorSpec(name, "input" if is_input else "output", known.get(dtype, str(dtype)), shape, location)


def _symbol(promised: TensorSpec | None, axis: int, rank: int) -> str:
    """The contract's name of a dynamic size; ``?`` where the contract has none."""
    size = promised.shape[axis] if promised is not None and len(promised.shape) == rank else None
    return size if isinstance(size, str) else "?"


def _check_inputs(names: Sequence[str]) -> None:
    """Raise IncompatibleEngine with the list of inputs that nobody here can fill, and why."""
    unknown = [name for name in names if name not in KNOWN_INPUTS]
    if not unknown:
        return
    reasons = {name: next((why for pattern, why in _REFUSED.items() if fnmatch(name, pattern)), "") for name in unknown}
    raise IncompatibleEngine(
        f"the engine reads inputs that this runtime cannot fill: {', '.join(unknown)}",
        expected=f"inputs out of {', '.join(KNOWN_INPUTS)}",
        found="; ".join(f"{name}: {why.partition(':')[0]}" if why else name for name, why in reasons.items()),
        fix="; ".join(dict.fromkeys(why.partition(": ")[2] for why in reasons.values() if why))
        or "build the engine with this release, or with upstream's by `trtllm-extract upstream`",
    )


def _check_location(trt: ModuleType, engine: Any, tensor: TensorSpec, promised: TensorSpec | None) -> None:
    """The library may read a tensor on the host only where the runtime puts it there, and the contract must agree."""
    is_read_on_host = engine.get_tensor_location(tensor.name) == trt.TensorLocation.HOST
    is_promised = promised is None or promised.location == tensor.location
    if is_promised and not (is_read_on_host and tensor.location == "device"):
        return
    raise ContractError(
        f"the engine's tensor '{tensor.name}' lies elsewhere than the runtime would put it",
        expected=f"{'host' if is_read_on_host else tensor.location} memory",
        found=f"{tensor.location if is_promised else promised.location} memory",
        fix="build the engine again",
    )
