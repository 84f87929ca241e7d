"""A rig: arena, stream and a small engine that obeys the backend's protocol, put together as a session does it.

The engine's row of a token is a function of its id and its position, so a row that is not the right one is seen.
"""

import ctypes
import math
from collections.abc import Sequence

import numpy as np

from tensorrt_llm_ext import _runtime

HIDDEN = 8
VOCAB = 1000
LIMITS = {"vocab_size": VOCAB, "max_num_tokens": 256, "max_batch_size": 16, "max_seq_len": 64, "max_padded_tokens": 512}
TENSORS = [
    ("input_ids", "input", "int32", ("T",)),
    ("position_ids", "input", "int32", ("T",)),
    ("attention_rows", "input", "int32", ("B", "S")),
    ("packed_slots", "input", "int32", ("T",)),
    ("last_token_ids", "input", "int32", ("B",)),
    ("last", "output", "float32", ("B", HIDDEN)),
    ("all", "output", "float32", ("T", HIDDEN)),
]
NAMES = {name for name, *_ in TENSORS}
DTYPES = {name: dtype for name, _, dtype, _ in TENSORS}
STEPS = np.arange(HIDDEN, dtype=np.float32) / HIDDEN
DIGEST = bytes(range(16))
PATIENCE_S = 20.0


def rows_of(sequence: Sequence[int]) -> np.ndarray:
    """The right rows of a sequence, float32 [tokens, HIDDEN]."""
    ids, positions = np.asarray(sequence, dtype=np.float32), np.arange(len(sequence), dtype=np.float32)
    return (ids * 64 + positions)[:, None] + STEPS


def forward(arrays, steps=STEPS) -> None:
    """The model, in NumPy or in torch."""
    rows = (arrays["input_ids"] * 64.0 + arrays["position_ids"])[:, None] + steps
    arrays["all"][:] = rows
    arrays["last"][:] = rows[arrays["last_token_ids"] - 1]


class Engine:
    """Binds and runs by the protocol: every shape, then every address, then once, on ``device``."""

    def __init__(self, device) -> None:
        self._device = device
        self._shapes = {}
        self._addresses = {}
        self.num_runs = 0
        self.before = lambda: None  # called in the forward pass

    def set_shape(self, name: str, shape: tuple[int, ...]) -> None:
        self._shapes[name] = shape
        self._addresses.clear()  # an address bound before the last change of a shape is stale

    def set_address(self, name: str, address: int) -> None:
        self._addresses[name] = address

    def enqueue(self, stream: int) -> None:
        if set(self._shapes) != NAMES or set(self._addresses) != NAMES:
            raise RuntimeError(f"not bound since the last shape: {sorted(NAMES - set(self._addresses))}")
        bound = {name: (self._addresses[name], self._shapes[name]) for name in NAMES}
        self._shapes, self._addresses = {}, {}
        self._device.launch(stream, lambda: self._forward(bound))

    def _forward(self, bound) -> None:
        self.before()
        self.num_runs += 1
        self._device.forward({name: self._device.array(name, *where) for name, where in bound.items()})


class Host:
    """Runs in the worker of a host stream, on the slot itself."""

    forward = staticmethod(forward)

    def launch(self, stream: int, kernel) -> None:
        assert stream == 0
        kernel()

    def array(self, name: str, address: int, shape: tuple[int, ...]) -> np.ndarray:
        dtype = np.dtype(DTYPES[name])
        memory = (ctypes.c_char * (math.prod(shape) * dtype.itemsize)).from_address(address)
        return np.frombuffer(memory, dtype=dtype).reshape(shape)


class StandInDevice(Host):
    """Runs on the stand-in's threads, on its device addresses."""

    def __init__(self, stand_in) -> None:
        self._stand_in = stand_in

    def launch(self, stream: int, kernel) -> None:
        self._stand_in.launch(stream, kernel)

    def array(self, name: str, address: int, shape: tuple[int, ...]) -> np.ndarray:
        num_bytes = math.prod(shape) * np.dtype(DTYPES[name]).itemsize
        return super().array(name, self._stand_in.resolve(address, num_bytes), shape)


class Cuda:
    """Runs torch on a CUDA device, on memory that the runtime owns."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._steps = torch.as_tensor(STEPS, device="cuda")
        torch.cuda.synchronize()  # our streams have no order with the default stream

    def launch(self, stream: int, kernel) -> None:
        with self._torch.cuda.stream(self._torch.cuda.ExternalStream(stream)):
            kernel()

    def array(self, name: str, address: int, shape: tuple[int, ...]):
        typestr = np.dtype(DTYPES[name]).str
        interface = {"data": (address, False), "shape": shape, "typestr": typestr, "version": 2}
        return self._torch.as_tensor(type("Device", (), {"__cuda_array_interface__": interface})(), device="cuda")

    def forward(self, arrays) -> None:
        forward(arrays, self._steps)


class Rig:
    """Arena, stream and engine of one kind: "host", "stand_in" or "cuda"."""

    def __init__(self, kind: str, *, stand_in=None, num_slots: int = 2, first_value: int = 0) -> None:
        self.kind = kind
        self.stand_in = stand_in
        self.layout = _runtime.Layout(TENSORS, **LIMITS)
        self.driver = None if kind == "host" else _runtime.Driver(*([stand_in.path] if stand_in else []))
        self.arena = _runtime.PinnedArena(self.layout.slot_bytes, num_slots, self.driver)
        if kind == "host":
            self.stream = _runtime.HostStream(first_value=first_value)
        else:
            self.stream = _runtime.CudaStream(self.driver, self.layout.slot_bytes, first_value=first_value)
        self.engine = Engine({"host": Host, "cuda": Cuda}[kind]() if stand_in is None else StandInDevice(stand_in))
        self.num_batches = 0

    def pack(self, sequences, timeout_s: float = PATIENCE_S):
        slot = self.arena.acquire(timeout_s)
        token_ids = np.concatenate([np.asarray(sequence, dtype=np.int32) for sequence in sequences])
        offsets = np.cumsum([0, *map(len, sequences)], dtype=np.int32)
        _runtime.pack(self.layout, token_ids, offsets, slot, convention="prefix_sum", batch=self.num_batches, digest=DIGEST)
        self.num_batches += 1
        return slot

    def bind(self, slot) -> None:
        tensors = self.stream.tensors(slot)
        for name, shape, _ in tensors:
            self.engine.set_shape(name, shape)
        for name, _, address in tensors:
            self.engine.set_address(name, address)

    def enqueue(self, slot):
        """The strict order: every shape and address, copy in, one forward pass, one copy out, the doorbell."""
        self.stream.run(slot, self.bind)
        self.stream.copy_in(slot)
        self.stream.run(slot, lambda _: self.engine.enqueue(self.stream.handle))
        self.stream.copy_out(slot)
        return self.stream.ring(slot)

    def submit(self, sequences):
        return self.enqueue(self.pack(sequences))

    def wait(self, ticket, timeout_s: float = PATIENCE_S) -> dict[str, np.ndarray]:
        return {name: view.numpy() for name, view in ticket.wait(timeout_s).items()}

    def close(self, timeout_s: float = PATIENCE_S) -> None:
        self.arena.close()
        self.stream.close(timeout_s)


def check_outputs(outputs: dict[str, np.ndarray], sequences) -> None:
    """Every row is its own sequence's."""
    rows = [rows_of(sequence) for sequence in sequences]
    np.testing.assert_array_equal(outputs["all"], np.concatenate(rows))
    np.testing.assert_array_equal(outputs["last"], [own[-1] for own in rows])


def some_sequences(seed: int) -> list[list[int]]:
    """Sequences within LIMITS that differ from seed to seed."""
    random = np.random.default_rng(seed)
    return [random.integers(0, VOCAB, size=random.integers(1, 24)).tolist() for _ in range(random.integers(1, 9))]
