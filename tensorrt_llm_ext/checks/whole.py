"""check: whether a dataset is still what was written: every file hashed again, every row of the input accounted for.

Of states: size and hash of every shard and of every part of the index, the manifest, that the sequences of a shard lie back
to back and fill it, and the hash of every sequence's tokens and rows. Of vectors: the hash of every row, and their number.
Of both: that the run has ended, that no row or request id is there twice, and that every row of the input is stored, refused
or failed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tensorrt_llm_ext.errors import ExtractionError, StoreError
from tensorrt_llm_ext.fingerprint import token_hash
from tensorrt_llm_ext.job.ledgers import FAILED_NAME, REFUSED_NAME
from tensorrt_llm_ext.results import rows_hash
from tensorrt_llm_ext.store import STATES_NAME, VECTORS_NAME, open_vectors, read_states_header, states_folder
from tensorrt_llm_ext.store.header import Header
from tensorrt_llm_ext.store.index import IndexPart, read_parts, read_sequences
from tensorrt_llm_ext.store.manifest import HEADER_NAME, MANIFEST_NAME, manifest_of, read_manifest
from tensorrt_llm_ext.store.shard import LOSS_MASK, TOKEN_IDS, StoredSequence, hash_of_file, open_shard


@dataclass(frozen=True)
class Damage:
    """One thing that is not as it was written."""

    place: str
    expected: str
    found: str


_UNFINISHED = Damage(MANIFEST_NAME, "the manifest of a finished dataset", "none: the run has not ended; go on with --resume")


@dataclass(frozen=True)
class Wholeness:
    """What a check looked at, and what it found."""

    dataset: Path
    num_rows: int  # requests
    num_bytes: int
    damages: tuple[Damage, ...]


def check_dataset(path: Path) -> Wholeness:
    """Check an output folder's dataset. Raises ForeignDataset when there is none that can be opened at all."""
    path = Path(path)
    is_states = any((folder / HEADER_NAME).is_file() for folder in (path, path / STATES_NAME))
    return _check_states(states_folder(path)) if is_states else _check_vectors(path)


def _check_states(folder: Path) -> Wholeness:
    header = read_states_header(folder)
    damages: list[Damage] = []
    try:
        parts = read_parts(folder)
    except StoreError as error:
        return Wholeness(folder, 0, 0, (_damage(error),))
    manifest = read_manifest(folder)
    if manifest is None:
        damages.append(_UNFINISHED)
    elif manifest != (right := json.loads(json.dumps(manifest_of(header, parts)))):
        damages += _different(manifest, right)
    rows: list[tuple[int, str]] = []
    for part in parts:
        try:
            sequences = read_sequences(folder, part, header)
            rows += [(sequence.row, sequence.request_id) for sequence in sequences]
            damages += _wrong_shard(folder, part, sequences, header)
        except StoreError as error:
            damages.append(_damage(error))
    settled = parts[-1].settled_rows if parts else (manifest or {}).get("settled_rows", 0)
    damages += _unaccounted(folder.parent, rows, settled or 0, is_part="sharding" in header.job)
    return Wholeness(folder, len(rows), sum(part.shard.num_bytes for part in parts), tuple(damages))


def _check_vectors(path: Path) -> Wholeness:
    vectors = open_vectors(path)
    damages: list[Damage] = []
    num_records = 0
    try:
        for _ in vectors.records():
            num_records += 1
    except StoreError as error:
        damages.append(_damage(error))
    try:
        table = vectors.dataset.to_table(columns=["row", "request_id", "window_end"])
        rows = list(zip(table["row"].to_pylist(), table["request_id"].to_pylist(), strict=True))
        manifest = read_manifest(Path(vectors.dataset.uri))
        damages += _wrong_manifest(manifest, len(rows))
        settled = max([*table["window_end"].to_pylist(), (manifest or {}).get("settled_rows", 0)])
        out = path.parent if path.name == VECTORS_NAME else path
        damages += _unaccounted(out, rows, settled, is_part="sharding" in vectors.header.job)
    except (OSError, ValueError) as error:  # Lance's and Arrow's errors are one or the other
        damages.append(Damage(VECTORS_NAME, "columns that can be read", str(error)))
    num_bytes = sum(file.stat().st_size for file in Path(vectors.dataset.uri).rglob("*") if file.is_file())
    return Wholeness(Path(vectors.dataset.uri), num_records, num_bytes, tuple(damages))


def _wrong_manifest(manifest: dict | None, num_rows: int) -> Iterator[Damage]:
    """Where the manifest of vectors and the rows disagree."""
    if manifest is None:
        yield _UNFINISHED
    elif (right := manifest.get("num_rows")) != num_rows:
        yield Damage(f"{MANIFEST_NAME}, num_rows", str(right), str(num_rows))


def _different(manifest: dict, right: dict) -> Iterator[Damage]:
    """Where a manifest and the files disagree, shard by shard."""
    for place, (expected, found) in enumerate(zip(manifest["shards"], right["shards"], strict=False)):
        if expected != found:
            yield Damage(f"{MANIFEST_NAME}, shard {place}", str(expected), str(found))
    if len(manifest["shards"]) != len(right["shards"]):
        yield Damage(MANIFEST_NAME, f"{len(manifest['shards'])} shards", f"{len(right['shards'])} parts of the index")
    for name in sorted((manifest.keys() | right.keys()) - {"shards"}):
        if manifest.get(name) != right.get(name):
            yield Damage(f"{MANIFEST_NAME}, {name}", str(manifest.get(name))[:200], str(right.get(name))[:200])


def _wrong_shard(folder: Path, part: IndexPart, sequences: list[StoredSequence], header: Header) -> Iterator[Damage]:
    path, shard = folder / part.shard.name, part.shard
    if not path.is_file():
        yield Damage(shard.name, f"{shard.num_bytes} bytes", "no such file")
        return
    if (size := path.stat().st_size) != shard.num_bytes:
        yield Damage(shard.name, f"{shard.num_bytes} bytes", f"{size} bytes")
        return
    if (found := hash_of_file(path)) != shard.hash:
        yield Damage(shard.name, shard.hash, found)
    try:
        tensors = open_shard(path)
        names = {TOKEN_IDS, LOSS_MASK, *(column.name for column in header.columns)}
        if tensors.keys() != names:
            raise ValueError(f"tensors {sorted(tensors)}, not {sorted(names)}")
    except (OSError, KeyError, TypeError, ValueError) as error:
        yield Damage(shard.name, "the tensors of a shard", f"{type(error).__name__}: {error}")
        return
    end = 0
    for sequence in sequences:
        if sequence.first_row != end:
            yield Damage(f"{part.name}, request '{sequence.request_id}'", f"first row {end}", f"row {sequence.first_row}")
        end = sequence.first_row + sequence.num_rows
        yield from _wrong_sequence(tensors, sequence, header, shard.name)
    if end != len(tensors[TOKEN_IDS]):
        yield Damage(part.name, f"sequences for {len(tensors[TOKEN_IDS])} rows of {shard.name}", f"for {end} rows")


def _wrong_sequence(tensors: dict, sequence: StoredSequence, header: Header, shard: str) -> Iterator[Damage]:
    place = slice(sequence.first_row, sequence.first_row + sequence.num_rows)
    who = f"{shard}, request '{sequence.request_id}'"
    if (found := token_hash(tensors[TOKEN_IDS][place])) != sequence.token_hash:
        yield Damage(f"{who}, {TOKEN_IDS}", sequence.token_hash, found)
    for column, right in zip(header.columns, sequence.hashes, strict=True):
        if (found := rows_hash(tensors[column.name][place])) != right:
            yield Damage(f"{who}, {column.name}", right, found)


def _unaccounted(out: Path, rows: list[tuple[int, str]], settled: int, *, is_part: bool) -> Iterator[Damage]:
    """Rows and ids that are there twice; of a whole input, rows that are nowhere."""
    for name, values in (("row", [row for row, _ in rows]), ("request id", [request_id for _, request_id in rows])):
        if len(set(values)) != len(values):
            twice = sorted({value for value in values if values.count(value) > 1}, key=str)[:5]
            yield Damage(f"the {name}s", "each once", f"more than once: {twice}")
    if is_part:
        return  # which rows belong to a part, only the input knows
    lost = set(range(settled)) - {row for row, _ in rows}
    for name in (REFUSED_NAME, FAILED_NAME):
        if (out / name).is_file():
            lost -= {json.loads(line)["row"] for line in (out / name).read_text().splitlines() if line}
    if lost:
        yield Damage(
            "the input's rows", f"rows 0 to {settled - 1} stored, refused or failed", f"{len(lost)} nowhere: {sorted(lost)[:5]}"
        )


def _damage(error: ExtractionError) -> Damage:
    return Damage(error.what, error.expected, error.found)
