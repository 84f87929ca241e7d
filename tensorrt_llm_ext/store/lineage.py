"""Lineage: a record is stored only when it is the answer to its work item, from this engine, whole and finite."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import repeat

import numpy as np

from tensorrt_llm_ext.errors import LineageError
from tensorrt_llm_ext.results.record import Record, WorkItem, all_finite, row_hashes, rows_hash
from tensorrt_llm_ext.results.records import Records, States
from tensorrt_llm_ext.store.header import Column, Header


def check_lineage(record: Record, item: WorkItem, header: Header) -> None:
    """Check a record back to its work item; raise LineageError with everything that is not as it must be.

    Compared: request id, work item id, token hash and count, truncation; origin (engine, tokenizer, policy, measured
    convention); taps in order; and of each state dtype, shape, finite values and the hash, computed again.
    """
    wrong = [*_wrong_identity(record, item), *_wrong_origin(record, header), *_wrong_states(record, header)]
    if wrong:
        raise LineageError(
            f"the record of request '{item.request_id}' is not the answer to its work item",
            expected="; ".join(f"{name} {expected}" for name, expected, _ in wrong),
            found="; ".join(f"{name} {found}" for name, _, found in wrong),
            fix="this is a defect of the runtime or of whoever delivered the record: keep the input and report it",
        )


def check_lineages(records: Sequence[Record], items: Sequence[WorkItem], header: Header) -> Records:
    """``check_lineage`` of many records, each against the item at its place; the same records as columns.

    Columns are looked at together, and one by one only where that is not enough to call every record right.
    """
    is_columns = isinstance(records, Records)
    if not (is_columns and _are_right(records, items, header)):
        for record, item in zip(records, items, strict=True):
            check_lineage(record, item, header)
    return records if is_columns else Records.of(records)


def _are_right(records: Records, items: Sequence[WorkItem], header: Header) -> bool:
    return (
        records.request_ids == [item.request_id for item in items]
        and records.work_item_ids == [item.work_item_id for item in items]
        and records.token_hashes == [item.token_hash for item in items]
        and records.num_tokens == [len(item.token_ids) for item in items]
        and records.truncated_from == [item.truncated_from for item in items]
        and records.origin == header.origin
        and [states.tap for states in records.states] == [column.tap for column in header.columns]
        and all(map(_are_right_rows, records.states, header.columns, repeat(len(items))))
    )


def _are_right_rows(states: States, column: Column, num_records: int) -> bool:
    rows = states.rows
    return (
        column.tap.rows != "all"
        and rows.dtype == column.computed_dtype
        and rows.shape == (num_records, column.hidden_size)
        and all_finite(rows)
        and row_hashes(rows) == states.payload_hashes
    )


_Wrong = Iterator[tuple[str, object, object]]  # name, expected, found


def _wrong_identity(record: Record, item: WorkItem) -> _Wrong:
    for name in ("request_id", "work_item_id", "token_hash", "truncated_from"):
        if getattr(record, name) != getattr(item, name):
            yield name, getattr(item, name), getattr(record, name)
    if record.num_tokens != len(item.token_ids):
        yield "num_tokens", len(item.token_ids), record.num_tokens


def _wrong_origin(record: Record, header: Header) -> _Wrong:
    if record.origin == header.origin:
        return
    for field in dataclasses.fields(record.origin):
        expected, found = getattr(header.origin, field.name), getattr(record.origin, field.name)
        if field.name != "code_version" and found != expected:
            yield field.name, expected, found


def _wrong_states(record: Record, header: Header) -> _Wrong:
    columns = header.columns
    taps = tuple(state.tap for state in record.states)
    if taps != tuple(column.tap for column in columns):
        yield "taps", [column.tap for column in columns], list(taps)
        return
    for column, state in zip(columns, record.states, strict=True):
        yield from _wrong_rows(column, state, record.num_tokens if column.tap.rows == "all" else 1)


def _wrong_rows(column: Column, state: State, num_rows: int) -> _Wrong:
    shape = (num_rows, column.hidden_size)
    expected, found = (column.computed_dtype, shape), (state.rows.dtype.name, state.rows.shape)
    if found != expected:
        yield column.name, expected, found
    elif not all_finite(state.rows):
        yield column.name, "finite values", f"{np.count_nonzero(~np.isfinite(state.rows))} that are NaN or Inf"
    elif (computed := rows_hash(state.rows)) != state.payload_hash:
        yield column.hash_name, state.payload_hash, computed
