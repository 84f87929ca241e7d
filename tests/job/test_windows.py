"""Windows are a pure function of the rows, and cutting may begin at any border."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_engines import LIMITS, work_item

from tensorrt_llm_ext.errors import InputError, Refusal
from tensorrt_llm_ext.inputs import AcceptedRow, RefusedRow
from tensorrt_llm_ext.job.windows import WindowLimits, window_limits, windows

REFUSAL = Refusal("empty_row", "blank", expected="a row", found="nothing", fix="fill it")


def rows_of(lengths, first=0):
    """A row of each length; None is a refused row."""
    return [
        RefusedRow(number, None, number + 1, None, REFUSAL)
        if length is None
        else AcceptedRow(number, None, work_item(str(number), np.ones(length)))
        for number, length in enumerate(lengths, first)
    ]


def spans(rows, limits):
    return [(window.start, window.end, window.num_tokens) for window in windows(rows, limits)]


def test_a_window_ends_at_its_rows_or_before_its_tokens_would_pass():
    limits = WindowLimits(max_rows=3, max_tokens=10)
    assert spans(rows_of([1, 1, 1, 1]), limits) == [(0, 3, 3), (3, 4, 1)]
    assert spans(rows_of([4, 4, 4]), limits) == [(0, 2, 8), (2, 3, 4)]
    assert spans(rows_of([5, 5]), limits) == [(0, 2, 10)]


def test_refused_rows_count_as_rows_and_not_as_tokens():
    assert spans(rows_of([None, 9, None, None, 9]), WindowLimits(3, 10)) == [(0, 3, 9), (3, 5, 9)]


def test_a_row_beyond_the_tokens_is_a_window_of_its_own():
    assert spans(rows_of([3, 20, 3]), WindowLimits(8, 10)) == [(0, 1, 3), (1, 2, 20), (2, 3, 3)]
    assert spans(rows_of([None, 20]), WindowLimits(8, 10)) == [(0, 2, 20)]


def test_no_rows_are_no_windows():
    assert spans([], WindowLimits(8, 10)) == []


lengths = st.lists(st.none() | st.integers(1, 25), max_size=60)
limits = st.builds(WindowLimits, max_rows=st.integers(1, 9), max_tokens=st.integers(1, 40))


@given(lengths, limits)
def test_every_row_is_in_one_window_in_order_and_cutting_may_begin_at_any_border(lengths, limits):
    rows = rows_of(lengths)
    found = list(windows(rows, limits))
    numbers = [sorted(row.number for row in window.accepted + window.refused) for window in found]
    assert [number for window in numbers for number in window] == list(range(len(lengths)))
    for index, window in enumerate(found):
        assert window.end - window.start == len(window.accepted) + len(window.refused) <= limits.max_rows
        assert window.num_tokens <= limits.max_tokens or len(window.accepted) == 1
        assert spans(rows[window.start :], limits) == [(w.start, w.end, w.num_tokens) for w in found[index:]]


def test_the_limits_follow_the_engine():
    assert window_limits(LIMITS) == WindowLimits(max_rows=4096, max_tokens=16 * LIMITS.max_num_tokens)


@pytest.mark.parametrize("bad", [(0, 1), (1, 0)])
def test_a_window_without_room_is_refused(bad):
    with pytest.raises(InputError, match="a window must hold a row"):
        WindowLimits(*bad)
