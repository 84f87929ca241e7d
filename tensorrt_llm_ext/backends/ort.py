"""Backend ``ort``: ONNX Runtime on any CPU, reading and writing memory of the runtime's where it lies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime

from tensorrt_llm_ext.errors import BackendError, EngineError
from tensorrt_llm_ext.graph.names import MODEL_FILE
from tensorrt_llm_ext.recipes.contract import Contract, TensorSpec

_DTYPES = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(bfloat16)": "bfloat16",
    "tensor(int32)": "int32",
    "tensor(int64)": "int64",
}
_SILENT = 4  # the library's log level "fatal": every error below comes as an exception, and is told there


class OrtBackend:
    """Opens model.onnx of an engine directory with ONNX Runtime's CPU provider."""

    name = "ort"

    def runtime(self, contract: Contract) -> tuple[str, str]:
        return "onnxruntime", onnxruntime.__version__

    def open(self, path: Path, contract: Contract, *, num_threads: int | None) -> OrtEngine:
        model = path / MODEL_FILE
        try:
            session = onnxruntime.InferenceSession(
                str(model), _session_options(num_threads), providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # the library's exceptions share no base class
            raise EngineError(
                f"ONNX Runtime cannot open '{model}'",
                expected=f"the model that {contract.builder} {contract.builder_version} wrote",
                found=error,
                fix="copy the engine directory again (`trtllm-extract probe --full` re-hashes it), or build it again",
            ) from error
        return OrtEngine(session)


class OrtEngine:
    """One ONNX Runtime session and its binding. Not thread-safe: the runtime's one stream calls it."""

    def __init__(self, session: onnxruntime.InferenceSession) -> None:
        self._session = session
        self._binding = session.io_binding()
        self._inputs = {value.name: _tensor_spec(value, "input") for value in session.get_inputs()}
        self._outputs = {value.name: _tensor_spec(value, "output") for value in session.get_outputs()}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}

    def tensors(self) -> tuple[TensorSpec, ...]:
        return (*self._inputs.values(), *self._outputs.values())

    def set_shape(self, name: str, shape: tuple[int, ...]) -> None:
        spec = self._inputs.get(name)
        fits = spec is not None and len(shape) == len(spec.shape)
        if not fits or any(isinstance(size, int) and size != given for size, given in zip(spec.shape, shape)):
            raise BackendError(
                f"the model has no input '{name}' of this shape",
                expected="; ".join(f"{tensor.name} {list(tensor.shape)}" for tensor in self._inputs.values()),
                found=f"{name} {list(shape)}",
                fix="this is a defect of the runtime: keep the input and report it",
            )
        self._shapes[name] = shape

    def set_address(self, name: str, address: int) -> None:
        self._addresses[name] = address

    def enqueue(self, stream: int) -> None:
        self._bind()
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:  # the library's exceptions share no base class
            raise BackendError(
                "ONNX Runtime failed to run a batch",
                expected="a batch that comes back",
                found=error,
                fix="read the library's words above; keep the input and report it if they name none of your files",
            ) from error
        finally:
            self._binding.clear_binding_inputs()
            self._binding.clear_binding_outputs()

    def close(self) -> None:
        self._binding = self._session = None

    def _bind(self) -> None:
        missing = {*self._inputs} - {*self._shapes} | {*self._inputs, *self._outputs} - {*self._addresses}
        if missing or self._session is None:
            raise BackendError(
                "a batch was enqueued on an engine that is closed or not fully bound",
                expected="a shape for every input and an address for every tensor since the last enqueue",
                found="a closed engine" if self._session is None else f"nothing for {', '.join(sorted(missing))}",
                fix="this is a defect of the runtime: keep the input and report it",
            )
        symbols: dict[str, int] = {}
        for name, spec in self._inputs.items():
            shape = self._shapes[name]
            symbols |= {symbol: size for symbol, size in zip(spec.shape, shape) if isinstance(symbol, str)}
            self._binding.bind_input(name, "cpu", 0, np.dtype(spec.dtype).type, shape, self._addresses[name])
        for name, spec in self._outputs.items():
            shape = tuple(symbols[size] if isinstance(size, str) else size for size in spec.shape)
            self._binding.bind_output(name, "cpu", 0, np.dtype(spec.dtype).type, shape, self._addresses[name])
        self._shapes.clear()
        self._addresses.clear()


def _session_options(num_threads: int | None) -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _SILENT
    options.enable_mem_pattern = False  # it keeps a plan for every shape ever seen, and every batch has its own shape
    if num_threads is not None:
        options.intra_op_num_threads = num_threads
    return options


def _tensor_spec(value: onnxruntime.NodeArg, role: str) -> TensorSpec:
    return TensorSpec(value.name, role, _DTYPES.get(value.type, value.type), tuple(value.shape))
