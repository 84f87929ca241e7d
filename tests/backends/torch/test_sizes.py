"""The sizes that batches are computed in; and memory that is told."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorrt_llm_ext.backends.torch.decoder import stretches
from tensorrt_llm_ext.backends.torch.sizes import (
    TILE,
    bucket,
    buckets,
    engine_bytes,
    grid_sequences,
    grids,
    has_table,
    num_places,
    num_tiles,
)
from tensorrt_llm_ext.backends.torch.weight_index import read_weight_index
from tensorrt_llm_ext.recipes import read_contract
from tensorrt_llm_ext.recipes.contract import Limits
from tensorrt_llm_ext.taps import parse_taps


@settings(max_examples=300, deadline=None)
@given(data=st.data(), is_deterministic=st.booleans())
def test_every_batch_is_computed_in_sizes_that_the_warm_up_ran_and_laid_out_in_memory_that_is_there(data, is_deterministic):
    max_seq_len = data.draw(st.integers(1, 700))
    limits = Limits(data.draw(st.integers(max_seq_len, 5000)), data.draw(st.integers(1, 300)), max_seq_len, 10**9)
    budget = data.draw(st.integers(1, limits.max_num_tokens))
    lengths = []
    while budget and len(lengths) < limits.max_batch_size:
        lengths.append(min(data.draw(st.integers(1, max_seq_len)), budget))
        budget -= lengths[-1]
    num_rows, count = bucket(sum(lengths), is_deterministic), grid_sequences(len(lengths))
    assert num_rows in buckets(limits.max_num_tokens, is_deterministic) and num_rows >= sum(lengths)
    assert count in grids(limits.max_batch_size) and count >= len(lengths)
    tiles = num_tiles(num_rows, count)
    assert sum(-(-length // TILE) for length in lengths if length > TILE) <= tiles
    assert num_rows + 3 * count + 3 * tiles <= num_places(limits)


@pytest.mark.parametrize("num_layers", [1, 4])
@pytest.mark.parametrize("taps", ["layer:0@all", "layer:1@last", "layer:1@mean", "final@last", "final:pre@last,layer:0@mean", "final@all"])
def test_the_table_is_made_where_the_first_layer_is_computed_for_every_row(taps, num_layers):
    if num_layers == 1 and "layer:1" in taps:
        taps = taps.replace("layer:1", "final")  # the highest layer is written so
    parsed = parse_taps(taps, num_layers)
    whole = [part.last - part.ends_in_last_rows for part in stretches(parsed, max(tap.layer for tap in parsed))]
    assert has_table(parsed) == (max(whole) > 0)


def test_an_engine_s_memory_is_that_of_its_weights_buffers_and_table(engines, cpu_card):
    on_cpu, on_card = engines("qwen2"), engines("qwen2", card=replace(cpu_card, name="a card", compute_capability="9.0"))
    contract, index = read_contract(on_cpu), read_weight_index(on_cpu)
    a = contract.architecture

    def needed(taps, on_card):
        return engine_bytes(a, contract.limits, taps, index, item_bytes=4, is_fp8=False, on_card=on_card)

    table = 4 * a.vocab_size * (a.num_heads + 2 * a.num_kv_heads) * a.head_dim
    mean, last = (parse_taps(f"layer:1@{rows}", a.num_layers) for rows in ("mean", "last"))
    assert needed(mean, True) - table == needed(mean, False) == needed(last, True) == needed(last, False)
    assert contract.memory.host_bytes == needed(contract.taps, False) and not contract.memory.device_bytes
    contract = read_contract(on_card)
    assert contract.memory.device_bytes == needed(contract.taps, True) and not contract.memory.host_bytes
