"""VectorStore: a Lance dataset of vectors, one row a request, in the order of the input; one commit is a whole window.

The output folder holds ``vectors.lance`` (the dataset, with ``manifest.json`` in it once the input has ended: how many
rows there are, and how many of the input are settled) and what the job writes beside it. A commit writes one data file,
then makes it visible by Lance's own transaction: a reader sees a commit whole or not at all, and a run that dies at any
moment leaves the last commit. Files of a commit that did not happen are removed, at once or when the dataset is next
opened for writing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from lance.fragment import write_fragments

from tensorrt_llm_ext.errors import ForeignDataset, StoreError
from tensorrt_llm_ext.results.record import Record, WorkItem
from tensorrt_llm_ext.results.records import Records
from tensorrt_llm_ext.store.disk import damage_errors, disk_errors
from tensorrt_llm_ext.store.folder import VECTORS_NAME, FolderLock, created, listing, locked, synced
from tensorrt_llm_ext.store.header import Column, Header, check_same, read_header
from tensorrt_llm_ext.store.lineage import check_lineages
from tensorrt_llm_ext.store.manifest import MANIFEST_NAME, write_json

_KEPT_VERSIONS_AGE = timedelta(minutes=10)  # for readers that are just opening one
_COMMITS_PER_SWEEP = 64


class VectorStore:
    """A dataset that is open for writing, by one writer at a time. ``create`` or ``open``, then ``close``."""

    def __init__(self, folder: Path, header: Header, lock: FolderLock) -> None:
        self.header = header
        self.path = folder / VECTORS_NAME
        self._lock = lock
        self._columns = header.columns
        self._schema = header.schema()
        self._pending: list[tuple[Sequence[int], Records]] = []  # numbers of input rows, and their records
        self._dataset = lance.dataset(str(self.path))
        self._sweep(timedelta(0))
        self.settled_end = 0
        self.num_rows = self._dataset.count_rows()
        self.num_bytes = sum(
            file.file_size_bytes or 0 for part in self._dataset.get_fragments() for file in part.metadata.files
        )

    @classmethod
    def create(cls, folder: Path, header: Header) -> VectorStore:
        """Make an empty dataset in ``folder``, which is new or empty.

        Raises ForeignDataset when the folder holds anything, TapError for taps of many rows, DiskFull, and StoreError
        when another run is writing there.
        """
        folder, schema = Path(folder), header.schema()

        def write(path: Path) -> None:
            lance.write_dataset(pa.Table.from_batches([], schema), str(path), schema=schema, mode="create")

        lock = created(folder, VECTORS_NAME, write)
        try:
            return cls(folder, header, lock)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def open(cls, folder: Path, header: Header) -> VectorStore:
        """Open a dataset to add rows to it.

        Raises ForeignDataset with the differences when it was made by another engine or under other conditions, or
        is something else; StoreError when another run is writing to it.
        """
        folder = Path(folder)
        stored = open_dataset(folder)
        lock = locked(folder)
        try:
            check_same(read_header(stored.schema, str(folder)), header, str(folder))
            with disk_errors(folder):
                return cls(folder, header, lock)
        except BaseException:
            lock.release()
            raise

    @property
    def settled_rows(self) -> int:
        """How many rows of the input, from the first, the commits have settled: stored, refused or failed."""
        with damage_errors(self.path):
            batches = self._dataset.to_batches(columns=["window_end"])
            return max((pc.max(batch["window_end"]).as_py() for batch in batches), default=0)

    def identities(self) -> Iterator[tuple[int, str, str, bytes | None]]:
        """The row number, request id, token hash and loss mask, always None, of every committed row, in order, in constant
        memory."""
        with damage_errors(self.path):
            for batch in self._dataset.to_batches(columns=["row", "request_id", "token_hash"], scan_in_order=True):
                for identity in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                    yield *identity, None

    def append(self, row: int, item: WorkItem, record: Record) -> None:
        """Take the record of input row ``row`` for the next commit. Raises LineageError, and then takes nothing."""
        self.extend([row], [item], [record])

    def extend(self, rows: Sequence[int], items: Sequence[WorkItem], records: Sequence[Record]) -> None:
        """Take many records as ``append`` takes one. Raises LineageError, and then takes none of them."""
        if records:
            self._pending.append((rows, check_lineages(records, items, self.header)))

    def commit(self, window_end: int) -> int:
        """Make every appended record visible, in row order; input rows before ``window_end`` are settled by it.

        Returns how many rows it stored. Raises DiskFull or StoreError; then nothing of it is kept on disk, and
        nothing in memory.
        """
        pending, self._pending = self._pending, []
        num_records = sum(len(records) for _, records in pending)
        if not pending:
            self.settled_end = window_end
            return 0
        try:
            with disk_errors(self.path):
                self._unseal()
                fragments = write_fragments(self._table(pending, window_end), self._dataset, schema=self._schema)
                self._sync(self.path / "data" / file.path for part in fragments for file in part.files)
                append = lance.LanceOperation.Append(fragments)
                self._dataset = lance.LanceDataset.commit(self._dataset, append, read_version=self._dataset.version)
                self._sync([self._newest_manifest()])
        except StoreError:
            self._dataset = lance.dataset(str(self.path))
            self._sweep(timedelta(0))
            if self._dataset.count_rows() != self.num_rows + num_records:  # else the commit happened before the error
                raise
        self.settled_end = window_end
        self.num_rows = self._dataset.count_rows()
        self.num_bytes += sum(file.file_size_bytes or 0 for part in fragments for file in part.files)
        if self._dataset.version % _COMMITS_PER_SWEEP == 0:
            self._sweep(_KEPT_VERSIONS_AGE)
        return num_records

    def flush(self) -> None:
        """Nothing: a commit of vectors is on the disk when it returns."""

    def seal(self) -> None:
        """Write manifest.json: the input has ended, and every row of it is settled. Raises StoreError."""
        manifest = {"num_rows": self.num_rows, "settled_rows": max(self.settled_end, self.settled_rows)}
        with disk_errors(self.path):
            write_json(self.path / MANIFEST_NAME, manifest)

    def _unseal(self) -> None:
        """A dataset that grows is not finished any more."""
        if (self.path / MANIFEST_NAME).exists():
            (self.path / MANIFEST_NAME).unlink()
            synced(self.path)

    def expected_bytes(self, num_rows: int, num_tokens: int) -> float:
        """Bytes that so many rows take: as those stored so far, or before the first commit by their values and identity."""
        return num_rows * (self.num_bytes / self.num_rows if self.num_rows else self.header.row_bytes())

    def close(self) -> None:
        """Forget what was not committed and let other writers in. Idempotent."""
        self._pending = []
        self._lock.release()

    def leave_to_fence(self) -> None:
        """Let go of the folder's lock: from now on a ``Fence`` held around every commit keeps other writers out."""
        self._lock.release()

    def __enter__(self) -> VectorStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _table(self, pending: list[tuple[Sequence[int], Records]], window_end: int) -> pa.Table:
        """All that is pending, in the order of the input's rows."""

        def joined(values: Callable[[Records], list]) -> list:
            return [value for _, records in pending for value in values(records)]

        rows = np.concatenate([rows for rows, _ in pending])
        columns = {
            "request_id": joined(lambda records: records.request_ids),
            "work_item_id": joined(lambda records: records.work_item_ids),
            "row": rows,
            "window_end": np.full(len(rows), window_end),
            "token_hash": joined(lambda records: records.token_hashes),
            "num_tokens": joined(lambda records: records.num_tokens),
            "truncated_from": joined(lambda records: records.truncated_from),
        }
        for place, column in enumerate(self._columns):
            states = [records.states[place] for _, records in pending]
            columns[column.name] = _vectors(np.concatenate([of.rows for of in states]), column)
            columns[column.hash_name] = [payload_hash for of in states for payload_hash in of.payload_hashes]
        table = pa.table(columns, schema=self._schema)
        return table if (rows[1:] > rows[:-1]).all() else table.take(pa.array(np.argsort(rows, kind="stable")))

    def _sync(self, paths) -> None:
        """Bring files, and their names, to the disk: a commit must not outlive its data when the power fails."""
        for path in paths:
            synced(path)
            synced(path.parent)

    def _newest_manifest(self) -> Path:
        return max((self.path / "_versions").glob("*.manifest"), key=lambda path: path.stat().st_mtime_ns)

    def _sweep(self, older_than: timedelta) -> None:
        """Remove files that no version names (this is the only writer) and old versions, which hold no other rows."""
        self._dataset.cleanup_old_versions(
            older_than=older_than, delete_unverified=True, error_if_tagged_old_versions=False
        )


def open_dataset(folder: Path) -> lance.LanceDataset:
    """Open the Lance dataset of an output folder (or named itself). Raises ForeignDataset when there is none."""
    folder = Path(folder)
    path = folder if folder.suffix == ".lance" else folder / VECTORS_NAME
    if not path.is_dir():
        raise ForeignDataset(
            f"'{folder}' holds no dataset of hidden states",
            expected=f"a folder with {VECTORS_NAME}",
            found=listing(folder) if folder.is_dir() else "no such folder",
            fix="name the folder that `trtllm-extract run --out` wrote, or a partition that `store --out` did",
        )
    try:
        return lance.dataset(str(path))
    except (ValueError, OSError) as error:
        raise ForeignDataset(
            f"'{path}' cannot be opened", expected="a Lance dataset", found=error, fix="name another folder"
        ) from error


def _vectors(rows: np.ndarray, column: Column) -> pa.Array:
    values = pa.array(rows.astype(column.stored_dtype, copy=False).reshape(-1))
    return pa.FixedSizeListArray.from_arrays(values, column.hidden_size)
