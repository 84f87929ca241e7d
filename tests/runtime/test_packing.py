"""Every item in exactly one batch; every index of a batch as a plain loop would compute it."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorrt_llm_ext.recipes.contract import Limits, TensorSpec
from tensorrt_llm_ext.runtime.packing import ALIGNMENT, KNOWN_INPUTS, batches, gather_ids, pack, slot_bytes, windows

SHAPES = {"attention_rows": ("B", "S"), "last_token_ids": ("B",), "sequence_lengths": ("B",)}
TENSORS = (
    TensorSpec("final_post_all", "output", "bfloat16", ("T", 7)),
    *(TensorSpec(name, "input", "int32", SHAPES.get(name, ("T",))) for name in KNOWN_INPUTS),
    TensorSpec("final_post_last", "output", "float32", ("B", 7)),
)

sequence_lengths = st.lists(st.integers(1, 17), min_size=1, max_size=20)


def items_of(lengths):
    return [SimpleNamespace(token_ids=np.zeros(length, np.int32), number=i) for i, length in enumerate(lengths)]


def packed(lengths, convention="prefix_sum"):
    offsets = np.cumsum([0, *lengths], dtype=np.int32)
    token_ids = np.arange(100, 100 + offsets[-1], dtype=np.int32)
    limits = Limits(sum(lengths), len(lengths), max(lengths), len(lengths) * max(lengths))
    memory = np.full(slot_bytes(TENSORS, limits), 0xEE, dtype=np.uint8)
    return token_ids, pack(memory, TENSORS, token_ids, offsets, convention)


def indexes_by_loops(token_ids, lengths):
    """What each input means, one token at a time."""
    longest = max(lengths)
    right = {name: [] for name in KNOWN_INPUTS}
    start = 0
    for b, length in enumerate(lengths):
        for position in range(length):
            right["input_ids"].append(token_ids[start + position])
            right["position_ids"].append(position)
            right["packed_slots"].append(b * longest + position)
        right["attention_rows"].append(
            [start + position if position < length else start + length - 1 for position in range(longest)]
        )
        start += length
        right["last_token_ids"].append(start)
        right["sequence_lengths"].append(length)
    return right


@given(sequence_lengths)
def test_pack_computes_what_a_plain_loop_computes(lengths):
    token_ids, batch = packed(lengths)
    right = indexes_by_loops(token_ids, lengths)
    assert set(batch.inputs) == set(KNOWN_INPUTS)
    for name, view in batch.inputs.items():
        assert view.dtype == np.int32 and view.tolist() == right[name], name
    assert (batch.shape.num_tokens, batch.shape.batch_size, batch.shape.longest) == (
        sum(lengths),
        len(lengths),
        max(lengths),
    )


@given(sequence_lengths)
def test_gathering_to_padded_and_back_is_the_identity(lengths):
    token_ids, batch = packed(lengths)
    padded = batch.inputs["input_ids"][batch.inputs["attention_rows"]]
    assert padded.reshape(-1)[batch.inputs["packed_slots"]].tolist() == token_ids.tolist()


@given(sequence_lengths)
def test_a_padded_slot_never_points_at_another_sequence(lengths):
    _, batch = packed(lengths)
    for b, rows in enumerate(batch.inputs["attention_rows"]):
        assert batch.offsets[b] <= rows.min() and rows.max() < batch.offsets[b + 1]


@given(sequence_lengths, st.sampled_from(["prefix_sum", "index"]))
def test_both_conventions_name_the_same_last_rows(lengths, convention):
    token_ids, batch = packed(lengths, convention)
    rows = batch.inputs["last_token_ids"] - (1 if convention == "prefix_sum" else 0)
    assert rows.tolist() == (np.cumsum(lengths) - 1).tolist()
    assert gather_ids(batch.offsets, convention).tolist() == batch.inputs["last_token_ids"].tolist()


@given(sequence_lengths)
def test_tensors_of_a_batch_lie_apart_aligned_inputs_first(lengths):
    _, batch = packed(lengths)
    views = [*batch.inputs.values(), *batch.outputs.values()]
    spans = [(view.ctypes.data, view.ctypes.data + view.nbytes) for view in views]
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:]))
    assert all((start - spans[0][0]) % ALIGNMENT == 0 for start, _ in spans)
    assert {name: (view.dtype.name, view.shape) for name, view in batch.outputs.items()} == {
        "final_post_all": ("bfloat16", (sum(lengths), 7)),
        "final_post_last": ("float32", (len(lengths), 7)),
    }


@given(
    st.lists(st.integers(1, 40), max_size=60),
    st.builds(
        Limits,
        st.integers(40, 200),
        st.integers(1, 16),
        st.just(40),
        st.integers(40, 200),
        st.none() | st.integers(1, 200),
    ),
)
def test_every_item_is_in_exactly_one_batch_within_every_limit(lengths, limits):
    items = items_of(lengths)
    formed = batches(items, limits)
    assert sorted(item.number for batch in formed for item in batch) == list(range(len(items)))
    for batch in formed:
        longest = max(len(item.token_ids) for item in batch)
        num_tokens = sum(len(item.token_ids) for item in batch)
        assert 0 < len(batch) <= limits.max_batch_size
        assert num_tokens <= limits.max_num_tokens
        assert len(batch) * longest <= limits.max_padded_tokens
        assert len(batch) == 1 or limits.opt_num_tokens is None or num_tokens <= limits.opt_num_tokens


def test_items_are_sorted_by_length_as_numbers_and_equal_lengths_keep_their_order():
    lengths = [10, 9, 2, 9, 100] * 40  # many: NumPy's unstable sorts are stable on few
    order = [item.number for batch in batches(items_of(lengths), Limits(1000, 100, 100, 1000)) for item in batch]
    assert order == sorted(range(len(lengths)), key=lambda number: (lengths[number], number))


def test_a_batch_is_closed_only_when_the_next_item_would_pass_a_limit():
    assert [len(batch) for batch in batches(items_of([5] * 12), Limits(25, 100, 100, 1000))] == [5, 5, 2]
    assert [len(batch) for batch in batches(items_of([5] * 12), Limits(1000, 8, 100, 1000))] == [8, 4]
    assert [len(batch) for batch in batches(items_of([1, 1, 1, 9]), Limits(1000, 100, 100, 27))] == [3, 1]
    assert [len(batch) for batch in batches(items_of([5] * 12), Limits(1000, 100, 100, 1000, 10))] == [2] * 6


def test_windows_take_the_stream_in_order_without_reading_ahead():
    stream = iter(range(7))
    cut = windows(stream, 3)
    assert next(cut) == [0, 1, 2] and next(stream) == 3
    assert list(cut) == [[4, 5, 6]]


@pytest.mark.parametrize("shape", [("T", 7), ("B", "S"), ("B",), (3, "S")])
def test_a_slot_holds_the_largest_batch(shape):
    limits = Limits(max_num_tokens=100, max_batch_size=10, max_seq_len=50, max_padded_tokens=120)
    elements = {("T", 7): 700, ("B", "S"): 120, ("B",): 10, (3, "S"): 150}[shape]
    assert slot_bytes([TensorSpec("x", "input", "int32", shape)], limits) == -(-elements * 4 // ALIGNMENT) * ALIGNMENT
