"""The arena: one mapping, divided into slots that have one owner at a time."""

from __future__ import annotations

import mmap
import threading
from dataclasses import dataclass

import numpy as np

from tensorrt_llm_ext.errors import EngineError
from tensorrt_llm_ext.runtime.packing import ALIGNMENT


@dataclass(eq=False)
class Slot:
    """A piece of the arena. ``request_ids`` says whose batch lies in it: written with the batch, not by the ticket."""

    memory: np.ndarray  # uint8 [slot_bytes]
    request_ids: tuple[str, ...] = ()


class Arena:
    """A fixed number of slots; nothing is allocated after it is made. Thread-safe."""

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        slot_bytes = -(-slot_bytes // ALIGNMENT) * ALIGNMENT
        try:
            mapping = np.frombuffer(mmap.mmap(-1, num_slots * slot_bytes), dtype=np.uint8)
        except (OSError, ValueError, OverflowError, MemoryError) as error:
            raise EngineError(
                "the memory for this engine's batches cannot be had",
                expected=f"{num_slots} slots of {slot_bytes:,} bytes",
                found=error,
                fix="build the engine with smaller limits (max_num_tokens, max_padded_tokens), or free memory",
            ) from error
        self.num_slots = num_slots
        self._changed = threading.Condition()
        self._free = [Slot(mapping[i * slot_bytes : (i + 1) * slot_bytes]) for i in range(num_slots)]
        self._is_closed = False

    @property
    def num_out(self) -> int:
        """Slots that have an owner."""
        return self.num_slots - len(self._free)

    def acquire(self, timeout_s: float) -> Slot | None:
        """Wait for a free slot and take it; None when none came free in time or the arena was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._is_closed, timeout_s)
            return None if self._is_closed or not self._free else self._free.pop()

    def release(self, slot: Slot) -> None:
        """Give a slot back; its owner must not touch it again."""
        with self._changed:
            slot.request_ids = ()
            self._free.append(slot)
            self._changed.notify()

    def close(self) -> None:
        """Wake whoever waits for a slot; the mapping itself lives as long as a view of it."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
