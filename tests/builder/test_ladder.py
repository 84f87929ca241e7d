"""Every batch that the limits admit fits a rung, and no rung reserves much more than the limits."""

from hypothesis import given
from hypothesis import strategies as st

from tensorrt_llm_ext.builder.ladder import GROWTH, SHORTEST_RUNG, ladder
from tensorrt_llm_ext.recipes import Limits

SIZES = st.integers(1, 5000)


@st.composite
def limits(draw):
    max_seq_len = draw(SIZES)
    padded = max_seq_len + draw(st.integers(0, 60_000))
    return Limits(max_seq_len + draw(SIZES), draw(st.integers(1, 600)), max_seq_len, padded, opt_num_tokens=1)


@given(limits(), st.data())
def test_every_batch_within_the_limits_fits_the_first_rung_that_is_long_enough(bounds, data):
    longest = data.draw(st.integers(1, bounds.max_seq_len))
    num_sequences = data.draw(st.integers(1, min(bounds.max_batch_size, bounds.max_padded_tokens // longest)))
    num_tokens = min(bounds.max_num_tokens, num_sequences * longest)
    rung = next(rung for rung in ladder(bounds) if rung.max_seq_len >= longest)
    assert rung.max_batch_size >= num_sequences and rung.max_num_tokens >= num_tokens


@given(limits())
def test_no_rung_but_the_first_is_much_larger_than_the_limits(bounds):
    rungs = ladder(bounds)
    assert [rung.max_seq_len for rung in rungs] == sorted({rung.max_seq_len for rung in rungs})
    assert rungs[-1].max_seq_len == bounds.max_seq_len
    for rung in rungs[1:]:
        assert rung.max_batch_size * rung.max_seq_len <= GROWTH * bounds.max_padded_tokens
    assert rungs[0].max_batch_size * rungs[0].max_seq_len <= bounds.max_batch_size * SHORTEST_RUNG


def test_the_ladder_of_a_card():
    rungs = ladder(Limits(8192, 256, 2048, 16384, opt_num_tokens=8192))
    assert [(rung.max_batch_size, rung.max_seq_len) for rung in rungs] == [(256, 128), (127, 512), (31, 2048)]
