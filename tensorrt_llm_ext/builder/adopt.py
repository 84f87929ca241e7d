"""Adopt an engine that upstream's ``trtllm-build`` made: check what can be checked, write our contract beside it.

No plan can be read without a GPU of its kind. What is promised on upstream's word alone is listed in
``Adoption.at_load``, and is checked when the engine is opened.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from tensorrt_llm_ext.builder.parts import Progress
from tensorrt_llm_ext.builder.canaries import make_canaries
from tensorrt_llm_ext.builder.upstream import upstream_taps
from tensorrt_llm_ext.builder.upstream_engine import CONFIG, PLAN, UpstreamEngine, read_upstream_engine
from tensorrt_llm_ext.checkpoint import Architecture, Checkpoint, open_checkpoint
from tensorrt_llm_ext.checkpoint.tokenizer import FILES as TOKENIZER_FILES
from tensorrt_llm_ext.errors import ContractError, EngineError, IncompatibleEngine
from tensorrt_llm_ext.fingerprint import file_fingerprint, fingerprint
from tensorrt_llm_ext.recipes import Contract, Limits, TensorSpec, write_contract
from tensorrt_llm_ext.recipes.contract import FILE_NAME, EngineFile, Fingerprints, MemoryEstimate
from tensorrt_llm_ext.recipes.settings import longest_exact
from tensorrt_llm_ext.runtime.packing import slot_bytes
from tensorrt_llm_ext.taps import DEFAULT_TAPS, Tap

BUILDER = "tensorrt_llm"
PLATFORM = "linux-x86_64"

_CONTEXT_PROGRESS_FROM = Version("0.15.dev0")
_NUM_PERF_KNOBS = 16
_ARCHITECTURES = {  # upstream's names of what we describe as a family
    "llama": ("LlamaForCausalLM",),
    "mistral": ("MistralForCausalLM", "LlamaForCausalLM"),
    "qwen2": ("Qwen2ForCausalLM", "QWenForCausalLM"),  # ModelOpt's older exports call every Qwen so: canaries prove which
    "qwen3": ("Qwen3ForCausalLM",),
}
_SIZES = {  # upstream's name: ours; the first three are always there
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "vocab_size": "vocab_size",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_size": "head_dim",
    "intermediate_size": "intermediate_size",
}


@dataclass(frozen=True)
class Adoption:
    """A contract that was written; what was checked for it, what only opening the engine can check, what to know."""

    contract: Contract
    checked: tuple[str, ...]
    at_load: tuple[str, ...]
    warnings: tuple[str, ...]


def adopt_engine(
    engine_path: Path | str,
    checkpoint_path: Path | str,
    *,
    compute_capability: str,
    taps: str = DEFAULT_TAPS,
    max_seq_len: int | None = None,
    platform: str = PLATFORM,
    progress: Progress | None = None,
) -> Adoption:
    """Write contract.json and the tokenizer beside upstream's engine, which was built with the patch.

    ``checkpoint_path`` is the Hugging Face folder (or GGUF file) that upstream's checkpoint was converted from: its
    tokenizer, its architecture and the canaries come from there. ``max_seq_len`` serves shorter sequences than the
    engine takes; ``progress`` is called as by ``build_engine``.

    Raises EngineError, IncompatibleEngine for an engine of a kind that is not served, TapError, CheckpointError.
    """
    folder = Path(engine_path)
    engine = read_upstream_engine(folder)
    is_named = check_outputs(folder / PLAN, _inputs(engine))
    if (folder / FILE_NAME).exists():
        raise ContractError(
            f"'{folder}' is adopted already",
            expected=f"no {FILE_NAME}",
            found=FILE_NAME,
            fix="remove it to adopt the engine again",
        )
    with open_checkpoint(checkpoint_path) as checkpoint:
        _check_same_model(engine, checkpoint.architecture)
        chosen = upstream_taps(taps, checkpoint.architecture.num_layers)
        limits = _limits(engine, checkpoint.architecture, max_seq_len)
        _write_tokenizer(checkpoint, folder)
        canaries = make_canaries(
            checkpoint,
            chosen,
            engine.precision,
            lambda done, total: progress and progress("canaries", done, total),
            max_seq_len=limits.max_seq_len,
        )
        contract = _contract(engine, folder, checkpoint, chosen, limits, compute_capability, platform, canaries)
        with _writing(folder):
            write_contract(folder, contract)
    return _adoption(engine, contract, is_named)


def check_outputs(plan: Path, inputs: tuple[TensorSpec, ...]) -> bool:
    """Look for our outputs' names in a plan's bytes; False when a plan does not show its names, and nothing is known.

    Plans seen so far hold the names of their tensors in clear, so a plan that shows every input's name and not ours was
    built without the patch: raises IncompatibleEngine.
    """
    with open(plan, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if any(content.find(tensor.name.encode()) < 0 for tensor in inputs):
            return False
        missing = [name for name in (ALL_ROWS, LAST_ROWS) if content.find(name.encode()) < 0]
    if missing:
        raise IncompatibleEngine(
            f"'{plan}' was built without the patch: it has no hidden states among its outputs",
            expected=f"outputs {ALL_ROWS} and {LAST_ROWS}",
            found=f"no {' and no '.join(missing)}, and the names of all its inputs",
            fix="run `trtllm-extract patch apply` in the environment of trtllm-build, and build the engine again",
        )
    return True


ALL_ROWS, LAST_ROWS = (Tap(0, "post", rows).column(0) for rows in ("all", "last"))  # the patch's names of its outputs


def _inputs(engine: UpstreamEngine) -> tuple[TensorSpec, ...]:
    """The inputs of a packed engine without a cache: ten, nine before 0.15. ``host_*`` are read by the CPU at enqueue."""
    num_layers = engine.model["num_hidden_layers"]
    progress = [("host_context_progress", "int64", (1,))] if engine.version >= _CONTEXT_PROGRESS_FROM else []
    declared = [
        ("input_ids", "int32", ("T",)),
        ("position_ids", "int32", ("T",)),
        ("last_token_ids", "int32", ("B",)),
        ("context_lengths", "int32", ("B",)),
        ("host_context_lengths", "int32", ("B",)),
        ("host_request_types", "int32", ("B",)),
        ("host_max_attention_window_sizes", "int32", (num_layers,)),
        ("host_sink_token_length", "int32", (1,)),
        ("host_runtime_perf_knobs", "int64", (_NUM_PERF_KNOBS,)),
        *progress,
    ]
    return tuple(
        TensorSpec(name, "input", dtype, shape, "host" if name.startswith("host_") else "device")
        for name, dtype, shape in declared
    )


def _outputs(engine: UpstreamEngine) -> tuple[TensorSpec, ...]:
    num_layers, hidden_size = engine.model["num_hidden_layers"], engine.model["hidden_size"]
    return (
        TensorSpec("logits", "output", engine.model["logits_dtype"], ("B", engine.model["vocab_size"])),
        TensorSpec(ALL_ROWS, "output", engine.dtype, ("T", hidden_size), tap=Tap(num_layers, "post", "all")),
        TensorSpec(LAST_ROWS, "output", engine.dtype, ("B", hidden_size), tap=Tap(num_layers, "post", "last")),
    )


def _check_same_model(engine: UpstreamEngine, architecture: Architecture) -> None:
    name = engine.model.get("architecture")
    if name not in _ARCHITECTURES[architecture.family]:
        raise IncompatibleEngine(
            f"the engine's model is a {name}, the checkpoint's a {architecture.family}",
            expected=" or ".join(_ARCHITECTURES[architecture.family]),
            found=name,
            fix="name the checkpoint that the engine was made from; classes with a forward of their own are not served",
        )
    sizes = {theirs: (engine.model.get(theirs), getattr(architecture, ours)) for theirs, ours in _SIZES.items()}
    wrong = {size: values for size, values in sizes.items() if values[0] is not None and values[0] != values[1]}
    if wrong:
        raise IncompatibleEngine(
            "the engine was made from another checkpoint",
            expected=", ".join(f"{size} {theirs}" for size, (theirs, _) in wrong.items()),
            found=", ".join(f"{size} {ours}" for size, (_, ours) in wrong.items()),
            fix="name the checkpoint that the engine was made from",
        )


def _limits(engine: UpstreamEngine, architecture: Architecture, max_seq_len: int | None) -> Limits:
    """The engine's limits, or a shorter ``max_seq_len``. A longer sequence than the model's would be wrong silently."""
    built, max_batch_size = engine.build["max_seq_len"], engine.build["max_batch_size"]
    served = built if max_seq_len is None else max_seq_len
    longest, bound = min((built, "the engine's own"), longest_exact(architecture))
    if not 1 <= served <= longest:
        raise IncompatibleEngine(
            "the sequences would be longer than the engine takes, or than the model can be run at exactly",
            expected=f"max_seq_len from 1 to {longest} tokens: {bound}",
            found=f"{served} tokens",
            fix=f"adopt it with --max-seq-len {longest} or less",
        )
    return Limits(
        max_num_tokens=engine.build["max_num_tokens"],
        max_batch_size=max_batch_size,
        max_seq_len=served,
        max_padded_tokens=max_batch_size * served,  # nothing is padded: no further bound
        opt_num_tokens=engine.build["opt_num_tokens"],
    )


def _write_tokenizer(checkpoint: Checkpoint, folder: Path) -> None:
    """Put the tokenizer's files beside the engine. Raises EngineError when others lie there."""
    with _writing(folder), tempfile.TemporaryDirectory(prefix=".tokenizer-", dir=folder) as part:
        checkpoint.tokenizer().save(Path(part))
        for name in TOKENIZER_FILES:
            ours, there = Path(part) / name, folder / name
            if there.exists() and there.read_bytes() != ours.read_bytes():
                raise EngineError(
                    f"'{folder}' holds another {name}",
                    expected=f"no {name}, or that of the checkpoint",
                    found="other bytes",
                    fix="remove it, or name the checkpoint that it belongs to",
                )
            os.replace(ours, there)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EngineError(
            f"'{folder}' cannot be written to",
            expected="an engine directory that takes a contract and a tokenizer beside the engine",
            found=error,
            fix="copy the directory to a place of your own, or free some space",
        ) from error


def _contract(
    engine: UpstreamEngine,
    folder: Path,
    checkpoint: Checkpoint,
    taps: tuple[Tap, ...],
    limits: Limits,
    compute_capability: str,
    platform: str,
    canaries: tuple,
) -> Contract:
    tensors = (*_inputs(engine), *_outputs(engine))
    files = tuple(
        EngineFile(path.name, path.stat().st_size, file_fingerprint(path))
        for path in sorted(folder.iterdir())
        if path.name in (CONFIG, PLAN, *TOKENIZER_FILES)
    )
    on_device = [tensor for tensor in tensors if tensor.location == "device"]
    return Contract(
        model_name=checkpoint.name,
        architecture=checkpoint.architecture,
        fingerprints=Fingerprints(
            checkpoint=checkpoint.fingerprint(),
            tokenizer=checkpoint.tokenizer().fingerprint(),
            recipe=fingerprint(engine.build),
            plan=next(file.sha256 for file in files if file.name == PLAN),
        ),
        backend="trt",
        builder=BUILDER,
        builder_version=str(engine.version),
        accepted_runtime=f"{BUILDER}=={engine.version}",
        platform=platform,
        compute_capabilities=(compute_capability,),
        weight_dtype="float8_e4m3fn" if engine.quantisation else engine.dtype,
        activation_dtype=engine.precision,
        taps=taps,
        tensors=tensors,
        limits=limits,
        memory=MemoryEstimate(
            device_bytes=(folder / PLAN).stat().st_size + slot_bytes(on_device, limits),
            host_bytes=slot_bytes(tensors, limits),
            formula="device: plan file + inputs and outputs at the limits, activations not known before it is loaded; "
            "host: inputs and outputs at the limits, per slot",
        ),
        files=files,
        canaries=canaries,
        build={"build_config": engine.build, "quantisation": engine.quantisation},
    )


def _adoption(engine: UpstreamEngine, contract: Contract, is_named: bool) -> Adoption:
    checked = [
        f"config.json: no cache, one GPU, packed prompts, {len(_inputs(engine))} inputs by version {engine.version}",
        "the checkpoint's sizes are those of the engine",
    ]
    at_load = [
        "every tensor's name, type and shape, the hidden states among the outputs",
        f"compute capability {contract.compute_capabilities[0]}, as you said, and TensorRT's own version",
        "the gather convention, by measurement",
        f"{len(contract.canaries)} canaries, from {contract.canaries[0].source}",
    ]
    if is_named:
        checked.append(f"the plan holds the names {ALL_ROWS} and {LAST_ROWS}")
    else:
        at_load.append("whether the engine was built with the patch: this plan does not show its tensors' names")
    warnings = []
    if contract.limits.opt_num_tokens < contract.limits.max_num_tokens // 2:
        warnings.append(
            f"the engine is fastest at {contract.limits.opt_num_tokens} tokens a batch, far from its most, "
            f"{contract.limits.max_num_tokens}: build it with --opt_num_tokens near what a batch holds"
        )
    return Adoption(contract, tuple(checked), tuple(at_load), tuple(warnings))
