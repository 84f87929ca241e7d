"""Reading datasets of states: their sequences in the order of the input, over one folder or over all parts of a run."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from tensorrt_llm_ext.errors import ForeignDataset, StoreError
from tensorrt_llm_ext.store.disk import damage_errors
from tensorrt_llm_ext.store.header import Header, check_same
from tensorrt_llm_ext.store.index import IndexPart, read_parts, read_sequences
from tensorrt_llm_ext.store.manifest import MANIFEST_NAME, read_manifest, read_states_header, states_folder
from tensorrt_llm_ext.store.shard import LOSS_MASK, TOKEN_IDS, StoredSequence, open_shard

_SHARDS_OPEN = 8


@dataclass(frozen=True)
class TrainingSequence:
    """One request's tokens with their states. The arrays are read-only views of the shard's file."""

    request_id: str
    row: int  # number of the input's row
    token_hash: str
    token_ids: np.ndarray  # int32 [tokens]
    loss_mask: np.ndarray  # uint8 [tokens]
    states: dict[str, np.ndarray]  # by column, [tokens, hidden], dtype as computed


class States:
    """One dataset of states, or all parts of a sharded run, open for reading. Made by ``open_states``."""

    def __init__(self, folders: Sequence[Path], header: Header) -> None:
        self.folders = tuple(folders)
        self.header = header
        self._parts = [read_parts(folder) for folder in folders]

    def __len__(self) -> int:
        return sum(part.num_sequences for parts in self._parts for part in parts)

    @property
    def num_tokens(self) -> int:
        return sum(part.num_rows for parts in self._parts for part in parts)

    def sequences(self) -> Iterator[TrainingSequence]:
        """Every sequence, in the order of the input's rows. Raises StoreError for a file that is missing or damaged."""
        shards = lru_cache(_SHARDS_OPEN)(_opened)
        streams = [_entries(folder, self.header) for folder in self.folders]
        for stored, path in heapq.merge(*streams, key=lambda entry: entry[0].row):
            tensors = shards(path)
            place = slice(stored.first_row, stored.first_row + stored.num_rows)
            yield TrainingSequence(
                stored.request_id,
                stored.row,
                stored.token_hash,
                tensors[TOKEN_IDS][place],
                tensors[LOSS_MASK][place],
                {column.name: tensors[column.name][place] for column in self.header.columns},
            )


def open_states(*paths: Path) -> States:
    """Open a finished dataset, or all parts of one sharded run or of one stream together: nothing is renumbered.

    Raises ForeignDataset for folders that are not finished datasets of states, or not the parts of one run, each once.
    """
    folders = [states_folder(path) for path in paths]
    headers = [read_states_header(folder) for folder in folders]
    for folder in folders:
        if read_manifest(folder) is None:
            raise ForeignDataset(
                f"'{folder}' is not finished",
                expected=f"{MANIFEST_NAME}, which comes last: when every row of the input is settled, or a stream's writer ends",
                found="none",
                fix="go on with `trtllm-extract run --resume`; of a stream, start `trtllm-extract store` and let it end",
            )
    if len(folders) > 1:
        _check_parts(folders, headers)
    return States(folders, headers[0])


def _check_parts(folders: Sequence[Path], headers: Sequence[Header]) -> None:
    wholes = [_whole(header) for header in headers]
    for folder, whole in zip(folders[1:], wholes[1:], strict=True):
        check_same(wholes[0], whole, str(folder))
    if "stream" in headers[0].job:
        _check_partitions([header.job["stream"]["partition"] for header in headers])
        return
    parts = [header.job.get("sharding") or {"index": 0, "count": 1} for header in headers]
    found = sorted((part["count"], part["index"]) for part in parts)
    count = parts[0]["count"]
    if found != [(count, index) for index in range(count)]:
        raise ForeignDataset(
            "these are not the parts of one run, each once",
            expected=", ".join(f"{index}/{count}" for index in range(count)),
            found=", ".join(f"{part['index']}/{part['count']}" for part in parts),
            fix="name every folder of the run once",
        )


def _whole(header: Header) -> Header:
    """The header without what says which part it is."""
    job = {**header.job, "sharding": None}
    if "stream" in job:
        job["stream"] = {**job["stream"], "partition": None}
    return Header(header.contract, header.origin, job)


def _check_partitions(found: Sequence[int]) -> None:
    """A partition of a stream may be empty and have no dataset, so they need not be all; but each only once."""
    if len(set(found)) < len(found):
        raise ForeignDataset(
            "these are not partitions of one stream, each once",
            expected="each partition once",
            found=", ".join(f"part-{number}" for number in found),
            fix="name every folder of the stream once",
        )


def entries_of(folder: Path, header: Header) -> Iterator[tuple[StoredSequence, IndexPart]]:
    """Every entry of a dataset's index with its part, in the order of the input's rows, a group of shards at a time."""
    group: list[tuple[StoredSequence, IndexPart]] = []
    for part in read_parts(folder):
        group += [(sequence, part) for sequence in read_sequences(folder, part, header)]
        if part.settled_rows is not None:
            yield from sorted(group, key=lambda entry: entry[0].row)
            group = []
    if group:
        raise StoreError(
            f"the index of '{folder}' ends within a window",
            expected="a last part that says which rows are settled",
            found=group[-1][1].name,
            fix="restore the missing parts of the index, or go on with --resume",
        )


def _entries(folder: Path, header: Header) -> Iterator[tuple[StoredSequence, Path]]:
    return ((sequence, folder / part.shard.name) for sequence, part in entries_of(folder, header))


def _opened(path: Path) -> dict[str, np.ndarray]:
    with damage_errors(path):
        return open_shard(path)
