"""A second opinion forgives what float64 shows to be rounding, and nothing else."""

import numpy as np
import pytest

from tensorrt_llm_ext.checkpoint import open_checkpoint
from tensorrt_llm_ext.checks import reference_states, rounding
from tensorrt_llm_ext.checks.comparison import Tolerance
from tensorrt_llm_ext.checks.rounding import SecondOpinion, second_opinions
from tensorrt_llm_ext.taps import Tap

TAP = Tap(8, "pre", "all")
TOLERANCE = Tolerance(min_cosine=0.999_999, max_absolute=1e-4, max_of_row=0.0, same_next_token=True)


@pytest.fixture
def judged(checkpoint_path, items, monkeypatch):
    """Move one value of our row and of the reference's row away from float64, and ask for a second opinion."""
    monkeypatch.setattr(rounding, "MAX_ROWS", 0.02)  # 1 of 63 rows

    def judge(ours, theirs, num_rows=1):
        with open_checkpoint(checkpoint_path) as checkpoint:
            sequences = [item.token_ids for item in items]
            states = {(layer, norm): s for layer, norm, s in reference_states(checkpoint, sequences, dtype="float64")}
            exact = {item.request_id: state for item, state in zip(items, states[8, "pre"], strict=True)}
            found, expected = ({name: rows.copy() for name, rows in exact.items()} for _ in range(2))
            for row in range(num_rows):
                found["r12"][row, 5] += ours
                expected["r12"][row, 5] += theirs
            return second_opinions(checkpoint, items, {TAP: expected}, {TAP: found}, TOLERANCE)

    return judge


def test_rows_within_the_tolerance_need_no_opinion(judged):
    assert judged(0.5e-4, -0.4e-4) == ()


def test_a_row_that_the_reference_misses_by_as_much_is_rounding(judged):
    (opinion,) = judged(1.1e-4, -0.8e-4)
    assert (opinion.tap, opinion.request_id, opinion.row) == ("final:pre@all", "r12", 0)
    assert opinion.from_float64 == pytest.approx(1.1e-4, rel=1e-3)
    assert opinion.reference_from_float64 == pytest.approx(0.8e-4, rel=1e-3)
    assert opinion.difference == pytest.approx(1.9e-4, rel=1e-3) and opinion.is_rounding


def test_a_row_that_the_reference_has_right_is_wrong(judged):
    (opinion,) = judged(3e-4, 0.1e-4)
    assert not opinion.is_rounding


def test_a_row_that_is_clearly_wrong_gets_no_second_opinion(judged):
    assert judged(4.1e-4, 0.0) == () and judged(np.nan, 0.0) == ()


def test_many_rows_get_no_second_opinion(judged):
    assert judged(1.1e-4, -0.8e-4, num_rows=2) == ()


def test_rounding_means_within_the_limit_or_twice_the_reference():
    opinion = lambda ours, theirs: SecondOpinion("t", "r", 0, 1.0, 1.0, ours, theirs)  # noqa: E731
    assert opinion(0.9, 0.0).is_rounding and opinion(1.9, 1.0).is_rounding
    assert not opinion(1.1, 0.5).is_rounding and not opinion(2.1, 1.0).is_rounding
