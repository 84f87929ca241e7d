"""The index of a dataset of states: a folder of Parquet files, one a shard, which any Parquet reader takes as one table.

A part of the index is what makes its shard count: it is renamed into place after its shard. Its schema's metadata says
which file the shard is, with size and hash, and up to which input row everything is settled once the part is there; None
where rows of the same window are still to come in the next shard.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tensorrt_llm_ext.errors import StoreError
from tensorrt_llm_ext.fingerprint import canonical_json
from tensorrt_llm_ext.store.folder import PART_PREFIX, synced
from tensorrt_llm_ext.store.header import METADATA_KEY, Header
from tensorrt_llm_ext.store.shard import ShardFile, StoredSequence, hash_of_file

INDEX_NAME = "index"


@dataclass(frozen=True)
class IndexPart:
    """A part of the index: the shard it belongs to, what is in it, and up to which input row all is settled by it."""

    number: int
    shard: ShardFile
    num_sequences: int
    num_rows: int
    settled_rows: int | None
    is_full: bool  # a shard that is not full goes on growing when the run is resumed
    hash: str  # of the part's own bytes

    @property
    def name(self) -> str:
        return f"{INDEX_NAME}/{self.number:06d}.parquet"


def write_part(
    folder: Path,
    number: int,
    shard: ShardFile,
    sequences: Sequence[StoredSequence],
    header: Header,
    *,
    settled_rows: int | None,
    is_full: bool,
) -> IndexPart:
    """Write a part under a hidden name; ``publish_part`` gives it its own. Raises OSError."""
    described = {
        "number": number,
        "shard": shard.name,
        "bytes": shard.num_bytes,
        "hash": shard.hash,
        "settled_rows": settled_rows,
        "is_full": is_full,
    }
    hidden = folder / _hidden_name(number)
    pq.write_table(_table(shard.name, sequences, header, described), hidden, compression="zstd")
    synced(hidden)
    num_rows = sum(sequence.num_rows for sequence in sequences)
    return IndexPart(number, shard, len(sequences), num_rows, settled_rows, is_full, hash_of_file(hidden))


def publish_part(folder: Path, part: IndexPart) -> None:
    """Rename a part into its place; from then on its shard counts. Raises OSError."""
    os.rename(folder / _hidden_name(part.number), folder / part.name)
    synced(folder / INDEX_NAME)


def read_parts(folder: Path) -> list[IndexPart]:
    """Read what every part says of its shard, in the shards' order. Raises StoreError for one that is damaged."""
    names = [path.name for path in (folder / INDEX_NAME).glob("*.parquet") if not path.name.startswith(PART_PREFIX)]
    parts = [_read_part(folder / INDEX_NAME / name) for name in names]
    parts.sort(key=lambda part: part.number)
    if [part.number for part in parts] != list(range(len(parts))):
        raise StoreError(
            f"the index of '{folder}' has gaps",
            expected=f"parts 0 to {len(parts) - 1}",
            found=f"parts {[part.number for part in parts][:20]}",
            fix="restore the missing files of the folder 'index', or extract again",
        )
    return parts


def swept(folder: Path) -> list[IndexPart]:
    """Read the parts that count; whatever else a run that died has left behind is removed.

    Raises StoreError for a shard that is not there in its size, OSError.
    """
    parts = read_parts(folder)
    while parts and parts[-1].settled_rows is None:  # its window was not published to the end
        (folder / parts.pop().name).unlink()
    known = {part.shard.name: part.shard for part in parts}
    for path in [*folder.glob(f"{PART_PREFIX}*"), *folder.glob(f"{INDEX_NAME}/{PART_PREFIX}*"), *folder.glob("shard-*")]:
        if path.name not in known:
            path.unlink()
    for shard in known.values():
        found = (folder / shard.name).stat().st_size if (folder / shard.name).exists() else None
        if found != shard.num_bytes:
            raise StoreError(
                f"the shard '{folder / shard.name}' is damaged",
                expected=f"{shard.num_bytes} bytes",
                found="no such file" if found is None else f"{found} bytes",
                fix="restore it, or extract again into another folder",
            )
    return parts


def read_sequences(folder: Path, part: IndexPart, header: Header) -> list[StoredSequence]:
    """Read the rows of a part, in the order in which they lie in the shard. Raises StoreError."""
    path = folder / part.name
    try:
        table = pq.read_table(path)
        columns = {name: table[name].to_pylist() for name in table.column_names}
        hashes = zip(*(columns[column.hash_name] for column in header.columns), strict=True)
        names = ("request_id", "work_item_id", "row", "token_hash", "truncated_from", "first_row", "num_rows")
        rows = zip(*(columns[name] for name in names), hashes, strict=True)
        return [StoredSequence(*row) for row in rows]
    except (OSError, pa.ArrowException, KeyError, ValueError) as error:
        raise _damaged(path, error) from error


def _hidden_name(number: int) -> str:
    return f"{INDEX_NAME}/{PART_PREFIX}{number:06d}.parquet"


def _table(shard: str, sequences: Sequence[StoredSequence], header: Header, described: dict) -> pa.Table:
    taps = ",".join(column.name for column in header.columns)
    columns = {
        "request_id": pa.array([s.request_id for s in sequences], pa.string()),
        "shard": pa.array([shard] * len(sequences), pa.string()),
        "first_row": pa.array([s.first_row for s in sequences], pa.int64()),
        "num_rows": pa.array([s.num_rows for s in sequences], pa.int64()),
        "token_hash": pa.array([s.token_hash for s in sequences], pa.string()),
        "taps": pa.array([taps] * len(sequences), pa.string()),
        "row": pa.array([s.row for s in sequences], pa.int64()),
        "work_item_id": pa.array([s.work_item_id for s in sequences], pa.string()),
        "truncated_from": pa.array([s.truncated_from for s in sequences], pa.int64()),
    }
    for place, column in enumerate(header.columns):
        columns[column.hash_name] = pa.array([s.hashes[place] for s in sequences], pa.string())
    return pa.table(columns).replace_schema_metadata({METADATA_KEY: canonical_json(described)})


def _read_part(path: Path) -> IndexPart:
    try:
        file = pq.ParquetFile(path)
        described = json.loads(file.schema_arrow.metadata[METADATA_KEY.encode()])
        return IndexPart(
            number=described["number"],
            shard=ShardFile(described["shard"], described["bytes"], described["hash"]),
            num_sequences=file.metadata.num_rows,
            num_rows=sum(file.read(["num_rows"])["num_rows"].to_pylist()),
            settled_rows=described["settled_rows"],
            is_full=described["is_full"],
            hash=hash_of_file(path),
        )
    except (OSError, pa.ArrowException, KeyError, TypeError, ValueError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> StoreError:
    return StoreError(
        f"'{path}' is damaged",
        expected="a part of the index of a dataset of states",
        found=f"{type(error).__name__}: {error}",
        fix="restore the file, or extract its requests again",
    )
