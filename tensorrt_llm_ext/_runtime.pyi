"""
The C++ runtime: pinned arena, stream, doorbell, packer.
"""
from __future__ import annotations

import collections.abc
import typing

import numpy
import numpy.typing

__all__ = ["CudaStream", "Doorbell", "Driver", "HostStream", "Layout", "PinnedArena", "Slot", "Stream", "Ticket", "View", "pack", "stats"]

class Driver:
    """
    The CUDA driver, opened by path, with one device's primary context. No stand-in for CUDA: only what the runtime calls.
    """
    def __init__(self, path: str = "libcuda.so.1", device: typing.SupportsInt = 0) -> None:
        """
        Open the driver library and retain the device's primary context. Raises BackendError with the driver's words.
        """
    def calls(self) -> dict[str, int]:
        """
        Calls made so far, by entry point.
        """
    def stats(self) -> dict[str, int]:
        """
        calls, failures, synchronisations (calls that may wait for the device: none between first and last batch), destructor_errors.
        """
    @property
    def has_stream_memory_operations(self) -> bool: ...
    @property
    def version(self) -> int: ...

class PinnedArena:
    """
    One mapping, every page touched, registered with the driver when one is given; hands out slots, allocates nothing after that.
    """
    def __init__(self, slot_bytes: typing.SupportsInt, num_slots: typing.SupportsInt, driver: Driver | None = None) -> None:
        """
        Map num_slots slots of slot_bytes. Raises OutOfMemory with needed and free bytes, and keeps nothing then.
        """
    def acquire(self, timeout_s: typing.SupportsFloat) -> Slot:
        """
        A slot with one owner. Waits for one to come home; DeadlineExceeded after timeout_s, SessionClosed after close().
        """
    def close(self) -> None:
        """
        Give out no more slots. The memory goes when the last slot has come home; views stay valid until then.
        """
    def stats(self) -> dict[str, int]:
        """
        mapped_bytes, huge_pages (0 or 1), num_slots, slots_out, acquired, waited, destructor_errors.
        """
    @property
    def num_slots(self) -> int: ...
    @property
    def slot_bytes(self) -> int: ...

class Slot:
    """
    A piece of the pinned arena with one owner; goes home when its last reference (ticket, view, this object) dies.
    """
    def inputs(self) -> dict[str, View]:
        """
        The index arrays that pack wrote, by tensor name.
        """
    @property
    def address(self) -> int: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def index(self) -> int: ...
    @property
    def longest(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...

class Layout:
    """
    Where the engine's tensors lie in a slot: a pure function of tokens, sequences and the longest sequence.
    """
    def __init__(self, tensors: collections.abc.Sequence[tuple[str, str, str, tuple[int | str, ...]]], *, vocab_size: typing.SupportsInt, max_num_tokens: typing.SupportsInt, max_batch_size: typing.SupportsInt, max_seq_len: typing.SupportsInt, max_padded_tokens: typing.SupportsInt) -> None:
        """
        tensors: (name, "input" or "output", dtype, shape of sizes and the symbols T, B, S). Raises BackendError for an input that pack cannot fill, with the list of those it can.
        """
    @property
    def has_host_inputs(self) -> bool: ...
    @property
    def slot_bytes(self) -> int: ...

class Stream:
    """
    An order of work: bind, copy in, run, copy out, ring. Never synchronises. The first failure is sticky.
    """
    def close(self, timeout_s: typing.SupportsFloat) -> None:
        """
        Let what was enqueued finish, for at most timeout_s; then take no more work. Idempotent.
        """
    def copy_in(self, slot: Slot) -> None:
        """
        Copy the slot's device inputs to where the engine reads them, in stream order.
        """
    def copy_out(self, slot: Slot) -> None:
        """
        Copy the outputs back into the slot, in one piece, in stream order.
        """
    def is_idle(self) -> bool:
        """
        Whether everything enqueued has finished. Raises the stream's sticky failure.
        """
    def run(self, call: collections.abc.Callable[[], None]) -> None:
        """
        Run call in stream order: on a CUDA stream in this thread (it enqueues), on a host stream in its worker.
        """
    def tensors(self, slot: Slot) -> list[tuple[str, tuple[int, ...], int]]:
        """
        (name, shape, address) of each tensor of the packed batch, as the engine must bind it; inputs first.
        """
    @property
    def handle(self) -> int:
        """
        What an engine's enqueue takes: the CUstream, or 0.
        """

class HostStream(Stream):
    """
    One worker thread that runs its work in order; the slot itself is the device's memory.
    """
    def __init__(self) -> None: ...

class CudaStream(Stream):
    """
    A CUDA stream and the device memory that mirrors one slot.
    """
    def __init__(self, driver: Driver, slot_bytes: typing.SupportsInt) -> None: ...

class Doorbell:
    """
    A number in pinned memory by which stream and host wait for each other: one 128-byte line each way.
    """
    def __init__(self, stream: Stream, *, first_value: typing.SupportsInt = 0) -> None: ...
    def arm(self, *, shape_has_run: bool) -> None:
        """
        Make the stream wait here until release(). Refused unless shape_has_run: a first launch behind an armed wait can deadlock, because kernels load lazily.
        """
    def release(self) -> None:
        """
        Let the stream pass every wait armed so far.
        """
    def ring(self, slot: Slot) -> Ticket:
        """
        Enqueue the write that says the batch in this slot has come back.
        """
    @property
    def written(self) -> int:
        """
        The value the stream wrote last.
        """

class Ticket:
    """
    A batch in flight: slot, doorbell value, shapes. The only way to the outputs is wait().
    """
    def wait(self, timeout_s: typing.SupportsFloat) -> dict[str, View]:
        """
        Wait until the batch has come back; its outputs by tensor name. Raises DeadlineExceeded, BackendError (the batch that failed) or SessionClosed (one behind it).
        """
    @property
    def batch(self) -> int: ...
    @property
    def came_back(self) -> tuple[int, int, bytes]:
        """
        (batch, total rows, layout digest) as they travelled with the data through the stream; valid after wait().
        """
    @property
    def is_done(self) -> bool: ...
    @property
    def value(self) -> int: ...

class View:
    """
    A read-only tensor inside a slot, without a copy; keeps the slot alive.
    """
    def __dlpack__(self, *, stream: typing.Any = None, max_version: tuple[int, int] | None = None, dl_device: tuple[int, int] | None = None, copy: bool | None = None) -> typing.Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def numpy(self) -> numpy.ndarray: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...

def pack(layout: Layout, token_ids: numpy.typing.NDArray[numpy.int32], offsets: numpy.typing.NDArray[numpy.int32], slot: Slot, *, convention: str, batch: typing.SupportsInt, digest: bytes, last_token_ids: numpy.typing.NDArray[numpy.int32] | None = None) -> None:
    """
    Write every index array of a batch into the slot: sequence i is token_ids[offsets[i]:offsets[i + 1]]. digest is 16 bytes that name the layout; they travel with the batch. last_token_ids replaces the computed values (measuring the convention).
    """

def stats() -> dict[str, int]:
    """
    What the module holds and did: slots_out, tickets_open, streams_open, mapped_bytes, device_bytes, allocations, synchronisations, destructor_errors.
    """
