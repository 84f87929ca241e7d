"""Rows of token ids many at a time: what a reader gives where there is nothing to say about a single row.

One array instead of an object for every row and every token. What the rows become is the same as one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tensorrt_llm_ext.errors import Refusal
from tensorrt_llm_ext.fingerprint import token_hashes
from tensorrt_llm_ext.inputs.fields import request_id_of_row, token_ids_of_row
from tensorrt_llm_ext.inputs.policy import TokenPolicy
from tensorrt_llm_ext.inputs.rows import AcceptedRow, Fields, Row
from tensorrt_llm_ext.results.record import WorkItem

_INT32 = np.iinfo(np.int32)


@dataclass(frozen=True, eq=False)
class IdRows:
    """Consecutive rows; row ``number + i`` has the token ids ``token_ids[offsets[i] : offsets[i + 1]]``.

    ``request_ids`` are strings that are not empty, or None where no field holds them; ``fractions`` as in ``Row``;
    ``line`` is the first row's, in text files.
    """

    number: int
    line: int | None
    token_ids: np.ndarray  # int32 [tokens], read-only
    offsets: np.ndarray  # [rows + 1]
    request_ids: list[str] | None
    fractions: list[float | None]

    def __len__(self) -> int:
        return len(self.fractions)

    def rows(self, fields: Fields) -> Iterator[Row]:
        """The same rows, one by one."""
        spans = pairwise(self.offsets.tolist())
        for place, ((start, end), fraction) in enumerate(zip(spans, self.fractions, strict=True)):
            values: dict = {fields.ids: self.token_ids[start:end]}
            if self.request_ids is not None:
                values[fields.request_id] = self.request_ids[place]
            yield Row(self.number + place, None if self.line is None else self.line + place, values, fraction)


def columns_of_ids(
    batch: pa.RecordBatch, fields: Fields, number: int, line: int | None, fractions: list[float | None]
) -> IdRows | None:
    """The rows of a batch whose ids are whole; None where a null, a larger number, or another field wants to be looked at
    row by row."""
    if fields.loss_mask is not None or fields.request_id == fields.ids:
        return None
    column = batch[fields.ids]
    if pa.types.is_dictionary(column.type) or column.null_count or not len(column):
        return None
    values = column.flatten()
    if values.null_count:
        return None
    numbers = values.to_numpy()
    if len(numbers) and not _INT32.min <= numbers.min() <= numbers.max() <= _INT32.max:
        return None
    request_ids = None
    if fields.request_id is not None and (request_ids := _request_ids(batch[fields.request_id])) is None:
        return None
    token_ids = numbers.astype(np.int32)  # a copy: the file may be mapped, and is closed before the rows are used
    token_ids.flags.writeable = False
    offsets = np.cumsum([0, *pc.list_value_length(column).to_pylist()])
    return IdRows(number, line, token_ids, offsets, request_ids, fractions)


def _request_ids(column: pa.Array) -> list[str] | None:
    """A column of ids as text; None where one of them is not an id."""
    try:
        values = column.to_pylist()
    except UnicodeDecodeError:
        return None
    return None if None in values or "" in values else list(map(str, values))


def together(rows: Iterable[Row], fields: Fields) -> Iterator[Row | IdRows]:
    """Consecutive rows as one; a row that is refused, or whose fields will be, stays by itself.

    Of the other rows' fields only arrays are kept meanwhile.
    """
    run: list[tuple] = []
    for row in rows:
        if (kept := _kept(row, fields)) is not None:
            run.append(kept)
            continue
        if run:
            yield _joined(run, fields)
            run = []
        yield row
    if run:
        yield _joined(run, fields)


def _kept(row: Row, fields: Fields) -> tuple | None:
    if isinstance(row.fields, Refusal):
        return None
    try:
        return row.number, row.line, row.fraction, request_id_of_row(row, fields), token_ids_of_row(row, fields.ids)
    except Refusal:  # raised again, and told, where rows become work items
        return None


def _joined(run: list[tuple], fields: Fields) -> IdRows:
    numbers, lines, fractions, request_ids, sequences = zip(*run, strict=True)
    token_ids = np.concatenate(sequences)
    token_ids.flags.writeable = False
    offsets = np.cumsum([0, *map(len, sequences)])
    has_request_ids = fields.request_id is not None
    return IdRows(numbers[0], lines[0], token_ids, offsets, list(request_ids) if has_request_ids else None, list(fractions))


def one_by_one(rows: Iterable[Row | IdRows], fields: Fields) -> Iterator[Row]:
    """Every row on its own."""
    for row in rows:
        if isinstance(row, IdRows):
            yield from row.rows(fields)
        else:
            yield row


def accepted_rows(rows: IdRows, policy: TokenPolicy, vocab_size: int, source: str) -> list[AcceptedRow] | None:
    """Work items of all rows; None where a row is to be refused, cut or given a loss mask."""
    lengths = np.diff(rows.offsets)
    smallest, largest = rows.token_ids.min(initial=0), rows.token_ids.max(initial=0)
    is_served = 0 <= smallest and largest < vocab_size and lengths.min() > 0 and lengths.max() <= policy.max_length
    if not is_served or policy.loss_mask is not None:
        return None
    token_ids = rows.token_ids
    numbers = range(rows.number, rows.number + len(rows))
    return [
        AcceptedRow(number, fraction, WorkItem(request_id, f"{source}#{number}", token_ids[start:end], token_hash))
        for number, fraction, request_id, (start, end), token_hash in zip(
            numbers,
            rows.fractions,
            rows.request_ids or map(str, numbers),
            pairwise(rows.offsets.tolist()),
            token_hashes(token_ids, rows.offsets),
            strict=True,
        )
    ]
