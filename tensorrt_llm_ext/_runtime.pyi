"""
The C++ runtime: pinned arena, stream, doorbell, packer.
"""
from __future__ import annotations
import collections.abc
import numpy
import typing
import typing_extensions
__all__: list[str] = ['CudaStream', 'Driver', 'HostStream', 'KNOWN_INPUTS', 'Layout', 'PinnedArena', 'Slot', 'Stream', 'Ticket', 'View', 'pack', 'stats']
class Driver:
    """
    The CUDA driver, opened by path, with the primary context of one device.
    """
    def __init__(self, path: str = 'libcuda.so.1', device: typing.SupportsInt | typing.SupportsIndex = 0) -> None:
        """
        Open the driver library and retain the device's primary context. Raises BackendError with the driver's words.
        """
    def calls(self) -> dict[str, int]:
        """
        Calls made so far, by entry point.
        """
    @property
    def version(self) -> int:
        """
        The CUDA version the driver speaks: 13000 is 13.0.
        """
class PinnedArena:
    """
    One mapping, every page touched, registered with the driver when one is given; divided into slots.
    """
    def __init__(self, slot_bytes: typing.SupportsInt | typing.SupportsIndex, num_slots: typing.SupportsInt | typing.SupportsIndex, driver: Driver | None = None) -> None:
        """
        Map the slots. Raises OutOfMemory with the bytes needed and free, and keeps nothing then.
        """
    def acquire(self, timeout_s: typing.SupportsFloat | typing.SupportsIndex, stream: Stream | None = None) -> Slot:
        """
        Take a free slot, or wait for one to come home. Raises DeadlineExceeded, SessionClosed after close(), and what stream ended with.
        """
    def close(self) -> None:
        """
        Give out no more slots. The memory goes with the last slot; views stay valid until then.
        """
    def stats(self) -> dict[str, int]:
        """
        mapped_bytes, is_huge (pages of the kernel's pool), num_slots, slots_out, acquired, waited (acquired late).
        """
    @property
    def num_slots(self) -> int:
        ...
    @property
    def slot_bytes(self) -> int:
        ...
class Slot:
    """
    A piece of the arena with one owner; it goes home when its last reference dies: ticket, view or this.
    """
    def inputs(self) -> dict[str, View]:
        """
        The arrays that pack wrote, by tensor name.
        """
    @property
    def address(self) -> int:
        ...
    @property
    def index(self) -> int:
        ...
    @property
    def num_bytes(self) -> int:
        ...
class Layout:
    """
    Where the engine's tensors lie in a slot, as a pure function of the batch's sizes.
    """
    def __init__(self, tensors: collections.abc.Sequence[tuple[str, str, str, collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex | str]]], *, vocab_size: typing.SupportsInt | typing.SupportsIndex, max_num_tokens: typing.SupportsInt | typing.SupportsIndex, max_batch_size: typing.SupportsInt | typing.SupportsIndex, max_seq_len: typing.SupportsInt | typing.SupportsIndex, max_padded_tokens: typing.SupportsInt | typing.SupportsIndex) -> None:
        """
        tensors: (name, 'input' or 'output', dtype, shape of sizes and the symbols T, B, S). Raises PlanError for an input that pack cannot fill.
        """
    @property
    def has_host_inputs(self) -> bool:
        """
        Does the engine read host_* inputs at enqueue?
        """
    @property
    def slot_bytes(self) -> int:
        """
        Bytes of a slot that holds every batch within the limits.
        """
class Stream:
    """
    An order of work: run (bind), copy_in, run (enqueue), copy_out, ring. Never synchronises; its first failure is its last.
    """
    def arm(self, slot: Slot | None = None, *, shape_has_run: bool) -> None:
        """
        Make the stream wait here for release(). Refused before the shape has run (its kernels load lazily, and behind an armed wait that deadlocks) and for an engine with host inputs.
        """
    def close(self, timeout_s: typing.SupportsFloat | typing.SupportsIndex) -> None:
        """
        Take no more work, and let what runs end. A host stream drops what has not begun. Raises DeadlineExceeded when work is left. Idempotent.
        """
    def copy_in(self, slot: Slot) -> None:
        """
        Take the batch's inputs to where the engine reads them.
        """
    def copy_out(self, slot: Slot) -> None:
        """
        Bring the batch's outputs back into the slot, in one piece.
        """
    def is_idle(self) -> bool:
        """
        Has everything finished? Raises what the stream failed with.
        """
    def release(self) -> None:
        """
        Let the stream pass every wait armed so far.
        """
    def ring(self, slot: Slot | None = None) -> Ticket:
        """
        Enqueue the write that says the batch, or without a slot all that was enqueued, has come back.
        """
    def run(self, slot: Slot, call: collections.abc.Callable[[Slot], None]) -> None:
        """
        Run call(slot) in stream order: on a CUDA stream in this thread (it enqueues), on a host stream in its worker.
        """
    def tensors(self, slot: Slot) -> list[tuple[str, tuple[int, ...], int]]:
        """
        (name, shape, address) of every tensor of the packed batch, as the engine must bind it.
        """
    @property
    def handle(self) -> int:
        """
        What an engine's enqueue takes: the CUstream, or 0.
        """
    @property
    def written(self) -> int:
        """
        The value the stream wrote to its doorbell last.
        """
class HostStream(Stream):
    """
    One worker thread that works in order; the slot itself is the device's memory.
    """
    def __init__(self, *, first_value: typing.SupportsInt | typing.SupportsIndex = 0) -> None:
        ...
class CudaStream(Stream):
    """
    A CUDA stream, and the device memory that mirrors one slot.
    """
    def __init__(self, driver: Driver, slot_bytes: typing.SupportsInt | typing.SupportsIndex, *, first_value: typing.SupportsInt | typing.SupportsIndex = 0) -> None:
        ...
    @property
    def has_memory_operations(self) -> bool:
        """
        False: a host function rings the doorbell.
        """
class Ticket:
    """
    A batch in flight: slot, doorbell value, shapes. The only way to the outputs is wait().
    """
    def wait(self, timeout_s: typing.SupportsFloat | typing.SupportsIndex) -> dict[str, View]:
        """
        The outputs by tensor name, once the batch has come back. Raises DeadlineExceeded (wait again, if you like), what the batch failed with, or SessionClosed behind an earlier failure.
        """
    @property
    def batch(self) -> int | None:
        ...
    @property
    def came_back(self) -> tuple[int, int, bytes]:
        """
        (batch, total rows, digest) as they travelled through the stream with the data; after wait().
        """
    @property
    def is_done(self) -> bool:
        """
        Has the doorbell rung for this batch?
        """
    @property
    def value(self) -> int:
        """
        The doorbell value that says the batch has come back.
        """
class View:
    """
    A read-only tensor inside a slot, without a copy; it keeps the slot alive.
    """
    def __dlpack__(self, *, stream: typing.Any = None, max_version: tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex] | None = None, dl_device: tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex] | None = None, copy: bool | None = None) -> typing_extensions.CapsuleType:
        ...
    def __dlpack_device__(self) -> tuple[int, int]:
        ...
    def numpy(self) -> numpy.ndarray:
        """
        The tensor as a NumPy array, read-only.
        """
    @property
    def dtype(self) -> str:
        ...
    @property
    def shape(self) -> tuple[int, ...]:
        ...
def pack(layout: Layout, token_ids: numpy.ndarray, offsets: numpy.ndarray, slot: Slot, *, convention: str, batch: typing.SupportsInt | typing.SupportsIndex, digest: bytes, last_token_ids: numpy.ndarray | None = None) -> None:
    """
    Write every input of a batch into the slot; sequence i is token_ids[offsets[i]:offsets[i + 1]]. The 16 bytes of digest and the batch's number travel with it. last_token_ids replaces the computed values.
    """
def stats() -> dict[str, int]:
    """
    What the module holds now and did so far, over all its objects.
    """
KNOWN_INPUTS: tuple = ('input_ids', 'position_ids', 'attention_rows', 'packed_slots', 'last_token_ids', 'sequence_lengths', 'context_lengths', 'host_context_lengths', 'host_request_types', 'host_max_attention_window_sizes', 'host_sink_token_length', 'host_runtime_perf_knobs', 'host_context_progress')
