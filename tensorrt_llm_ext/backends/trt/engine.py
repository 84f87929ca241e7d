"""TrtEngine: a plan that is loaded, with its one execution context, behind the backends' protocol."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from tensorrt_llm_ext.backends.trt.profiles import Shape, check_profiles, choose, read_profiles
from tensorrt_llm_ext.backends.trt.tensors import read_tensors
from tensorrt_llm_ext.errors import BackendError, ExtractionError, OutOfMemory
from tensorrt_llm_ext.recipes.contract import Contract, TensorSpec

_REPORT = "this is a defect of the runtime: keep the input and report it"


class TrtEngine:
    """Binds and enqueues batches. Not thread-safe: the runtime keeps the steps of a batch together.

    The context's memory is the library's own (strategy STATIC): allocated once, when the engine is opened, for its
    largest profile. Nothing is allocated per batch, and nothing is captured: upstream's plugins read ``host_*`` inputs
    while a batch is enqueued.
    """

    def __init__(self, trt: ModuleType, log: Any, runtime: Any, engine: Any, contract: Contract) -> None:
        """Take over a deserialised engine. Raises IncompatibleEngine, ContractError, OutOfMemory, BackendError."""
        self._tensors = read_tensors(trt, engine, contract)
        self._profiles = read_profiles(engine, self._tensors)
        check_profiles(self._profiles, self._tensors, contract)
        self._inputs = {tensor.name: tensor for tensor in self._tensors if tensor.role == "input"}
        self._outputs = {tensor.name: tensor for tensor in self._tensors if tensor.role == "output"}
        self._log = log
        self._context: Any = _context(trt, log, engine)
        self._engine: Any = engine
        self._runtime: Any = runtime
        self._active: int | None = None  # the profile that is selected
        self._shapes: dict[str, Shape] = {}
        self._addresses: dict[str, int] = {}

    def tensors(self) -> tuple[TensorSpec, ...]:
        return self._tensors

    def set_shape(self, name: str, shape: Shape) -> None:
        if name not in self._inputs or not any(bounds.hold(name, shape) for bounds in self._profiles):
            raise BackendError(
                f"the plan has no input '{name}' of this shape",
                expected="; ".join(bounds.words(known) for known in self._inputs for bounds in self._profiles),
                found=f"{name} {list(shape)}",
                fix=_REPORT,
            )
        self._shapes[name] = tuple(shape)

    def set_address(self, name: str, address: int) -> None:
        self._addresses[name] = address

    def enqueue(self, stream: int) -> None:
        self._check_bound(stream)
        shapes, self._shapes = self._shapes, {}
        addresses, self._addresses = self._addresses, {}
        profile = choose(self._profiles, shapes)
        with self._named_errors():
            self._select(profile, stream)
            for name, shape in shapes.items():
                self._require(self._context.set_input_shape(name, shape), f"shape {list(shape)} for {name}")
            self._check_outputs(shapes)
            for name, address in addresses.items():
                self._require(self._context.set_tensor_address(name, address), f"address {address:#x} for {name}")
            self._require(self._context.execute_async_v3(stream), "the batch")

    def close(self) -> None:
        self._context = self._engine = self._runtime = None  # in this order: each needs the next

    def _check_bound(self, stream: int) -> None:
        missing = {*self._inputs} - {*self._shapes} | {*self._inputs, *self._outputs} - {*self._addresses}
        if self._context is not None and not missing and stream:
            return
        found = "stream 0" if not stream else f"nothing for {', '.join(sorted(missing))}"
        raise BackendError(
            "a batch was enqueued on an engine that is closed or not fully bound",
            expected="a CUDA stream; since the last enqueue a shape for every input, an address for every tensor",
            found="a closed engine" if self._context is None else found,
            fix=_REPORT,
        )

    def _select(self, profile: int, stream: int) -> None:
        if profile == self._active:
            return
        self._active = None  # unknown, if the library refuses
        is_selected = self._context.set_optimization_profile_async(profile, stream)
        self._require(is_selected, f"profile {profile}")
        self._active = profile

    def _check_outputs(self, shapes: dict[str, Shape]) -> None:
        """Raise BackendError before an output is written beyond its place: in a plan T and B look alike."""
        sizes = {
            symbol: size
            for name, shape in shapes.items()
            for symbol, size in zip(self._inputs[name].shape, shape)
            if isinstance(symbol, str)
        }
        for name, tensor in self._outputs.items():
            wanted = tuple(sizes[size] if isinstance(size, str) else size for size in tensor.shape)
            found = tuple(self._context.get_tensor_shape(name))
            if found != wanted:
                raise BackendError(
                    f"the plan would write '{name}' in another shape than the contract says",
                    expected=list(wanted),
                    found=f"{list(found)}; TensorRT says: {self._log.take()}",
                    fix="contract and plan are from different builds, or the inputs' sizes disagree: build it again",
                )

    def _require(self, is_accepted: bool, what: str) -> None:
        if not is_accepted:
            raise _refused(what, self._log.take())

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except ExtractionError:
            raise
        except Exception as error:  # the bindings raise RuntimeError and TypeError
            raise _refused("the batch", f"{error}; {self._log.take()}") from error


def _refused(what: str, words: str) -> BackendError:
    return BackendError(
        f"TensorRT refuses {what}",
        expected="a batch that runs",
        found=words,
        fix="read the library's words above; keep the input and report it if they name none of your files",
    )


def _context(trt: ModuleType, log: Any, engine: Any) -> Any:
    context = engine.create_execution_context(trt.ExecutionContextAllocationStrategy.STATIC)
    if context is None:
        raise OutOfMemory(
            "TensorRT cannot make room to run the engine",
            expected=f"{engine.device_memory_size_v2:,} bytes of device memory, besides the weights",
            found=log.take(),
            fix="end what else uses the card, or build the engine with a lower --max-batch-size or --max-seq-len",
        )
    return context
