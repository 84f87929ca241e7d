"""Comparing hidden states: the largest difference, where it is, both values, and whether the tolerance holds.

A comparison of nothing, or of unequal sets, is a failure, never a pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tensorrt_llm_ext.errors import VerificationFailed, nearest_name
from tensorrt_llm_ext.recipes.contract import row_cosines
from tensorrt_llm_ext.taps import Tap


@dataclass(frozen=True)
class Tolerance:
    """What may differ in one row: its cosine is at least ``min_cosine``, and no value is further off than ``max_absolute``
    or ``max_of_row`` times the row's largest magnitude, whichever is larger. ``same_next_token`` demands the same next
    token of every prompt; without it the agreement is only reported. The mean cosine of a tap's rows is at least
    ``min_mean_cosine``."""

    min_cosine: float
    max_absolute: float
    max_of_row: float
    same_next_token: bool
    min_mean_cosine: float = -1.0


# By the type the engine computes in.
TOLERANCES = {
    # The same arithmetic in another order. Measured on SmolLM2: 2.5e-5 on values of 38, and a cosine of 1 to nine digits;
    # massive activations reach thousands, where a fixed bound would be below one rounding step of float32.
    "float32": Tolerance(min_cosine=0.999_999, max_absolute=1e-3, max_of_row=2e-5, same_next_token=True),
    # 11 bits of mantissa. Measured on SmolLM2: 0.24 on values of 38 and a cosine of 0.99996.
    "float16": Tolerance(min_cosine=0.999_9, max_absolute=5e-2, max_of_row=2e-2, same_next_token=False),
    # 8 bits of mantissa. torch itself, in bfloat16, is 2.4 away on values of 38, with a cosine of 0.998.
    "bfloat16": Tolerance(min_cosine=0.995, max_absolute=0.1, max_of_row=0.1, same_next_token=False),
    # 4 bits of mantissa in every product that is not kept. A row is lost below 0.9, and two rows of that cosine differ by
    # half of their length: the bounds of single values only refuse what is not a rounding. The mean is what builds aim at.
    "fp8": Tolerance(min_cosine=0.9, max_absolute=0.5, max_of_row=0.5, same_next_token=False, min_mean_cosine=0.998),
}


LOWEST = 1e-3  # the share of rows below TapComparison.lowest_cosine


@dataclass(frozen=True)
class Difference:
    """One value that differs: where it is, what was expected and found, and the largest difference its row may have."""

    request_id: str
    row: int
    column: int
    expected: float
    found: float
    difference: float
    limit: float


@dataclass(frozen=True)
class RowCosine:
    """The cosine of one row with the row expected, in float64."""

    request_id: str
    row: int
    cosine: float


@dataclass(frozen=True)
class RowBeyond:
    """A row beyond the tolerance: its largest difference, the limit it had, and its cosine."""

    request_id: str
    row: int
    difference: float
    limit: float
    cosine: float


@dataclass(frozen=True)
class TapComparison:
    """The rows of one tap against the reference. ``nearest_to_limit`` is the value that uses most of what its row may
    differ by; ``largest`` is the largest absolute difference of all. ``lowest_cosine`` is the 0.1 % quantile."""

    tap: str
    num_requests: int
    num_rows: int
    num_rows_beyond: int
    largest: Difference
    nearest_to_limit: Difference
    smallest_cosine: RowCosine
    mean_cosine: float
    lowest_cosine: float


def tolerance_of(dtype: str) -> Tolerance:
    """The tolerance of an engine that computes in ``dtype``. Raises VerificationFailed when none is stated."""
    if dtype not in TOLERANCES:
        raise VerificationFailed(
            f"no tolerance is stated for engines that compute in {dtype}",
            expected=f"one of {', '.join(TOLERANCES)}",
            found=dtype,
            fix=nearest_name(dtype, TOLERANCES),
        )
    return TOLERANCES[dtype]


def compare(
    tap: Tap, num_layers: int, expected: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray], tolerance: Tolerance
) -> TapComparison:
    """Compare the rows of one tap, by request id. Values are arrays ``[rows, hidden]``.

    Raises VerificationFailed when there is nothing to compare, when the two sides hold different requests, when the rows
    of a request differ in shape, or when the reference is not finite. A found value that is not finite counts as
    infinitely far away.
    """
    spelling = tap.spelling(num_layers)
    _refuse_unfit(spelling, expected, found)
    rows = [_compare_rows(request_id, expected[request_id], found[request_id], tolerance) for request_id in expected]
    cosines = np.concatenate([row_cosines(expected[request_id], found[request_id]) for request_id in expected])
    return TapComparison(
        tap=spelling,
        num_requests=len(rows),
        num_rows=sum(len(array) for array in expected.values()),
        num_rows_beyond=sum(beyond for beyond, *_ in rows),
        largest=max((largest for _, largest, _, _ in rows), key=lambda place: place.difference),
        nearest_to_limit=max((nearest for _, _, nearest, _ in rows), key=lambda place: place.difference / place.limit),
        smallest_cosine=min((cosine for *_, cosine in rows), key=lambda place: place.cosine),
        mean_cosine=float(cosines.mean()),
        lowest_cosine=float(np.quantile(cosines, LOWEST)),
    )


def rows_beyond(
    expected: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray], tolerance: Tolerance
) -> list[RowBeyond]:
    """Every row that lies beyond the tolerance, of two sides that ``compare`` has accepted."""
    beyond = []
    for request_id, right in expected.items():
        for row in np.flatnonzero(~_measured(right, found[request_id], tolerance).is_within):
            measured = _measured(right[row : row + 1], found[request_id][row : row + 1], tolerance)
            difference, limit = float(measured.differences.max()), float(measured.limits[0])
            beyond.append(RowBeyond(request_id, int(row), difference, limit, float(measured.cosines[0])))
    return beyond


def _refuse_unfit(tap: str, expected: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray]) -> None:
    if not expected or not sum(array.size for array in expected.values()):
        raise VerificationFailed(
            f"there is nothing to compare for the tap {tap}",
            expected="at least one row",
            found=f"{len(expected)} requests, no rows",
            fix="give at least one prompt that the engine accepts",
        )
    if expected.keys() != found.keys():
        only = sorted(expected.keys() ^ found.keys())
        raise VerificationFailed(
            f"the two sides of the comparison hold different requests for the tap {tap}",
            expected=f"{len(expected)} requests, the same on both sides",
            found=f"{len(found)} requests; {len(only)} on one side only, the first is '{only[0]}'",
            fix="this is a defect of the runtime: keep the input and report it",
        )
    for request_id, array in expected.items():
        if array.shape != found[request_id].shape:
            raise VerificationFailed(
                f"request '{request_id}' has another number of rows or columns than the reference for the tap {tap}",
                expected=f"shape {list(array.shape)}",
                found=f"shape {list(found[request_id].shape)}",
                fix="this is a defect of the engine or the runtime: keep the input and report it",
            )
        if not np.isfinite(array).all():
            raise VerificationFailed(
                f"the reference itself is not finite for request '{request_id}', tap {tap}",
                expected="finite values",
                found=f"{int((~np.isfinite(array)).sum())} of {array.size} values are NaN or Inf",
                fix="look at the checkpoint's weights: float32 overflows in this model",
            )


@dataclass(frozen=True)
class _Measured:
    differences: np.ndarray  # [rows, hidden]
    limits: np.ndarray  # [rows]
    cosines: np.ndarray  # [rows]
    is_within: np.ndarray  # [rows]


def _measured(expected: np.ndarray, found: np.ndarray, tolerance: Tolerance) -> _Measured:
    expected, found = expected.astype(np.float64), found.astype(np.float64)
    with np.errstate(invalid="ignore"):
        differences = np.nan_to_num(np.abs(expected - found), nan=np.inf, posinf=np.inf)
    limits = np.maximum(tolerance.max_absolute, tolerance.max_of_row * np.abs(expected).max(axis=1))
    cosines = row_cosines(expected, found)
    is_within = (differences.max(axis=1) <= limits) & (cosines >= tolerance.min_cosine)
    return _Measured(differences, limits, cosines, is_within)


def _compare_rows(
    request_id: str, expected: np.ndarray, found: np.ndarray, tolerance: Tolerance
) -> tuple[int, Difference, Difference, RowCosine]:
    measured = _measured(expected, found, tolerance)
    differences, limits = measured.differences, measured.limits

    def place(flat: int) -> Difference:
        row, column = np.unravel_index(flat, differences.shape)
        return Difference(
            request_id,
            int(row),
            int(column),
            expected=float(expected[row, column]),
            found=float(found[row, column]),
            difference=float(differences[row, column]),
            limit=float(limits[row]),
        )

    worst = int(measured.cosines.argmin())
    return (
        int((~measured.is_within).sum()),
        place(int(differences.argmax())),
        place(int((differences / limits[:, None]).argmax())),
        RowCosine(request_id, worst, float(measured.cosines[worst])),
    )
