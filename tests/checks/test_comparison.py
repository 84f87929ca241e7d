"""A comparison finds the largest difference and its place, and can fail: on one value, on nothing, on unequal sets."""

import numpy as np
import pytest

from tensorrt_llm_ext.checks.comparison import TOLERANCES, Tolerance, compare, rows_beyond, tolerance_of
from tensorrt_llm_ext.recipes.contract import row_cosines
from tensorrt_llm_ext.errors import VerificationFailed
from tensorrt_llm_ext.taps import Tap

TAP = Tap(3, "pre", "all")
FLOAT32 = TOLERANCES["float32"]


@pytest.fixture
def rows():
    """Three requests of 2, 1 and 4 rows."""
    random = np.random.default_rng(0)
    return {name: random.normal(size=(count, 8)).astype(np.float32) for name, count in (("a", 2), ("b", 1), ("c", 4))}


def changed(rows, request_id, row, column, value):
    copy = {name: array.copy() for name, array in rows.items()}
    copy[request_id][row, column] = value
    return copy


def test_equal_rows_pass_and_are_counted(rows):
    result = compare(TAP, 8, rows, rows, FLOAT32)
    assert result.num_rows_beyond == 0 and result.tap == "layer:3@all"
    assert (result.num_requests, result.num_rows, result.largest.difference) == (3, 7, 0.0)
    assert result.smallest_cosine.cosine == pytest.approx(1.0)


def test_the_largest_difference_is_reported_with_its_place_and_both_values(rows):
    found = changed(rows, "c", 2, 5, rows["c"][2, 5] + 0.5)
    result = compare(TAP, 8, rows, found, FLOAT32)
    assert result.num_rows_beyond == 1
    place = result.largest
    assert (place.request_id, place.row, place.column) == ("c", 2, 5)
    assert (place.expected, place.found) == (rows["c"][2, 5], found["c"][2, 5])
    assert place.difference == pytest.approx(0.5, rel=1e-6) and place.limit == 1e-3
    assert (result.smallest_cosine.request_id, result.smallest_cosine.row) == ("c", 2)


def test_a_row_with_a_massive_value_may_differ_by_a_share_of_it_and_its_neighbour_may_not(rows):
    large = changed(rows, "a", 0, 0, 4000.0)  # limit 0.08 for this row alone
    assert not compare(TAP, 8, large, changed(large, "a", 0, 0, 4000.07), FLOAT32).num_rows_beyond
    assert compare(TAP, 8, large, changed(large, "a", 0, 0, 4000.09), FLOAT32).num_rows_beyond == 1
    moved = compare(TAP, 8, large, changed(changed(large, "a", 0, 0, 4000.07), "a", 1, 0, large["a"][1, 0] + 0.01), FLOAT32)
    assert moved.num_rows_beyond == 1 and moved.largest.row == 0 and moved.nearest_to_limit.row == 1


def test_a_small_difference_in_direction_fails_by_its_cosine_alone(rows):
    tolerance = Tolerance(min_cosine=0.999_999, max_absolute=10.0, max_of_row=0.0, same_next_token=False)
    assert compare(TAP, 8, rows, changed(rows, "b", 0, 1, rows["b"][0, 1] + 0.1), tolerance).num_rows_beyond == 1


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_value_that_is_not_finite_is_infinitely_far_away(rows, value):
    result = compare(TAP, 8, rows, changed(rows, "b", 0, 3, value), FLOAT32)
    assert result.num_rows_beyond == 1 and result.largest.difference == np.inf and result.largest.column == 3


@pytest.mark.parametrize("empty", [{}, {"a": np.zeros((0, 8), np.float32)}])
def test_a_comparison_of_nothing_is_a_failure(empty):
    with pytest.raises(VerificationFailed, match="nothing to compare"):
        compare(TAP, 8, empty, empty, FLOAT32)


def test_different_requests_on_the_two_sides_are_a_failure(rows):
    with pytest.raises(VerificationFailed, match="different requests") as error:
        compare(TAP, 8, rows, {name: rows[name] for name in "ab"}, FLOAT32)
    assert "'c'" in error.value.found


def test_a_request_with_a_row_less_is_a_failure(rows):
    with pytest.raises(VerificationFailed, match="request 'c' has another number of rows"):
        compare(TAP, 8, rows, {**rows, "c": rows["c"][1:]}, FLOAT32)


def test_a_reference_that_is_not_finite_is_a_failure(rows):
    broken = changed(rows, "a", 1, 1, np.nan)
    with pytest.raises(VerificationFailed, match="reference itself is not finite"):
        compare(TAP, 8, broken, broken, FLOAT32)


def test_an_engine_that_computes_in_an_unknown_type_is_not_judged():
    with pytest.raises(VerificationFailed, match="no tolerance is stated for engines that compute in float8"):
        tolerance_of("float8")
    assert tolerance_of("bfloat16") is TOLERANCES["bfloat16"]


def test_zero_rows_agree_with_each_other_and_with_nothing_else():
    zero, one = np.zeros((1, 4)), np.ones((1, 4))
    assert row_cosines(zero, zero) == 1 and row_cosines(zero, one) == 0 and row_cosines(one, one) == pytest.approx(1)


def test_the_rows_beyond_are_those_that_were_counted(rows):
    found = changed(changed(rows, "c", 2, 5, rows["c"][2, 5] + 0.5), "a", 1, 0, np.nan)
    beyond = rows_beyond(rows, found, FLOAT32)
    assert [(row.request_id, row.row) for row in beyond] == [("a", 1), ("c", 2)]
    assert beyond[0].difference == np.inf and beyond[1].difference == pytest.approx(0.5, rel=1e-6)
    assert compare(TAP, 8, rows, found, FLOAT32).num_rows_beyond == len(beyond)
