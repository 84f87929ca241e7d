"""A stand-in for the runtime half of TensorRT's API: the calls that the backend makes, refused as the library refuses.

It is stricter than the library. A plan is a header and an ONNX graph, which ONNX Runtime runs in the order of the
stand-in driver's stream: device addresses are not host addresses, and what is bound to the wrong kind, not again since
the last batch, or before the last shape, is refused. ``host_*`` inputs are read at enqueue, all others in stream order.
"""

from __future__ import annotations

import ctypes
import enum
import itertools
import json
import struct
from dataclasses import dataclass, field
from types import ModuleType

import numpy as np
import onnxruntime

DEVICE_BIT = 1 << 62  # of every device address of the stand-in driver

HEADER = struct.Struct("<4sIQQ")  # magic, zero, size of the plan, size of the description


@dataclass
class PlanFacts:
    """What a plan says of itself. Tensors: name to (mode, dtype, shape of sizes and symbols), in the plan's order."""

    version: str
    capability: str
    tensors: dict[str, tuple[str, str, list[int | str]]]
    profiles: list[dict[str, tuple[int, int, int]]]  # by symbol: smallest, best, largest
    is_upstream: bool = False  # attention's indices come from context_lengths, in its plugin
    on_host: list[str] = field(default_factory=list)  # what the library itself reads on the host


def plan_bytes(facts: PlanFacts, graph: bytes, magic: bytes) -> bytes:
    described = json.dumps(vars(facts)).encode()
    size = HEADER.size + len(described) + len(graph)
    return HEADER.pack(magic, 0, size, len(described)) + described + graph


class DataType(enum.Enum):
    FLOAT, HALF, BF16, INT32, INT64 = "float32", "float16", "bfloat16", "int32", "int64"


class TensorIOMode(enum.Enum):
    NONE, INPUT, OUTPUT = "none", "input", "output"


class TensorLocation(enum.Enum):
    DEVICE, HOST = "device", "host"


class ExecutionContextAllocationStrategy(enum.Enum):
    STATIC, ON_PROFILE_CHANGE, USER_MANAGED = range(3)


class ILogger:
    class Severity(enum.Enum):
        INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)

    INTERNAL_ERROR, ERROR, WARNING = Severity.INTERNAL_ERROR, Severity.ERROR, Severity.WARNING

    def log(self, severity, message):
        raise NotImplementedError("must be overridden")


def make_library(driver, name: str, version: str, magic: bytes, capability: str = "12.0") -> ModuleType:
    """A module that a backend imports in the library's place. ``failures`` maps a call to the words it fails with;
    ``calls`` and ``inputs`` record what was called, and what each batch was given."""
    library = ModuleType(name)
    library.__version__ = version
    library.failures, library.calls, library.inputs, library.num_runtimes = {}, [], [], 0
    library.driver, library.magic, library.capability = driver, magic, capability
    for shared in (DataType, TensorIOMode, TensorLocation, ExecutionContextAllocationStrategy, ILogger):
        setattr(library, shared.__name__, shared)

    class Runtime(_Runtime):
        def __init__(self, logger):
            super().__init__(library, logger)

    library.Runtime = Runtime
    return library


class _Runtime:
    def __init__(self, library, logger):
        library.num_runtimes += 1
        self.library, self.logger = library, logger

    def deserialize_cuda_engine(self, serialized_engine):
        library, content = self.library, bytes(serialized_engine)
        facts = graph = None
        if words := library.failures.get("deserialize_cuda_engine"):
            return self._refuse(words)
        if len(content) < HEADER.size or content[:4] != library.magic:
            return self._refuse(f"Magic tag does not match: expected {library.magic!r}, got {content[:4]!r}")
        _, _, size, described = HEADER.unpack_from(content)
        if size != len(content):
            return self._refuse(f"Serialized engine has {len(content)} bytes, header says {size}")
        facts = PlanFacts(**json.loads(content[HEADER.size : HEADER.size + described]))
        graph = content[HEADER.size + described :]
        if facts.version != library.__version__:
            return self._refuse(f"The engine plan file expects library version {facts.version}, got {library.__version__}")
        if facts.capability != library.capability:
            return self._refuse(f"The engine was generated for compute {facts.capability}, this is {library.capability}")
        return _Engine(library, self.logger, facts, graph)

    def _refuse(self, words):
        self.logger.log(ILogger.Severity.WARNING, "not an error: never shown")
        self.logger.log(ILogger.Severity.ERROR, words)
        return None


class _Engine:
    def __init__(self, library, logger, facts, graph):
        self.library, self.logger, self.facts = library, logger, facts
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.graph = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        self.num_io_tensors = len(facts.tensors)
        self.num_optimization_profiles = len(facts.profiles)
        self.device_memory_size_v2 = 12345

    def get_tensor_name(self, index):
        return list(self.facts.tensors)[index]

    def get_tensor_shape(self, name):
        return [size if isinstance(size, int) else -1 for size in self.facts.tensors[name][2]]

    def get_tensor_dtype(self, name):
        return DataType(self.facts.tensors[name][1])

    def get_tensor_mode(self, name):
        return TensorIOMode(self.facts.tensors[name][0])

    def get_tensor_location(self, name):
        return TensorLocation.HOST if name in self.facts.on_host else TensorLocation.DEVICE

    def get_tensor_profile_shape(self, name, profile_index):
        sizes = self.facts.profiles[profile_index]
        shape = self.facts.tensors[name][2]
        return [[size if isinstance(size, int) else sizes[size][i] for size in shape] for i in range(3)]

    def create_execution_context(self, strategy):
        assert strategy is ExecutionContextAllocationStrategy.STATIC
        if words := self.library.failures.get("create_execution_context"):
            self.logger.log(ILogger.Severity.INTERNAL_ERROR, words)
            return None
        return _Context(self)


class _Context:
    def __init__(self, engine):
        self.engine, self.library = engine, engine.library
        self.profile = 0
        self.shapes = {}
        self.addresses = {}  # name to (address, when it was bound); emptied by every batch
        self.clock = itertools.count()
        self.last_shape = -1

    def set_optimization_profile_async(self, profile_index, stream_handle):
        if not self._begins("set_optimization_profile_async", profile_index):
            return False
        if not 0 <= profile_index < self.engine.num_optimization_profiles or not stream_handle:
            return self._refuse(f"profile {profile_index} on stream {stream_handle}")
        self.profile = profile_index
        self.shapes.clear()
        return True

    def set_input_shape(self, name, shape):
        if not self._begins("set_input_shape", name):
            return False
        low, _, high = self.engine.get_tensor_profile_shape(name, self.profile)
        if len(shape) != len(low) or any(not a <= size <= b for a, size, b in zip(low, shape, high)):
            return self._refuse(f"{name} {list(shape)} is outside of [{low}, {high}] of profile {self.profile}")
        self.shapes[name] = tuple(shape)
        self.last_shape = next(self.clock)
        return True

    def get_tensor_shape(self, name):
        mode, _, shape = self.engine.facts.tensors[name]
        sizes = {} if mode == "input" else self._sizes() or {}
        return [size if isinstance(size, int) else sizes.get(size, -1) for size in shape]

    def set_tensor_address(self, name, memory):
        if not self._begins("set_tensor_address", name):
            return False
        if name not in self.engine.facts.tensors or not memory:
            return self._refuse(f"address {memory} for {name}")
        self.addresses[name] = (memory, next(self.clock))
        return True

    def execute_async_v3(self, stream_handle):
        if not self._begins("execute_async_v3", stream_handle):
            return False
        tensors = self.engine.facts.tensors
        unset = [n for n, (mode, _, _) in tensors.items() if mode == "input" and n not in self.shapes]
        if unset:
            return self._refuse(f"shapes of {unset} are not set")
        for name in tensors:
            memory, when = self.addresses.get(name, (0, -1))
            if not memory:
                return self._refuse(f"the address of {name} is stale or was never set")
            if when < self.last_shape:
                return self._refuse(f"the address of {name} was bound before the last shape change")
            if bool(memory & DEVICE_BIT) == name.startswith("host_"):
                return self._refuse(f"{name} is bound to {memory:#x}, which is memory of the other side")
        sizes = self._sizes()
        if sizes is None:
            return False
        addresses = {name: memory for name, (memory, _) in self.addresses.items()}
        self.addresses.clear()
        on_host = {
            name: _array(address, self._shape(name, sizes), tensors[name][1]).copy()
            for name, address in addresses.items()
            if name.startswith("host_")
        }
        self.library.driver.launch(stream_handle, lambda: self._kernel(addresses, sizes, on_host))
        return True

    def _kernel(self, addresses, sizes, on_host):
        bound = {}
        for name, address in addresses.items():
            if name in on_host:
                continue
            dtype, shape = self.engine.facts.tensors[name][1], self._shape(name, sizes)
            num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
            bound[name] = _array(self.library.driver.resolve(address, num_bytes), shape, dtype)
        tensors = self.engine.facts.tensors
        inputs = {name: array for name, array in bound.items() if tensors[name][0] == "input"}
        self.library.inputs.append({name: array.copy() for name, array in {**inputs, **on_host}.items()})
        if self.engine.facts.is_upstream:
            inputs |= _attention_indices(inputs["context_lengths"])
        names = {value.name for value in self.engine.graph.get_inputs()}
        outputs = [value.name for value in self.engine.graph.get_outputs()]
        rows = self.engine.graph.run(outputs, {name: inputs[name] for name in names})
        for name, mode in ((name, mode) for name, (mode, _, _) in tensors.items()):
            if mode == "output":
                bound[name][...] = rows[outputs.index(name)] if name in outputs else np.nan  # nobody reads the logits

    def _sizes(self):
        """T, B and S by the inputs' shapes; None and words where two disagree."""
        sizes = {}
        for name, given in self.shapes.items():
            for symbol, size in zip(self.engine.facts.tensors[name][2], given):
                if isinstance(symbol, str) and sizes.setdefault(symbol, size) != size:
                    return self._refuse(f"{symbol} is {sizes[symbol]} elsewhere, {size} in {name}") or None
        return sizes

    def _shape(self, name, sizes):
        return tuple(size if isinstance(size, int) else sizes[size] for size in self.engine.facts.tensors[name][2])

    def _begins(self, call, argument):
        self.library.calls.append((call, argument))
        words = self.library.failures.get(call)
        return not words or self._refuse(words)

    def _refuse(self, words):
        self.engine.logger.log(ILogger.Severity.ERROR, words)
        return False


def _array(address, shape, dtype):
    num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype).reshape(shape)


def _attention_indices(lengths):
    """What upstream's attention plugin makes of the lengths: here, what our graph takes instead of a plugin."""
    starts, longest = np.cumsum(lengths) - lengths, int(lengths.max())
    rows = np.stack([start + np.minimum(np.arange(longest), length - 1) for start, length in zip(starts, lengths)])
    slots = np.concatenate([i * longest + np.arange(length) for i, length in enumerate(lengths)])
    return {"attention_rows": rows.astype(np.int32), "packed_slots": slots.astype(np.int32)}
