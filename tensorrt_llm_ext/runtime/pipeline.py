"""The pipeline: slots, one stream and one engine; a batch goes through it by ``pack``, ``enqueue`` and ``wait``.

It runs on the C++ runtime: a CUDA stream for an engine that names cards, a host stream for any other. On either, a batch
is bind, copy in, run, copy out, ring, in this order, and nothing waits for the batch before it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tensorrt_llm_ext import _runtime
from tensorrt_llm_ext.backends import Engine
from tensorrt_llm_ext.errors import BackendError, DeadlineExceeded, ExtractionError
from tensorrt_llm_ext.graph import names
from tensorrt_llm_ext.recipes.contract import Contract, Convention
from tensorrt_llm_ext.runtime.packing import layout_of
from tensorrt_llm_ext.runtime.plan import Plan, PlanRegistry


@dataclass(eq=False)
class Flight:
    """A packed batch: the plan it must keep, and, until it has come back or is dropped, its slot and its ticket."""

    plan: Plan
    offsets: np.ndarray  # int32 [B + 1]: sequence i is packed rows offsets[i] to offsets[i + 1]
    slot: _runtime.Slot | None
    ticket: _runtime.Ticket | None = None

    def release(self) -> None:
        """Let go of the slot; it goes home when its last view dies."""
        self.slot = self.ticket = None


@dataclass(frozen=True)
class Returned:
    """A batch that has come back: views of the slot."""

    offsets: np.ndarray  # int32 [B + 1]
    token_ids: np.ndarray  # int32 [T], as the engine read them
    outputs: dict[str, np.ndarray]


class Pipeline:
    """Runs batches of one engine in order, ``num_slots`` of them in flight. Thread-safe."""

    def __init__(self, engine: Engine, contract: Contract, *, num_slots: int, deadline_s: float) -> None:
        self.num_slots = num_slots
        self._engine = engine
        self._inputs = {tensor.name for tensor in contract.tensors if tensor.role == "input"}
        self._deadline_s = deadline_s
        self._plans = PlanRegistry()
        self._enqueuing = threading.Lock()  # the steps of one batch stay together
        self._layout = layout_of(contract.tensors, contract.limits, contract.architecture.vocab_size)
        slot_bytes = self._layout.slot_bytes
        driver = _runtime.Driver() if contract.compute_capabilities else None
        self._arena = _runtime.PinnedArena(slot_bytes, num_slots, driver)
        self._stream = _runtime.CudaStream(driver, slot_bytes) if driver else _runtime.HostStream()

    def pack(
        self,
        token_ids: np.ndarray,
        offsets: np.ndarray,
        request_ids: tuple[str, ...],
        convention: Convention,
        last_token_ids: np.ndarray | None = None,
    ) -> Flight:
        """Write a batch into a free slot, waiting for one; see ``_runtime.pack``.

        Raises DeadlineExceeded when no slot came free in time, SessionClosed when none ever will.
        """
        slot = self._arena.acquire(self._deadline_s, self._stream)
        plan = self._plans.make(request_ids, tuple(np.diff(offsets).tolist()))
        try:
            _runtime.pack(
                self._layout,
                token_ids,
                offsets,
                slot,
                convention=convention,
                batch=plan.batch,
                digest=bytes.fromhex(plan.layout_digest),
                last_token_ids=last_token_ids,
            )
        except BaseException:
            self._plans.abandon(plan)
            raise
        return Flight(plan, offsets, slot)

    def enqueue(self, flight: Flight) -> None:
        """Order the batch behind those before it."""
        stream, slot = self._stream, flight.slot
        try:
            with self._enqueuing:
                stream.run(slot, self._bind)
                stream.copy_in(slot)
                stream.run(slot, self._forward)
                stream.copy_out(slot)
                flight.ticket = stream.ring(slot)
        except BaseException:
            self.drop(flight)
            raise

    @contextlib.contextmanager
    def wait(self, flight: Flight, timeout_s: float | None) -> Iterator[Returned]:
        """Wait for the batch, verify its plan against what came back, consume it, lend the batch, let go of the slot.

        Raises DeadlineExceeded, what the batch failed with, or SessionClosed, with the plan still open; PlanError on a
        second time.
        """
        ticket, slot = flight.ticket, flight.slot
        if ticket is None:
            self._plans.consume(flight.plan, total_rows=0, digest="")  # raises: it was consumed before
        outputs = ticket.wait(self._deadline_s if timeout_s is None else timeout_s)
        _, total_rows, digest = ticket.came_back
        self._plans.consume(flight.plan, total_rows=total_rows, digest=digest.hex())
        flight.release()
        token_ids = slot.inputs()[names.INPUT_IDS].numpy()
        yield Returned(flight.offsets, token_ids, {name: view.numpy() for name, view in outputs.items()})

    def drop(self, flight: Flight) -> None:
        """Give up a batch nobody will wait for; its slot goes home once the stream is past it. Never blocks."""
        self._plans.abandon(flight.plan)
        flight.release()

    def run(self, sequences: Sequence[np.ndarray], gather: np.ndarray | Convention) -> dict[str, np.ndarray]:
        """Run one batch to its end, with ``last_token_ids`` as given or by a convention; a copy of every output."""
        convention, last_token_ids = (gather, None) if isinstance(gather, str) else ("none", gather)
        offsets = np.cumsum([0, *map(len, sequences)], dtype=np.int32)
        request_ids = ("measurement",) * len(sequences)
        flight = self.pack(np.concatenate(sequences), offsets, request_ids, convention, last_token_ids)
        self.enqueue(flight)
        with self.wait(flight, None) as batch:
            return {name: rows.copy() for name, rows in batch.outputs.items()}

    def stats(self) -> dict[str, int]:
        """Count plans made, consumed, refused and open, results of another batch (must be 0), and slots out."""
        return {**self._plans.stats(), "slots_out": self._arena.stats()["slots_out"]}

    def close(self) -> None:
        """Stop the stream and free the engine; a batch that does not end within the deadline keeps its memory."""
        self._arena.close()
        try:
            self._stream.close(self._deadline_s)
        except DeadlineExceeded:
            return  # the engine's library still reads and writes there
        self._engine.close()

    def _bind(self, slot: _runtime.Slot) -> None:
        """Every shape, then every address: the order is the backends' protocol."""
        tensors = self._stream.tensors(slot)
        with _named_errors():
            for name, shape, _ in tensors:
                if name in self._inputs:
                    self._engine.set_shape(name, shape)
            for name, _, address in tensors:
                self._engine.set_address(name, address)

    def _forward(self, slot: _runtime.Slot) -> None:
        with _named_errors():
            self._engine.enqueue(self._stream.handle)


@contextlib.contextmanager
def _named_errors() -> Iterator[None]:
    """Make a BackendError of what a backend raised and did not name."""
    try:
        yield
    except ExtractionError:
        raise
    except Exception as error:
        raise BackendError(
            "a batch failed in a way the backend did not name",
            expected="a batch that comes back, or a BackendError",
            found=repr(error),
            fix="this is a defect of the backend: keep the input and report it",
        ) from error
