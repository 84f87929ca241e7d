"""Every item in exactly one batch; tests/cpp/test_pack.py has the indices of a batch."""

import gc
from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tensorrt_llm_ext.recipes.contract import Limits, TensorSpec
from tensorrt_llm_ext.runtime.packing import batches, index_arrays, slot_bytes, windows


def items_of(lengths):
    return [SimpleNamespace(token_ids=np.zeros(length, np.int32), number=i) for i, length in enumerate(lengths)]


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


def test_a_slot_holds_the_largest_batch():
    tensors = [TensorSpec("a", "output", "float32", ("T", 7)), TensorSpec("b", "output", "float32", ("B", "S"))]
    limits = Limits(max_num_tokens=100, max_batch_size=10, max_seq_len=50, max_padded_tokens=120)
    assert slot_bytes(tensors, limits) == 512 + 256 * (-(-2800 // 256) + -(-480 // 256))  # two stamps, then each aligned


def test_index_arrays_are_those_of_a_plain_loop():
    inputs = [TensorSpec("position_ids", "input", "int32", ("T",)), TensorSpec("attention_rows", "input", "int32", ("B", "S"))]
    arrays = index_arrays(inputs, np.array([5, 6, 7], np.int32), np.array([0, 2, 3], np.int32), vocab_size=8)
    gc.collect()  # the arrays keep their memory alive
    assert arrays["position_ids"].tolist() == [0, 1, 0]
    assert arrays["attention_rows"].tolist() == [[0, 1], [2, 2]]
