"""The pipeline: slots, one stream and one engine; a batch goes through it by ``pack``, ``enqueue`` and ``wait``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from tensorrt_llm_ext.backends import Engine
from tensorrt_llm_ext.errors import DeadlineExceeded
from tensorrt_llm_ext.graph import names
from tensorrt_llm_ext.recipes.contract import Contract, Convention
from tensorrt_llm_ext.runtime.arena import Arena, Slot
from tensorrt_llm_ext.runtime.packing import PackedBatch, pack, slot_bytes
from tensorrt_llm_ext.runtime.plan import Plan, PlanRegistry, layout_digest
from tensorrt_llm_ext.runtime.stream import HostStream

_THIS_THREAD = 0  # the stream a CPU engine runs on: the stream's own worker thread, to the end


@dataclass(frozen=True, eq=False)
class Flight:
    """A packed batch with the slot it lies in and the plan it must keep."""

    slot: Slot
    batch: PackedBatch
    plan: Plan


class Pipeline:
    """Runs batches of one engine in order, ``num_slots`` of them in flight. Thread-safe."""

    def __init__(self, engine: Engine, contract: Contract, *, num_slots: int, deadline_s: float) -> None:
        self.num_slots = num_slots
        self._engine = engine
        self._tensors = contract.tensors
        self._deadline_s = deadline_s
        self._plans = PlanRegistry()
        self._arena = Arena(num_slots, slot_bytes(contract.tensors, contract.limits))
        self._stream = HostStream(on_stop=self._arena.close)

    def pack(
        self, token_ids: np.ndarray, offsets: np.ndarray, request_ids: tuple[str, ...], convention: Convention
    ) -> Flight:
        """Write a batch into a free slot, waiting for one; the shapes are those of ``packing.pack``.

        Raises DeadlineExceeded when no slot came free in time, SessionClosed when none ever will.
        """
        slot = self._arena.acquire(self._deadline_s)
        if slot is None:
            self._stream.raise_if_stopped()
            raise DeadlineExceeded(
                f"no slot came free in {self._deadline_s:g} s",
                expected=f"at most {self.num_slots} batches in flight",
                found=f"{self._arena.num_out} slots out",
                fix="wait for a ticket before submitting the next batch, or open the session with more slots",
            )
        try:
            batch = pack(slot.memory, self._tensors, token_ids, offsets, convention)
            slot.request_ids = request_ids
            return Flight(slot, batch, self._plans.make(request_ids, _row_counts(batch)))
        except BaseException:
            self._arena.release(slot)
            raise

    def enqueue(self, flight: Flight) -> int:
        """Order the batch behind those before it; return the doorbell value that says it has come back."""
        try:
            return self._stream.enqueue(partial(_forward, self._engine, flight.batch))
        except BaseException:
            self._plans.abandon(flight.plan)
            self._arena.release(flight.slot)
            raise

    @contextlib.contextmanager
    def wait(self, flight: Flight, value: int, timeout_s: float | None) -> Iterator[PackedBatch]:
        """Wait for the batch, verify its plan and consume it, lend the batch, and take the slot back.

        Raises what ``HostStream.wait`` raises, with the plan still open, and PlanError on a second time.
        """
        self._stream.wait(value, self._deadline_s if timeout_s is None else timeout_s)
        batch, slot = flight.batch, flight.slot
        digest = layout_digest(slot.request_ids, _row_counts(batch))  # from the slot, not from the ticket
        self._plans.consume(flight.plan, total_rows=batch.shape.num_tokens, digest=digest)
        try:
            yield batch
        finally:
            self._arena.release(slot)

    def drop(self, flight: Flight) -> None:
        """Take the slot of a batch nobody will wait for, once it is over. Never blocks: a finalizer calls this."""
        self._stream.afterwards(partial(_drop, self._plans, self._arena, flight))

    def run(self, sequences: Sequence[np.ndarray], last_token_ids: np.ndarray | None) -> dict[str, np.ndarray]:
        """Run one batch to its end with gather values of the caller's choice; copies of every output by name."""
        offsets = np.cumsum([0, *map(len, sequences)], dtype=np.int32)
        flight = self.pack(np.concatenate(sequences), offsets, ("measurement",) * len(sequences), "none")
        if last_token_ids is not None:
            flight.batch.inputs[names.LAST_TOKEN_IDS][:] = last_token_ids
        value = self.enqueue(flight)
        with self.wait(flight, value, None) as batch:
            return {name: view.copy() for name, view in batch.outputs.items()}

    def stats(self) -> dict[str, int]:
        """Count plans made, consumed, refused and open, results of another batch (must be 0), and slots out."""
        return {**self._plans.stats(), "slots_out": self._arena.num_out}

    def close(self) -> None:
        """Stop the stream and free the engine; a batch that does not end within the deadline keeps its memory."""
        self._arena.close()
        if self._stream.close(self._deadline_s):
            self._engine.close()


def _forward(engine: Engine, batch: PackedBatch) -> None:
    """Every shape, then every address, then one forward pass: the order is the backends' protocol."""
    for name, view in batch.inputs.items():
        engine.set_shape(name, view.shape)
    for name, view in (*batch.inputs.items(), *batch.outputs.items()):
        engine.set_address(name, view.ctypes.data)
    engine.enqueue(_THIS_THREAD)


def _row_counts(batch: PackedBatch) -> tuple[int, ...]:
    return tuple(np.diff(batch.offsets).tolist())


def _drop(plans: PlanRegistry, arena: Arena, flight: Flight) -> None:
    plans.abandon(flight.plan)
    arena.release(flight.slot)
