"""Records of a batch as columns are the records themselves."""

import numpy as np
import pytest

from tensorrt_llm_ext.results import Origin, Record, Records, State, row_hashes, rows_hash
from tensorrt_llm_ext.taps import Tap

LAST, MEAN, OTHER = Tap(4, "post", "last"), Tap(2, "pre", "mean"), Tap(1, "pre", "last")
ORIGIN = Origin("tiny", "sha256:c", 4, 6, "sha256:t", "given", None, None, "sha256:e", "ort", "prefix_sum", "0.1")


def a_record(number):
    rows = np.random.default_rng(number).normal(size=(2, 1, 6)).astype(np.float32)
    states = tuple(State(tap, of_tap, "bfloat16", rows_hash(of_tap)) for tap, of_tap in zip((LAST, MEAN), rows, strict=True))
    return Record(f"r{number}", f"row {number}", f"sha256:{number}", number + 1, number % 2 or None, states, ORIGIN)


def as_text(record):
    return repr(record), [state.rows.tobytes() for state in record.states]


@pytest.fixture
def single():
    return [a_record(number) for number in range(5)]


def test_each_record_comes_back_at_its_place(single):
    records = Records.of(single)
    assert len(records) == 5
    for again in (list(records), records[:], [records[place] for place in range(5)], [records[place - 5] for place in range(5)]):
        assert list(map(as_text, again)) == list(map(as_text, single))
    assert list(map(as_text, records[1:3])) == list(map(as_text, single[1:3]))
    with pytest.raises(IndexError):
        records[5]


def test_the_hashes_are_those_of_the_columns(single):
    for states in Records.of(single).states:
        assert row_hashes(states.rows) == states.payload_hashes


def test_taps_are_chosen_in_the_order_asked_for_and_never_half(single):
    records = Records.of(single)
    assert [states.tap for states in records.with_taps([MEAN]).states] == [MEAN]
    assert as_text(records.with_taps([MEAN])[3])[1] == [single[3].states[1].rows.tobytes()]
    for taps in ([LAST, MEAN], [MEAN, LAST], [OTHER]):  # all, or one that is lacking: as they are, for the store to judge
        assert records.with_taps(taps) is records
