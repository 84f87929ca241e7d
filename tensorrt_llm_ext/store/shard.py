"""Shards: safetensors files that hold the rows of many sequences back to back.

One tensor a tap, ``[rows, hidden]`` in the dtype as computed, and ``token_ids`` int32 and ``loss_mask`` uint8, ``[rows]``.
A sequence is never cut: it is the rows ``first_row`` to ``first_row + num_rows`` of every tensor of one shard.
The format is safetensors' own: eight bytes with the header's length, the header as JSON, the tensors without gaps.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import ml_dtypes
import numpy as np
import xxhash

from tensorrt_llm_ext.results.record import Record, WorkItem
from tensorrt_llm_ext.store.header import Column

TOKEN_IDS, LOSS_MASK = "token_ids", "loss_mask"

_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_BLOCK_BYTES = 16 << 20  # hashed and handed to the disk at once
_SECTOR_BYTES = 4096
IDENTITY_ROW_BYTES = 5  # a token id and its loss mask


@dataclass(frozen=True)
class StoredSequence:
    """One request in a shard: whose it is, and which rows are its own. ``hashes`` are of each column's rows, in order."""

    request_id: str
    work_item_id: str
    row: int  # number of the input's row
    token_hash: str
    truncated_from: int | None
    first_row: int
    num_rows: int
    hashes: tuple[str, ...]


@dataclass(frozen=True)
class ShardFile:
    """A shard as it was written: ``hash`` is ``xxh3-128:`` over all its bytes."""

    name: str
    num_bytes: int
    hash: str


class ShardBuffer:
    """The rows of one shard in memory, filled from the front; it may be filled again after ``clear``."""

    def __init__(self, columns: Sequence[Column], capacity: int) -> None:
        self.capacity = capacity  # rows
        self.num_rows = 0
        self.sequences: list[StoredSequence] = []
        self._arrays = {column.name: np.empty((capacity, column.hidden_size), column.stored_dtype) for column in columns}
        self._arrays |= {TOKEN_IDS: np.empty(capacity, np.int32), LOSS_MASK: np.empty(capacity, np.uint8)}

    def has_room(self, num_rows: int) -> bool:
        return self.num_rows + num_rows <= self.capacity

    def place(self, row: int, item: WorkItem, record: Record) -> list[tuple[np.ndarray, np.ndarray]]:
        """Give a record's rows a place behind those that are there, where there must be room: what is to be copied, to what
        from what."""
        first, end = self.num_rows, self.num_rows + record.num_tokens
        values = [state.rows for state in record.states] + [item.token_ids, item.loss_mask]
        copies = [(array[first:end], rows) for array, rows in zip(self._arrays.values(), values, strict=True)]
        hashes = tuple(state.payload_hash for state in record.states)
        sequence = StoredSequence(
            item.request_id, item.work_item_id, row, item.token_hash, item.truncated_from, first, end - first, hashes
        )
        self.sequences.append(sequence)
        self.num_rows = end
        return copies

    def load(self, path: Path, sequences: Sequence[StoredSequence]) -> None:
        """Take the first sequences of a shard that was written, to go on behind them."""
        self.sequences = list(sequences)
        self.num_rows = sum(sequence.num_rows for sequence in sequences)
        stored = open_shard(path)
        for name, array in self._arrays.items():
            array[: self.num_rows] = stored[name][: self.num_rows]

    def keep(self, num_sequences: int) -> None:
        """Forget all sequences but the first ones."""
        del self.sequences[num_sequences:]
        self.num_rows = sum(sequence.num_rows for sequence in self.sequences)

    def clear(self) -> None:
        self.keep(0)

    def tensors(self) -> dict[str, np.ndarray]:
        """The rows that are there, by tensor name: views."""
        return {name: array[: self.num_rows] for name, array in self._arrays.items()}


def write_shard(path: Path, tensors: dict[str, np.ndarray], name: str, metadata: dict[str, str]) -> ShardFile:
    """Write a shard front to back, hash it on the way, bring it to the disk; ``name`` is what it will be called.

    ``name`` may hold ``{hash}``, for the first digits of the file's hash. Raises OSError.
    """
    digest, num_bytes = xxhash.xxh3_128(), 0
    descriptor = _open_for_writing(path)
    try:
        with ThreadPoolExecutor(1) as disk:  # writes one block while the next is filled and hashed
            writing = disk.submit(int)
            for block in _blocks(_pieces(tensors, metadata)):
                digest.update(block)
                writing.result()
                writing = disk.submit(_write, descriptor, block.obj, len(block))
                num_bytes += len(block)
            writing.result()
        os.ftruncate(descriptor, num_bytes)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return ShardFile(name.format(hash=digest.hexdigest()[:12]), num_bytes, f"xxh3-128:{digest.hexdigest()}")


def open_shard(path: Path) -> dict[str, np.ndarray]:
    """Map a shard's tensors into memory, read-only, by name. Raises OSError, and ValueError when it is no such file."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > os.fstat(file.fileno()).st_size:
            raise ValueError(f"a header of {length} bytes")
        header = json.loads(file.read(length))
    data = np.memmap(path, np.uint8, "r", offset=8 + length)
    tensors = {}
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        dtype, shape = _DTYPES[tensor["dtype"]], tuple(tensor["shape"])
        start, end = tensor["data_offsets"]
        if end - start != math.prod(shape) * dtype.itemsize or end > len(data):
            raise ValueError(f"the tensor '{name}' is not whole")
        tensors[name] = data[start:end].view(dtype).reshape(shape)
    return tensors


def hash_of_file(path: Path) -> str:
    """The hash that ``write_shard`` gave. Raises OSError."""
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(_BLOCK_BYTES):
            digest.update(piece)
    return f"xxh3-128:{digest.hexdigest()}"


def _pieces(tensors: dict[str, np.ndarray], metadata: dict[str, str]) -> Iterator[np.ndarray]:
    header: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for name, array in tensors.items():
        start, end = end, end + array.nbytes
        header[name] = {"dtype": _NAMES[array.dtype], "shape": list(array.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8)
    for array in tensors.values():
        values = array.reshape(-1).view(np.uint8)
        for start in range(0, len(values), _BLOCK_BYTES):
            yield values[start : start + _BLOCK_BYTES]


def _blocks(pieces: Iterator[np.ndarray]) -> Iterator[memoryview]:
    """The same bytes in blocks of ``_BLOCK_BYTES``, the last one shorter; a block holds until the one after the next is made.

    They are copied by NumPy, which frees the GIL.
    """
    buffers = cycle([np.frombuffer(mmap.mmap(-1, _BLOCK_BYTES), np.uint8) for _ in range(2)])
    block, filled = next(buffers), 0
    for piece in pieces:
        while len(piece):
            taken = min(len(piece), len(block) - filled)
            block[filled : filled + taken] = piece[:taken]
            filled, piece = filled + taken, piece[taken:]
            if filled == len(block):
                yield memoryview(block)
                block, filled = next(buffers), 0
    if filled:
        yield memoryview(block)[:filled]


def _open_for_writing(path: Path) -> int:
    """Open past the page cache, where the file system can: the cache would cost a second copy of everything."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o644)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o644)


def _write(descriptor: int, block: np.ndarray, num_bytes: int) -> None:
    """Write the first ``num_bytes``, and what follows them up to a disk's sector: direct writes take whole ones."""
    rest = memoryview(block)[: -(-num_bytes // _SECTOR_BYTES) * _SECTOR_BYTES]
    while rest:
        rest = rest[os.write(descriptor, rest) :]
