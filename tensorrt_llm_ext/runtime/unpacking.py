"""Unpacking: a batch's outputs become each request's rows, and rows become a record that does not need the slot."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tensorrt_llm_ext.fingerprint import token_hash, token_hashes
from tensorrt_llm_ext.recipes.contract import Contract
from tensorrt_llm_ext.results.record import (
    Failure,
    Origin,
    Record,
    State,
    WorkItem,
    all_finite,
    row_hashes,
    rows_hash,
)
from tensorrt_llm_ext.results.records import Records, States
from tensorrt_llm_ext.results.side_by_side import side_by_side
from tensorrt_llm_ext.runtime.pipeline import Returned


def records(
    items: Sequence[WorkItem], batch: Returned, contract: Contract, origin: Origin
) -> Sequence[Record | Failure]:
    """Answer every item of a batch, in its order, as ``record`` does one by one.

    Where every tap gives one row a request, the batch is copied, checked and hashed as a whole, and a record's rows are
    a piece of that copy. Anything that is not as it must be there is found again, and named, one by one.
    """
    has_all_rows = any(tap.rows == "all" for tap in contract.taps)
    if has_all_rows or (states := _states(items, batch, contract)) is None:
        one_by_one = zip(items, unpack(batch, contract), strict=True)
        each = side_by_side if has_all_rows else map
        return list(each(lambda one: record(one[0], *one[1], contract, origin), one_by_one))
    return Records(
        [item.request_id for item in items],
        [item.work_item_id for item in items],
        [item.token_hash for item in items],
        np.diff(batch.offsets).tolist(),
        [item.truncated_from for item in items],
        states,
        origin,
    )


def _states(items: Sequence[WorkItem], batch: Returned, contract: Contract) -> tuple[States, ...] | None:
    """The states of every tap; None when a row is not finite, or other tokens ran than an item names."""
    if token_hashes(batch.token_ids, batch.offsets) != [item.token_hash for item in items]:
        return None
    states = []
    for tap in contract.taps:
        owned = batch.outputs[contract.output_of(tap).name].copy()  # [B, hidden]
        if not all_finite(owned):
            return None
        owned.flags.writeable = False
        states.append(States(tap, owned, contract.activation_dtype, row_hashes(owned)))
    return tuple(states)


def unpack(batch: Returned, contract: Contract) -> list[tuple[np.ndarray, list[np.ndarray]]]:
    """Give every sequence of the batch, in its order, the token ids that ran and the rows of each of the contract's taps.

    Both are views of the slot: rows are [1, hidden] for rows ``last`` and ``mean``, [tokens, hidden] for ``all``.
    """
    bounds = batch.offsets.tolist()
    spans = [slice(start, end) for start, end in zip(bounds, bounds[1:])]
    places = [slice(index, index + 1) for index in range(len(spans))]
    rows_of_taps = [
        [rows[where] for where in (spans if tap.rows == "all" else places)]
        for tap, rows in ((tap, batch.outputs[contract.output_of(tap).name]) for tap in contract.taps)
    ]
    return [(batch.token_ids[span], list(rows)) for span, rows in zip(spans, zip(*rows_of_taps, strict=True), strict=True)]


def record(
    item: WorkItem, ran: np.ndarray, rows: Sequence[np.ndarray], contract: Contract, origin: Origin
) -> Record | Failure:
    """Make one request's record from what came back, the rows of each of the contract's taps; its own are read-only copies.

    A Failure when a row holds NaN or Inf, or when the token ids that ``ran`` are not those the item's hash names.
    """
    if (hash_of_ran := token_hash(ran)) != item.token_hash:
        return _failure(item, "lineage", f"ran token ids {hash_of_ran}, the work item names {item.token_hash}")
    states = []
    for tap, view in zip(contract.taps, rows, strict=True):
        owned = view.copy()
        if reason := _not_finite(owned):
            return _failure(item, "not_finite", f"{tap.spelling(contract.architecture.num_layers)}: {reason}")
        owned.flags.writeable = False
        states.append(State(tap, owned, contract.activation_dtype, rows_hash(owned)))
    return Record(
        request_id=item.request_id,
        work_item_id=item.work_item_id,
        token_hash=item.token_hash,
        num_tokens=len(ran),
        truncated_from=item.truncated_from,
        states=tuple(states),
        origin=origin,
    )


def _not_finite(rows: np.ndarray) -> str:
    if all_finite(rows):
        return ""
    is_finite = np.isfinite(rows)
    row, column = np.argwhere(~is_finite)[0]
    num_wrong = is_finite.size - is_finite.sum()
    return f"{num_wrong} of {is_finite.size} values are NaN or Inf, the first at row {row}, column {column}"


def _failure(item: WorkItem, code: str, reason: str) -> Failure:
    return Failure(item.request_id, item.work_item_id, code, reason)
