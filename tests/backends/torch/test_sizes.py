"""Every batch within an engine's limits needs a set of launches that is made when the engine opens."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorrt_llm_ext.backends.torch.sizes import TILE, bucket, buckets, grid_sequences, launches, num_places, num_tiles
from tensorrt_llm_ext.recipes.contract import Limits


def launched(num_tokens, batch_size, longest, is_deterministic):
    num_rows, count = bucket(num_tokens, is_deterministic), grid_sequences(batch_size)
    return num_rows, count, num_tiles(num_rows, count) if longest > TILE else 0


@settings(max_examples=300, deadline=None)
@given(data=st.data(), is_deterministic=st.booleans())
def test_every_batch_finds_its_launches(data, is_deterministic):
    max_seq_len = data.draw(st.integers(1, 700))
    limits = Limits(data.draw(st.integers(max_seq_len, 5000)), data.draw(st.integers(1, 300)), max_seq_len, 10**9)
    made = [launched(*batch, is_deterministic) for batch in launches(limits, is_deterministic)]
    assert len(set(made)) == len(made)
    budget = data.draw(st.integers(1, limits.max_num_tokens))
    lengths = []
    while budget and len(lengths) < limits.max_batch_size:
        lengths.append(min(data.draw(st.integers(1, max_seq_len)), budget))
        budget -= lengths[-1]
    assert launched(sum(lengths), len(lengths), max(lengths), is_deterministic) in made


@pytest.mark.parametrize("limits", [Limits(16384, 1024, 2048, 10**9), Limits(4096, 4096, 100, 10**9), Limits(300, 1, 300, 10**9)])
def test_launches_lie_within_the_limits_and_their_places_in_memory(limits):
    for num_tokens, batch_size, longest in launches(limits):
        assert batch_size <= num_tokens <= min(limits.max_num_tokens, batch_size * longest)
        assert batch_size <= limits.max_batch_size and longest <= limits.max_seq_len
        num_rows, count, tiles = launched(num_tokens, batch_size, longest, False)
        assert num_rows in buckets(limits.max_num_tokens) and 2 * count + 3 * tiles <= num_places(limits)
