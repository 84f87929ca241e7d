"""Reading a dataset of vectors: its header, its records, and nearest neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import lance
import ml_dtypes  # noqa: F401  registers bfloat16 as a NumPy type
import numpy as np
import pyarrow as pa

from tensorrt_llm_ext.errors import StoreError, nearest_name
from tensorrt_llm_ext.results.record import Record, State, rows_hash
from tensorrt_llm_ext.store.disk import damage_errors
from tensorrt_llm_ext.store.header import Column, Header, read_header
from tensorrt_llm_ext.store.vectors import open_dataset

Metric = Literal["cosine", "l2", "dot"]


@dataclass(frozen=True)
class Neighbour:
    """A request near another vector; ``distance`` in the metric asked for, smaller is nearer."""

    request_id: str
    distance: float


class Vectors:
    """A dataset open for reading, as of its last commit. ``dataset`` is Lance's own object, for everything else."""

    def __init__(self, dataset: lance.LanceDataset, header: Header) -> None:
        self.dataset = dataset
        self.header = header
        self.columns = {column.name: column for column in header.columns}

    def __len__(self) -> int:
        return self.dataset.count_rows()

    def records(self) -> Iterator[Record]:
        """Every row as the record it was, in input order, in constant memory, each state's hash checked.

        Raises StoreError for a row whose values are not the ones that were stored, and for a damaged file.
        """
        with damage_errors(self.dataset.uri):
            for batch in self.dataset.to_batches(scan_in_order=True):
                yield from self._records(batch)

    def vector(self, request_id: str, column: str) -> np.ndarray:
        """The vector of one request, ``[hidden]``, in the dtype as stored. Raises StoreError when there is none."""
        self._known(column)
        quoted = request_id.replace("'", "''")
        with damage_errors(self.dataset.uri):
            found = self.dataset.to_table(columns=[column], filter=f"request_id = '{quoted}'", limit=1)
        if not found.num_rows:
            raise StoreError(
                f"the dataset has no request '{request_id}'",
                expected=f"one of its {len(self)} request ids",
                found=repr(request_id),
                fix="the request may have been refused: see refused.jsonl beside the dataset",
            )
        return found[column].combine_chunks().values.to_numpy()

    def nearest(self, column: str, query: np.ndarray, k: int, metric: Metric = "cosine") -> list[Neighbour]:
        """The ``k`` requests whose vectors lie nearest to ``query`` ``[hidden]``, the nearest first.

        Exact unless an index was made on the column.
        """
        dtype = self._known(column).stored_dtype
        search = {"column": column, "q": np.asarray(query, dtype=dtype), "k": k, "metric": metric}
        with damage_errors(self.dataset.uri):
            found = self.dataset.to_table(columns=["request_id", "_distance"], nearest=search)
        pairs = zip(found["request_id"].to_pylist(), found["_distance"].to_pylist(), strict=True)
        return [Neighbour(request_id, distance) for request_id, distance in pairs]

    def _known(self, column: str) -> Column:
        if column not in self.columns:
            raise StoreError(
                f"the dataset has no vectors '{column}'",
                expected=f"one of {', '.join(self.columns)}",
                found=column,
                fix=nearest_name(column, self.columns),
            )
        return self.columns[column]

    def _records(self, batch: pa.RecordBatch) -> Iterator[Record]:
        names = ("request_id", "work_item_id", "token_hash", "num_tokens", "truncated_from")
        identities = batch.select(names).to_pylist()
        rows = {
            name: batch[name].flatten().to_numpy().reshape(len(batch), -1).astype(column.computed_dtype)
            for name, column in self.columns.items()
        }
        for place, identity in enumerate(identities):
            states = tuple(
                self._state(column, rows[name][place : place + 1], batch[column.hash_name][place].as_py(), identity)
                for name, column in self.columns.items()
            )
            yield Record(**identity, states=states, origin=self.header.origin)

    def _state(self, column: Column, rows: np.ndarray, stored_hash: str, identity: dict) -> State:
        if (found := rows_hash(rows)) != stored_hash:
            raise StoreError(
                f"the row of request '{identity['request_id']}' is damaged",
                expected=f"{column.hash_name} {stored_hash}",
                found=found,
                fix="extract it again; check the disk",
            )
        return State(column.tap, rows, self.header.contract.activation_dtype, stored_hash)


def open_vectors(path: Path) -> Vectors:
    """Open an output folder, or the ``vectors.lance`` in it. Raises ForeignDataset when it is something else."""
    dataset = open_dataset(path)
    return Vectors(dataset, read_header(dataset.schema, str(path)))
