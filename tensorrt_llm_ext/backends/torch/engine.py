"""TorchEngine: a decoder on its device behind the backends' protocol, and the backend that opens it."""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import torch

from tensorrt_llm_ext.backends.torch import cublaslt, plain
from tensorrt_llm_ext.backends.torch.decoder import Decoder, forward, run_products, with_table
from tensorrt_llm_ext.backends.torch.graphs import Graphs
from tensorrt_llm_ext.backends.torch.loading import load_decoder
from tensorrt_llm_ext.backends.torch.memory import tensor_at
from tensorrt_llm_ext.backends.torch.sizes import bucket, engine_bytes, has_table, is_launch_bound, launches, warm_up_batches
from tensorrt_llm_ext.backends.torch.tensors import STREAM_DTYPES, engine_tensors
from tensorrt_llm_ext.backends.torch.tuning import choose_algorithms
from tensorrt_llm_ext.backends.torch.values import Batch
from tensorrt_llm_ext.backends.torch.weight_index import WeightIndex, read_weight_index
from tensorrt_llm_ext.backends.torch.workspace import Workspace, make_workspace
from tensorrt_llm_ext.errors import BackendError, IncompatibleEngine, OutOfMemory
from tensorrt_llm_ext.graph import names
from tensorrt_llm_ext.recipes.contract import Contract, TensorSpec

FP8_SINCE = (8, 9)  # compute capability: the first cards with e4m3 products
BFLOAT16_SINCE = (8, 0)

_WARMING_UP = threading.Lock()
"""Held while an engine warms up: another that synchronised the device meanwhile would end the capture of a graph."""

_REPORT = "this is a defect of the runtime: keep the input and report it"


class TorchBackend:
    """Opens a torch engine on the first CUDA card, or on the CPU where the contract names no card."""

    name = "torch"

    def runtime(self, contract: Contract) -> tuple[str, str]:
        return "torch", torch.__version__.partition("+")[0]  # without the build's CUDA version

    def open(self, path: Path, contract: Contract, *, num_threads: int | None) -> TorchEngine:
        """See ``Backend.open``. Raises OutOfMemory with the numbers, too; nothing is left behind then."""
        device = _device(path, contract)
        index = read_weight_index(path)
        dtype = getattr(torch, STREAM_DTYPES[contract.activation_dtype])
        if num_threads is not None and device.type == "cpu":
            torch.set_num_threads(num_threads)
        needed = _needed_bytes(contract, index, dtype)
        if device.type == "cuda":
            _check_memory(path, contract, device, needed)
        try:
            with torch.inference_mode():
                decoder = load_decoder(
                    path,
                    index,
                    contract.architecture,
                    num_layers=max(tap.layer for tap in contract.taps),
                    max_seq_len=contract.limits.max_seq_len,
                    dtype=dtype,
                    is_fp8=contract.activation_dtype == "fp8",
                    device=device,
                )
                space = make_workspace(contract.architecture, contract.limits, dtype, device, index.is_deterministic)
                engine = TorchEngine(contract, decoder, space, device)
                engine.warm_up()
        except RuntimeError as error:
            if not _is_of_memory(error):
                raise
            traceback.clear_frames(error.__traceback__)  # what was loaded is freed before the cache is
            decoder = space = engine = None  # noqa: F841
            torch.cuda.empty_cache()
            raise _out_of_memory(path, contract, needed, error) from error
        return engine


class TorchEngine:
    """A decoder, its buffers, and what is bound for the next batch. Not thread-safe: the runtime's one stream calls it."""

    def __init__(self, contract: Contract, decoder: Decoder, space: Workspace, device: torch.device) -> None:
        self._limits = contract.limits
        self._architecture = contract.architecture
        self._taps = {tap.column(contract.architecture.num_layers): tap for tap in contract.taps}
        self._tensors = {
            tensor.name: tensor
            for tensor in engine_tensors(contract.architecture, contract.taps, contract.activation_dtype)
        }
        self._decoder: Decoder | None = decoder
        self._space: Workspace | None = space
        self._device = device
        self._operations = _operations(device)
        self._graphs = Graphs() if device.type == "cuda" else None
        self._is_deterministic = space.step is not None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}

    def tensors(self) -> tuple[TensorSpec, ...]:
        return tuple(self._tensors.values())

    def set_shape(self, name: str, shape: tuple[int, ...]) -> None:
        bounds = {"T": self._limits.max_num_tokens, "B": self._limits.max_batch_size}
        spec = self._tensors.get(name)
        if spec is None or spec.role != "input" or len(shape) != 1 or not 1 <= shape[0] <= bounds[spec.shape[0]]:
            wanted = (f"{t.name} [1 to {bounds[t.shape[0]]}]" for t in self._tensors.values() if t.role == "input")
            raise BackendError(
                f"the engine has no input '{name}' of this shape",
                expected="; ".join(wanted),
                found=f"{name} {list(shape)}",
                fix=_REPORT,
            )
        self._shapes[name] = tuple(shape)

    def set_address(self, name: str, address: int) -> None:
        self._addresses[name] = address

    def enqueue(self, stream: int) -> None:
        batch = self._bound()
        try:
            with torch.inference_mode():
                if self._device.type == "cpu":
                    self._forward(batch)
                else:
                    with torch.cuda.stream(torch.cuda.ExternalStream(stream, self._device)):
                        self._forward(batch)
        except Exception as error:  # torch, Triton and the libraries beneath share no base class
            raise _failed(error, _device_error(error, stream, self._device)) from error

    def run_products(self, num_tokens: Sequence[int]) -> None:
        """Do of batches of so many tokens the matrix products of every layer alone, over what the last one left, and wait for them."""
        with torch.inference_mode():
            for count in num_tokens:
                run_products(self._operations, self._decoder, self._space.of(count))
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def warm_up(self) -> None:
        """Choose the products' algorithms, make the first layer's table, run every shape of a product once, and every kernel, and
        capture the graphs: nothing is compiled, loaded or captured after this."""
        if self._device.type == "cpu":
            return
        with _WARMING_UP, torch.cuda.stream(torch.cuda.Stream(self._device)):
            torch.cuda.synchronize(self._device)
            if not is_launch_bound(self._architecture, len(self._space.x)):
                choose_algorithms(self._decoder, self._space.of(min(self._limits.max_num_tokens, cublaslt.REFERENCE_ROWS)))
            if self._decoder.qkv_of_token is None and has_table(tuple(self._taps.values())):
                self._decoder = with_table(self._operations, self._decoder, self._space)
            for num_tokens, batch_size in warm_up_batches(self._limits, self._is_deterministic):
                self._forward(self._even_batch(num_tokens, batch_size))
            for num_tokens, batch_size, longest in launches(self._limits, self._is_deterministic):
                if is_launch_bound(self._architecture, bucket(num_tokens, self._is_deterministic)):
                    batch = replace(self._even_batch(num_tokens, batch_size), longest=longest)
                    forward(self._operations, self._decoder, self._space, batch, self._graphs.capture)
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        was_open = self._decoder is not None
        self._decoder = self._space = self._graphs = None
        if was_open and self._device.type == "cuda":
            with contextlib.suppress(torch.AcceleratorError):  # of a device that failed: its memory went with its context
                torch.cuda.empty_cache()

    def _forward(self, batch: Batch) -> None:
        forward(self._operations, self._decoder, self._space, batch, None if self._graphs is None else self._graphs.run)

    def _bound(self) -> Batch:
        inputs = {name for name, tensor in self._tensors.items() if tensor.role == "input"}
        missing = (inputs - {*self._shapes}) | ({*self._tensors} - {*self._addresses})
        if missing or self._decoder is None:
            raise BackendError(
                "a batch was enqueued on an engine that is closed or not fully bound",
                expected="a shape for every input and an address for every tensor since the last enqueue",
                found="a closed engine" if self._decoder is None else f"nothing for {', '.join(sorted(missing))}",
                fix=_REPORT,
            )
        sizes = {"T": self._shapes[names.INPUT_IDS][0], "B": self._shapes[names.SEQUENCE_LENGTHS][0]}
        bound = {name: self._at(tensor, self._addresses[name], sizes) for name, tensor in self._tensors.items()}
        self._shapes.clear()
        self._addresses.clear()
        return self._batch(bound)

    def _at(self, tensor: TensorSpec, address: int, sizes: dict[str, int]) -> torch.Tensor:
        shape = tuple(sizes.get(size, size) for size in tensor.shape)
        device = self._device if tensor.location == "device" else torch.device("cpu")
        return tensor_at(address, shape, getattr(torch, tensor.dtype), device)

    def _batch(self, bound: dict[str, torch.Tensor]) -> Batch:
        return Batch(
            input_ids=bound[names.INPUT_IDS],
            sequence_lengths=bound[names.SEQUENCE_LENGTHS],
            last_token_ids=bound.get(names.LAST_TOKEN_IDS),
            longest=int(bound[names.HOST_LENGTHS].max()),
            outputs={tap: bound[name] for name, tap in self._taps.items()},
        )

    def _even_batch(self, num_tokens: int, batch_size: int) -> Batch:
        """A batch of our own: sequences of nearly equal length, of token 0."""
        lengths = torch.full((batch_size,), num_tokens // batch_size, dtype=torch.int32)
        lengths[: num_tokens % batch_size] += 1
        values = {
            names.INPUT_IDS: torch.zeros(num_tokens, dtype=torch.int32),
            names.SEQUENCE_LENGTHS: lengths,
            names.HOST_LENGTHS: lengths,
            names.LAST_TOKEN_IDS: lengths.cumsum(0, dtype=torch.int32),
        }
        sizes = {"T": num_tokens, "B": batch_size}
        for name, tensor in self._tensors.items():
            if tensor.role == "output":
                values[name] = torch.empty([sizes.get(s, s) for s in tensor.shape], dtype=getattr(torch, tensor.dtype))
        return self._batch({name: self._placed(tensor, values[name]) for name, tensor in self._tensors.items()})

    def _placed(self, tensor: TensorSpec, values: torch.Tensor) -> torch.Tensor:
        return values.to(self._device) if tensor.location == "device" else values


def _operations(device: torch.device) -> ModuleType:
    if device.type == "cpu":
        return plain
    from tensorrt_llm_ext.backends.torch import kernels  # Triton comes with torch for CUDA alone

    return kernels


def _device(path: Path, contract: Contract) -> torch.device:
    """The device that the contract asks for. Raises IncompatibleEngine by the names of what is wanted and here."""
    wanted = contract.compute_capabilities
    if not wanted:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise _incompatible(
            path, wanted, "no CUDA card that torch can use", "run it on such a card, or build for 'cpu'"
        )
    capability = torch.cuda.get_device_capability()
    found = f"{torch.cuda.get_device_name()} of compute capability {capability[0]}.{capability[1]}"
    least = FP8_SINCE if contract.activation_dtype == "fp8" else BFLOAT16_SINCE
    if capability < least:
        raise IncompatibleEngine(
            f"the card is too old for the engine '{path}': it cannot compute in {contract.activation_dtype}",
            expected=f"compute capability {least[0]}.{least[1]} or newer",
            found=found,
            fix="build the engine in another precision, or use another card",
        )
    if f"{capability[0]}.{capability[1]}" not in wanted:
        raise _incompatible(path, wanted, found, "build the engine for this card: trtllm-extract build … --card …")
    return torch.device("cuda", torch.cuda.current_device())


def _incompatible(path: Path, wanted: tuple[str, ...], found: str, fix: str) -> IncompatibleEngine:
    return IncompatibleEngine(
        f"the engine '{path}' was built for another card",
        expected=f"compute capability {' or '.join(wanted)}",
        found=found,
        fix=fix,
    )


def _device_error(error: Exception, stream: int, device: torch.device) -> Exception | None:
    """What the device itself failed with: then every later call fails. None for an error of one call, as one of memory is."""
    if isinstance(error, torch.AcceleratorError) and not _is_of_memory(error):
        return error
    if device.type == "cpu":
        return None
    try:
        torch.cuda.ExternalStream(stream, device).query()
    except torch.AcceleratorError as lost:
        return lost
    return None


def _is_of_memory(error: Exception) -> bool:
    """Say whether torch ran out of memory, or the driver, which loads kernels and keeps graphs."""
    return isinstance(error, torch.OutOfMemoryError) or isinstance(error, RuntimeError) and "out of memory" in str(error)


def _failed(error: Exception, lost: Exception | None) -> BackendError | OutOfMemory:
    if lost is not None:
        return BackendError(
            "the device failed",
            expected="a batch that comes back",
            found=str(lost).partition("\n")[0],
            fix="see dmesg and nvidia-smi; start a new process, open a new session and resume the run",
        )
    if _is_of_memory(error):
        return OutOfMemory(
            "the device ran out of memory during a batch",
            expected="memory for what a batch takes besides weights and buffers",
            found=str(error).partition("\n")[0],
            fix="free device memory that others hold, or build with a lower max_num_tokens; resume the run",
        )
    return BackendError(
        "torch failed to run a batch",
        expected="a batch that comes back",
        found=error,
        fix="read the library's words above; keep the input and report it if they name none of your files",
    )


def _needed_bytes(contract: Contract, index: WeightIndex, dtype: torch.dtype) -> int:
    return engine_bytes(
        contract.architecture,
        contract.limits,
        contract.taps,
        index,
        item_bytes=dtype.itemsize,
        is_fp8=contract.activation_dtype == "fp8",
        on_card=bool(contract.compute_capabilities),
    )


def _check_memory(path: Path, contract: Contract, device: torch.device, needed: int) -> None:
    free, _ = torch.cuda.mem_get_info(device)
    if needed > free:
        raise _out_of_memory(
            path, contract, needed, f"{free / 1e9:.2f} GB free on {torch.cuda.get_device_name(device)}"
        )


def _out_of_memory(path: Path, contract: Contract, needed: int, found: object) -> OutOfMemory:
    limits = contract.limits
    return OutOfMemory(
        f"the engine '{path}' does not fit on the card",
        expected=f"{needed / 1e9:.2f} GB of device memory: weights, the first layer's table, and buffers for {limits.max_num_tokens} tokens",
        found=found,
        fix="free device memory, or build with a lower max_num_tokens"
        + ("" if contract.activation_dtype == "fp8" else " or in FP8"),
    )
