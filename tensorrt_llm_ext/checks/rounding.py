"""A second opinion on rows just beyond the tolerance: are they wrong, or is it float32's own rounding?

A few tokens grow massive activations in one layer, and on the way there a rounding error of 1e-6 of the row becomes
1e-5. Two right float32 runs are then further apart than the tolerance. Float64 decides: a row is right when it lies no
further from float64 than the tolerance, or than twice what the float32 reference itself does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tensorrt_llm_ext.builder.canaries import rows_of
from tensorrt_llm_ext.checkpoint import Checkpoint
from tensorrt_llm_ext.checks.comparison import RowBeyond, Tolerance, rows_beyond
from tensorrt_llm_ext.checks.reference import reference_states
from tensorrt_llm_ext.results.record import WorkItem
from tensorrt_llm_ext.taps import Tap

Rows = Mapping[Tap, Mapping[str, np.ndarray]]
"""Rows by tap and request id."""

NEAR = 4.0  # limits: what is further off is not rounding, and no second opinion is asked
MAX_ROWS = 0.01  # of all rows: rounding meets a few tokens, a wrong engine meets most
TWICE = 2.0  # two float32 runs of equal quality: either may be the further one


@dataclass(frozen=True)
class SecondOpinion:
    """A row beyond the tolerance, measured against float64: the largest difference of ours and of the float32 reference."""

    tap: str
    request_id: str
    row: int
    difference: float  # between ours and the float32 reference
    limit: float
    from_float64: float
    reference_from_float64: float

    @property
    def is_rounding(self) -> bool:
        return self.from_float64 <= max(self.limit, TWICE * self.reference_from_float64)


def second_opinions(
    checkpoint: Checkpoint, items: Sequence[WorkItem], expected: Rows, found: Rows, tolerance: Tolerance
) -> tuple[SecondOpinion, ...]:
    """Judge every row beyond the tolerance in float64; none is judged when one of them is clearly wrong, or many are."""
    beyond = {tap: rows_beyond(expected[tap], found[tap], tolerance) for tap in expected}
    every = [row for rows in beyond.values() for row in rows]
    num_rows = sum(len(rows) for by_id in expected.values() for rows in by_id.values())
    if not every or len(every) > MAX_ROWS * num_rows or not all(_is_near(row, tolerance) for row in every):
        return ()
    request_ids = {row.request_id for row in every}
    items = [item for item in items if item.request_id in request_ids]
    num_layers = checkpoint.architecture.num_layers
    opinions = []
    for layer, norm, states in reference_states(checkpoint, [item.token_ids for item in items], dtype="float64"):
        exact = {item.request_id: state for item, state in zip(items, states, strict=True)}
        for tap in (tap for tap in beyond if (tap.layer, tap.norm) == (layer, norm)):
            for row in beyond[tap]:
                right = rows_of(exact[row.request_id], tap.rows)[row.row]
                ours, theirs = (rows[tap][row.request_id][row.row] for rows in (found, expected))
                opinions.append(
                    SecondOpinion(
                        tap.spelling(num_layers),
                        row.request_id,
                        row.row,
                        row.difference,
                        row.limit,
                        from_float64=float(np.abs(ours - right).max()),
                        reference_from_float64=float(np.abs(theirs - right).max()),
                    )
                )
    return tuple(opinions)


def _is_near(row: RowBeyond, tolerance: Tolerance) -> bool:
    return row.difference <= NEAR * row.limit and row.cosine >= tolerance.min_cosine
