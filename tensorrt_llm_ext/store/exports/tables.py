"""The formats for everybody: Parquet, Hugging Face's datasets, and plain NumPy arrays.

A row is a sequence: ``request_id``, ``row``, ``token_ids``, ``loss_mask``, and one column a tap, ``[tokens, hidden]``. bfloat16,
which not every reader knows, becomes float32 without loss. In NumPy's form all sequences lie back to back, one ``.npy`` a
column, and ``index.parquet`` says which rows are whose.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tensorrt_llm_ext.store.exports.speculators import saved_rows
from tensorrt_llm_ext.store.exports.tensors import library, plain
from tensorrt_llm_ext.store.header import Column, Header
from tensorrt_llm_ext.store.states_reading import TrainingSequence

_GROUP_BYTES = 64 << 20  # of a row group: what is in memory
_FILE_BYTES = 1 << 30


def write_parquet(sequences: Iterable[TrainingSequence], out: Path, header: Header) -> None:
    """Write ``part-00000.parquet`` …, each of about a gigabyte."""
    schema = _schema(header)
    writer, number, written = None, 0, 0
    for table in _tables(sequences, header, schema):
        if writer is None or written > _FILE_BYTES:
            if writer is not None:
                writer.close()
            writer, number, written = pq.ParquetWriter(out / f"part-{number:05d}.parquet", schema), number + 1, 0
        writer.write_table(table)
        written += table.nbytes
    if writer is None:
        writer = pq.ParquetWriter(out / "part-00000.parquet", schema)
    writer.close()


def write_hf_dataset(sequences: Iterable[TrainingSequence], out: Path, header: Header) -> None:
    """Write what ``datasets.load_from_disk`` reads."""
    datasets = library("datasets", "the format hf-datasets")
    features = datasets.Features.from_arrow_schema(_schema(header))

    def rows():
        for sequence in sequences:
            yield {
                **_identity(sequence),
                **{name: list(plain(np.asarray(states))) for name, states in sequence.states.items()},
            }

    saved_rows(datasets, rows, features, out).save_to_disk(out)


def write_numpy(sequences: Iterable[TrainingSequence], out: Path, header: Header, num_tokens: int) -> None:
    """Write one array a column, a token a row, and the index."""
    arrays = {
        column.name: _npy(out / f"{column.name}.npy", (num_tokens, column.hidden_size), _dtype(column))
        for column in header.columns
    }
    token_ids = _npy(out / "token_ids.npy", (num_tokens,), np.dtype(np.int32))
    loss_mask = _npy(out / "loss_mask.npy", (num_tokens,), np.dtype(np.uint8))
    index: list[dict] = []
    end = 0
    for sequence in sequences:
        start, end = end, end + len(sequence.token_ids)
        token_ids[start:end], loss_mask[start:end] = sequence.token_ids, sequence.loss_mask
        for name, states in sequence.states.items():
            arrays[name][start:end] = plain(states)
        index.append(
            {"request_id": sequence.request_id, "row": sequence.row, "first_row": start, "num_rows": end - start}
        )
    for array in (*arrays.values(), token_ids, loss_mask):
        if isinstance(array, np.memmap):
            array.flush()
    fields = [("request_id", pa.string()), ("row", pa.int64()), ("first_row", pa.int64()), ("num_rows", pa.int64())]
    pq.write_table(pa.Table.from_pylist(index, schema=pa.schema(fields)), out / "index.parquet")


def _npy(path: Path, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    if not shape[0]:  # an empty file cannot be mapped
        np.save(path, np.empty(shape, dtype))
        return np.empty(shape, dtype)
    return np.lib.format.open_memmap(path, "w+", dtype=dtype, shape=shape)


def _dtype(column: Column) -> np.dtype:
    dtype = np.dtype(column.stored_dtype)
    return np.dtype(np.float32) if dtype == ml_dtypes.bfloat16 else dtype


def _schema(header: Header) -> pa.Schema:
    fields = [
        ("request_id", pa.string()),
        ("row", pa.int64()),
        ("token_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
    ]
    for column in header.columns:
        row = pa.list_(pa.from_numpy_dtype(_dtype(column)), column.hidden_size)
        fields.append((column.name, pa.list_(row)))
    return pa.schema(fields)


def _tables(sequences: Iterable[TrainingSequence], header: Header, schema: pa.Schema) -> Iterator[pa.Table]:
    group: list[TrainingSequence] = []
    num_bytes = 0
    for sequence in sequences:
        group.append(sequence)
        num_bytes += len(sequence.token_ids) * header.value_bytes()
        if num_bytes > _GROUP_BYTES:
            yield _table(group, header, schema)
            group, num_bytes = [], 0
    if group:
        yield _table(group, header, schema)


def _table(group: list[TrainingSequence], header: Header, schema: pa.Schema) -> pa.Table:
    offsets = np.cumsum([0, *(len(sequence.token_ids) for sequence in group)], dtype=np.int32)
    columns = {
        "request_id": [sequence.request_id for sequence in group],
        "row": [sequence.row for sequence in group],
        "token_ids": pa.ListArray.from_arrays(offsets, np.concatenate([sequence.token_ids for sequence in group])),
        "loss_mask": pa.ListArray.from_arrays(offsets, np.concatenate([sequence.loss_mask for sequence in group])),
    }
    for column in header.columns:
        values = np.concatenate([plain(sequence.states[column.name]) for sequence in group]).reshape(-1)
        rows = pa.FixedSizeListArray.from_arrays(pa.array(values), column.hidden_size)
        columns[column.name] = pa.ListArray.from_arrays(offsets, rows)
    return pa.table(columns, schema=schema)


def _identity(sequence: TrainingSequence) -> dict:
    return {
        "request_id": sequence.request_id,
        "row": sequence.row,
        "token_ids": np.asarray(sequence.token_ids),
        "loss_mask": np.asarray(sequence.loss_mask),
    }
