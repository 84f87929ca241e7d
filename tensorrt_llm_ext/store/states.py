"""StatesStore: every token's states of many requests, in large safetensors shards with a Parquet index.

Rows are copied into a buffer of one shard; a full one is written front to back, hashed and synced by a thread of its own
while the next is filled: two shards in memory, three where two are written at a time, never more. A sequence that does
not fit begins the next shard, and a shard that is half full at the end of a window is closed there. Shards are published, by
rename, in groups that end with a window: a reader, and a run that dies at any moment, sees whole windows. A run that is
stopped leaves its last shard short, and goes on filling it when it is resumed, so that it ends with the same files.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from tensorrt_llm_ext.errors import LineageError, StoreError
from tensorrt_llm_ext.fingerprint import fingerprint
from tensorrt_llm_ext.results.record import Record, WorkItem
from tensorrt_llm_ext.results.side_by_side import side_by_side
from tensorrt_llm_ext.store.disk import damage_errors, disk_errors
from tensorrt_llm_ext.store.folder import PART_PREFIX, STATES_NAME, FolderLock, created, locked, synced
from tensorrt_llm_ext.store.header import FORMAT_VERSION, FORMATS, Header, check_same, identity_of
from tensorrt_llm_ext.store.in_order import InOrder
from tensorrt_llm_ext.store.index import INDEX_NAME, IndexPart, publish_part, read_sequences, swept, write_part
from tensorrt_llm_ext.store.lineage import check_lineage
from tensorrt_llm_ext.store.manifest import (
    HEADER_NAME,
    MANIFEST_NAME,
    manifest_of,
    read_states_header,
    states_folder,
    write_json,
)
from tensorrt_llm_ext.store.shard import LOSS_MASK, ShardBuffer, ShardFile, StoredSequence, open_shard, write_shard
from tensorrt_llm_ext.store.shard_size import row_bytes, shard_rows

_NUM_WRITERS = 2  # shards at a time: into one file a file system in memory copies more slowly than a card makes rows
_INDEX_BYTES = 200  # of a request: ids and hashes, about as Parquet packs them


@dataclass(frozen=True)
class _Closed:
    """A shard that is full, in its buffer until it is written."""

    number: int
    sequences: list[StoredSequence]
    num_proven: int  # of them: those of windows that were committed when it was closed
    proven_end: int  # of those windows
    buffer: ShardBuffer


@dataclass(frozen=True)
class _Written:
    """A shard that is on the disk under a hidden name, not published; see ``_Closed``."""

    number: int
    path: Path
    file: ShardFile
    sequences: list[StoredSequence]
    num_proven: int
    proven_end: int


class StatesStore:
    """A dataset of states that is open for writing, by one writer at a time. ``create`` or ``open``, then ``close``.

    ``commit`` says that everything appended is right; it is on the disk, and counted by ``num_rows`` and ``settled_end``,
    when its shard is published, at the latest after ``flush``.
    """

    def __init__(self, folder: Path, header: Header, lock: FolderLock) -> None:
        self.header = header
        self.path = folder / STATES_NAME
        self._lock = lock
        self._is_closed = False
        self._metadata = {
            "format": FORMATS[header.kind],
            "format_version": str(FORMAT_VERSION),
            "dataset": fingerprint(identity_of(header)),
        }
        self._parts = swept(self.path)
        capacity = shard_rows(header)
        self._free: queue.Queue[ShardBuffer] = queue.LifoQueue()  # what is never needed is never touched
        for _ in range(_NUM_WRITERS + 1):
            self._free.put(ShardBuffer(header.columns, capacity))
        self._open = self._free.get()
        self._number = len(self._parts)
        if self._parts and not self._parts[-1].is_full:
            self._number -= 1
            self._open.load(self.path / self._parts[-1].shard.name, read_sequences(self.path, self._parts[-1], header))
        self._num_proven = self._num_published = len(self._open.sequences)  # of the open shard
        self._proven_end = self.settled_end = self.settled_rows
        self._count()
        self._is_group_open = False  # shards are written that wait for the end of their window
        self._written: list[_Written] = []
        self._error: BaseException | None = None
        self._disk = InOrder(_NUM_WRITERS, self._errors_handed_on)

    @classmethod
    def create(cls, folder: Path, header: Header) -> StatesStore:
        """Make an empty dataset in ``folder``, which is new or empty; ``header.job[SHARD_BYTES]`` is a shard's size.

        Raises ForeignDataset when the folder holds anything, DiskFull, and StoreError for a shard smaller than the
        longest sequence, and when another run is writing there.
        """
        folder = Path(folder)
        shard_rows(header)

        def write(path: Path) -> None:
            (path / INDEX_NAME).mkdir(parents=True)
            write_json(path / HEADER_NAME, header.to_dict())

        lock = created(folder, STATES_NAME, write)
        try:
            return cls(folder, header, lock)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def open(cls, folder: Path, header: Header) -> StatesStore:
        """Open a dataset to add rows to it.

        Raises ForeignDataset with the differences when it was made by another engine or under other conditions, or is
        something else; StoreError when it is damaged or another run is writing to it.
        """
        folder = Path(folder)
        stored = read_states_header(states_folder(folder))
        lock = locked(folder)
        try:
            check_same(stored, header, str(folder))
            with disk_errors(folder):
                return cls(folder, header, lock)
        except BaseException:
            lock.release()
            raise

    @property
    def settled_rows(self) -> int:
        """How many rows of the input, from the first, what is published has settled: stored, refused or failed."""
        return self._parts[-1].settled_rows if self._parts else 0

    def identities(self) -> Iterator[tuple[int, str, str, bytes | None]]:
        """The row number, request id, token hash and loss mask of every published request, in row order, a window group at
        a time. Raises StoreError for a file that is missing or damaged."""
        group: list[tuple[int, str, str, bytes | None]] = []
        for part in list(self._parts):
            with damage_errors(self.path / part.shard.name):
                masks = open_shard(self.path / part.shard.name)[LOSS_MASK]
            for one in read_sequences(self.path, part, self.header):
                mask = masks[one.first_row : one.first_row + one.num_rows].tobytes()
                group.append((one.row, one.request_id, one.token_hash, mask))
            if part.settled_rows is not None:
                yield from sorted(group)
                group = []

    def append(self, row: int, item: WorkItem, record: Record) -> None:
        """Take the record of input row ``row`` for the next commit. Raises LineageError, and then takes nothing; the
        StoreError of an earlier shard that could not be written."""
        self.extend([row], [item], [record])

    def extend(self, rows: Sequence[int], items: Sequence[WorkItem], records: Sequence[Record]) -> None:
        """Take many records as ``append`` takes one, up to the first that it refuses; checked and copied side by side."""
        refusals = side_by_side(partial(_refusal, header=self.header), records, items)
        self._raise_error()
        copies: list[tuple[np.ndarray, np.ndarray]] = []
        refusal = None
        for row, item, record, refusal in zip(rows, items, records, refusals, strict=True):
            if refusal is not None:
                break
            if not self._open.has_room(record.num_tokens):
                _copy(copies)
                self._close_shard()
                copies = []
            copies += self._open.place(row, item, record)
        _copy(copies)
        if refusal is not None:
            raise refusal

    def commit(self, window_end: int) -> None:
        """Say that every appended record is right; input rows before ``window_end`` are settled once it is published.

        Raises the DiskFull or StoreError of a shard that could not be written: its windows are then lost.
        """
        self._raise_error()
        self._num_proven, self._proven_end = len(self._open.sequences), window_end
        if self._is_group_open or 2 * self._open.num_rows >= self._open.capacity:
            self._close_shard()
            self._disk.put(lambda _: self._publish(window_end, is_full=True))
            self._is_group_open = False
        elif not self._open.sequences:
            self.settled_end = window_end  # no row of it is anywhere: what became of each is in the job's ledgers

    def flush(self) -> None:
        """Publish everything that was committed, the last shard as short as it is; forget what was not.

        Raises DiskFull or StoreError; then what was published before stands.
        """
        self._disk.wait()
        self._raise_error()
        if self._written:  # of a window that was not committed, and perhaps of windows before it
            first = self._written[0]
            self._open.load(first.path, first.sequences[: first.num_proven])
            self._number, self._num_published = first.number, 0
            self._num_proven, self._proven_end = first.num_proven, first.proven_end
            self._drop_written()
            self._is_group_open = False
        self._open.keep(self._num_proven)
        with disk_errors(self.path):
            if len(self._open.sequences) > self._num_published:
                self._keep(self._closed(), self._write(self._number, self._open))
                self._publish(self._proven_end, is_full=False)
                self._num_published = self._num_proven
        self.settled_end = self._proven_end

    def seal(self) -> None:
        """Write manifest.json, the last file: the input has ended, and every row of it is settled. Raises StoreError."""
        with disk_errors(self.path):
            write_json(self.path / MANIFEST_NAME, manifest_of(self.header, self._parts))

    def expected_bytes(self, num_rows: int, num_tokens: int) -> float:
        """Bytes that so many requests of so many tokens take, their part of the index included."""
        return num_tokens * row_bytes(self.header) + num_rows * _INDEX_BYTES

    def close(self) -> None:
        """Forget what was not published and let other writers in. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._disk.close()
            self._drop_written()
            self._lock.release()

    def leave_to_fence(self) -> None:
        """Let go of the folder's lock: from now on a ``Fence``, held from every first ``append`` to the ``flush`` after it,
        keeps other writers out; a store that is closed after a ``flush`` touches nothing."""
        self._lock.release()

    def __enter__(self) -> StatesStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _close_shard(self) -> None:
        """Have the open shard written, and open the next; waits while every other buffer is being written."""
        closed = self._closed()
        self._disk.put(partial(self._take, closed), partial(self._emptied, closed))
        self._open = self._free.get()
        self._number += 1
        self._num_proven = self._num_published = 0
        self._is_group_open = True

    def _closed(self) -> _Closed:
        return _Closed(self._number, list(self._open.sequences), self._num_proven, self._proven_end, self._open)

    @contextmanager
    def _errors_handed_on(self) -> Iterator[None]:
        """Hand an error of the disk's thread to the caller, whatever it is."""
        try:
            with disk_errors(self.path):
                yield
        except BaseException as error:
            self._error = self._error or error
            self._drop_written()

    def _write(self, number: int, buffer: ShardBuffer) -> ShardFile:
        """Write a shard under its hidden name."""
        try:
            metadata = {**self._metadata, "shard": str(number)}
            return write_shard(self._hidden(number), buffer.tensors(), f"shard-{number:06d}-{{hash}}.safetensors", metadata)
        except BaseException:
            self._hidden(number).unlink(missing_ok=True)
            raise

    def _emptied(self, closed: _Closed) -> ShardFile:
        """Write a shard, and give its buffer free before others have their turn."""
        file = self._write(closed.number, closed.buffer)
        self._give_free(closed.buffer)
        return file

    def _take(self, closed: _Closed, file: Future[ShardFile]) -> None:
        if file.exception() is not None:
            self._give_free(closed.buffer)  # the next call is told of the error, and must not wait for a buffer before
        self._keep(closed, file.result())

    def _give_free(self, buffer: ShardBuffer) -> None:
        buffer.clear()
        self._free.put(buffer)

    def _keep(self, shard: _Closed, file: ShardFile) -> None:
        hidden = self._hidden(shard.number)
        self._written.append(_Written(shard.number, hidden, file, shard.sequences, shard.num_proven, shard.proven_end))

    def _hidden(self, number: int) -> Path:
        return self.path / f"{PART_PREFIX}shard-{number:06d}"

    def _publish(self, settled_rows: int, is_full: bool) -> None:
        if self._error is not None:
            return
        parts = self._write_parts(settled_rows, is_full)
        self._unseal()
        for shard in self._written:
            shard.path.rename(self.path / shard.file.name)
        synced(self.path)
        for part in parts:
            publish_part(self.path, part)
        replaced = self._parts[parts[0].number :]
        self._parts[parts[0].number :] = parts
        for old in replaced:  # the short shard that the first has grown from
            if old.shard.name != parts[0].shard.name:
                (self.path / old.shard.name).unlink()
        self._written = []
        self._count()
        self.settled_end = settled_rows

    def _write_parts(self, settled_rows: int, is_full: bool) -> list[IndexPart]:
        """Write the index of a group, which its last part settles; a full disk shows here, before anything is renamed."""
        last = self._written[-1]
        return [
            write_part(
                self.path,
                shard.number,
                shard.file,
                shard.sequences,
                self.header,
                settled_rows=settled_rows if shard is last else None,
                is_full=is_full,
            )
            for shard in self._written
        ]

    def _count(self) -> None:
        self.num_rows = sum(part.num_sequences for part in self._parts)
        self.num_bytes = sum(part.shard.num_bytes for part in self._parts)

    def _unseal(self) -> None:
        """A dataset that grows is not finished any more."""
        with suppress(FileNotFoundError):
            (self.path / MANIFEST_NAME).unlink()
            synced(self.path)

    def _drop_written(self) -> None:
        """What a disk that fails does not let go of is removed when the dataset is opened again."""
        written, self._written = self._written, []
        hidden = (self.path / INDEX_NAME).glob(f"{PART_PREFIX}*") if written else ()
        for path in (*(shard.path for shard in written), *hidden):
            with suppress(OSError):
                path.unlink()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


def _refusal(record: Record, item: WorkItem, header: Header) -> LineageError | None:
    """Why a record may not be taken, if it may not."""
    try:
        check_lineage(record, item, header)
    except LineageError as error:
        return error
    if item.loss_mask is not None and len(item.loss_mask) == len(item.token_ids):
        return None
    return LineageError(
        f"the work item of request '{item.request_id}' has no loss mask for its tokens",
        expected=f"{len(item.token_ids)} values",
        found="none" if item.loss_mask is None else f"{len(item.loss_mask)} values",
        fix="make work items with a token policy that says where the loss mask comes from",
    )


def _copy(copies: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    side_by_side(lambda copy: np.copyto(*copy, casting="unsafe"), copies)  # into the type that is stored
