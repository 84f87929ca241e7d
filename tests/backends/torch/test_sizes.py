"""Every batch within an engine's limits needs a set of launches that is made when the engine opens; and memory that is told."""

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorrt_llm_ext.backends.torch.decoder import stretches
from tensorrt_llm_ext.backends.torch.sizes import (
    TILE,
    _workspace_bytes,
    bucket,
    buckets,
    engine_bytes,
    grid_sequences,
    grids,
    has_table,
    launches,
    num_places,
    num_tiles,
    warm_up_batches,
)
from tensorrt_llm_ext.backends.torch.values import COUNTER_BYTES
from tensorrt_llm_ext.backends.torch.weight_index import read_weight_index
from tensorrt_llm_ext.backends.torch.workspace import make_workspace
from tensorrt_llm_ext.recipes import read_contract
from tensorrt_llm_ext.recipes.contract import Limits
from tensorrt_llm_ext.taps import parse_taps


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
        assert num_rows in buckets(limits.max_num_tokens) and num_rows + 3 * count + 3 * tiles <= num_places(limits)
        assert count in grids(limits.max_batch_size)


@settings(max_examples=300, deadline=None)
@given(max_seq_len=st.integers(1, 700), more=st.integers(0, 5000), max_batch_size=st.integers(1, 300), is_deterministic=st.booleans())
def test_the_warm_up_runs_every_size_and_the_longest_sequence_within_the_limits(max_seq_len, more, max_batch_size, is_deterministic):
    limits = Limits(max_seq_len + more, max_batch_size, max_seq_len, 10**9)
    batches = warm_up_batches(limits, is_deterministic)
    for num_tokens, batch_size in batches:
        assert 1 <= batch_size <= min(num_tokens, max_batch_size) and num_tokens <= limits.max_num_tokens
        assert -(-num_tokens // batch_size) <= max_seq_len
    fullest, most = min(limits.max_num_tokens, max_batch_size * max_seq_len), min(max_batch_size, limits.max_num_tokens)
    assert {bucket(num_tokens, is_deterministic) for num_tokens, _ in batches} == {*buckets(fullest, is_deterministic)}
    assert {grid_sequences(batch_size) for _, batch_size in batches} == {*grids(most)}
    assert max(-(-num_tokens // batch_size) for num_tokens, batch_size in batches) == max_seq_len


@pytest.mark.parametrize("num_layers", [1, 4])
@pytest.mark.parametrize("taps", ["layer:0@all", "layer:1@last", "layer:1@mean", "final@last", "final:pre@last,layer:0@mean", "final@all"])
def test_the_table_is_made_where_the_first_layer_is_computed_for_every_row(taps, num_layers):
    if num_layers == 1 and "layer:1" in taps:
        taps = taps.replace("layer:1", "final")  # the highest layer is written so
    parsed = parse_taps(taps, num_layers)
    whole = [part.last - part.ends_in_last_rows for part in stretches(parsed, max(tap.layer for tap in parsed))]
    assert has_table(parsed) == (max(whole) > 0)


@pytest.mark.parametrize("limits", [Limits(3000, 130, 400, 10**9), Limits(100, 4097, 100, 10**9)])
@pytest.mark.parametrize("is_deterministic", [False, True])
def test_the_buffers_take_the_memory_that_is_told(limits, is_deterministic, engines):
    a = read_contract(engines("qwen2")).architecture
    space = make_workspace(a, limits, torch.float32, torch.device("cpu"), is_deterministic)
    storages, spaces = {}, [space, space.few]
    for one in spaces:
        for tensor in [getattr(one, field.name) for field in fields(one)] + [*one.inputs.values()]:
            if isinstance(tensor, torch.Tensor):
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    assert sum(storages.values()) == _workspace_bytes(a, limits, 4, is_deterministic) + COUNTER_BYTES
    assert len(space.last_rows(limits.max_batch_size).x) == grid_sequences(limits.max_batch_size)


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
