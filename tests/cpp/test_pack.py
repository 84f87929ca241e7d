"""pack: every index array of a batch, straight into a slot, equal to a plain reference for any batch."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rig import DIGEST

from tensorrt_llm_ext import _runtime
from tensorrt_llm_ext.errors import PlanError

NUM_LAYERS, MAX_SEQ_LEN = 5, 96
LIMITS = {"vocab_size": 50, "max_num_tokens": 400, "max_batch_size": 24, "max_seq_len": MAX_SEQ_LEN, "max_padded_tokens": 1200}
INPUTS = [
    ("input_ids", "int32", ("T",)),
    ("position_ids", "int32", ("T",)),
    ("attention_rows", "int32", ("B", "S")),
    ("packed_slots", "int32", ("T",)),
    ("last_token_ids", "int32", ("B",)),
    ("sequence_lengths", "int32", ("B",)),
    ("context_lengths", "int32", ("B",)),
    ("host_context_lengths", "int32", ("B",)),
    ("host_request_types", "int32", ("B",)),
    ("host_max_attention_window_sizes", "int32", (NUM_LAYERS,)),
    ("host_sink_token_length", "int32", (1,)),
    ("host_runtime_perf_knobs", "int64", (16,)),
    ("host_context_progress", "int64", (1,)),
]
OUTPUTS = [("final_post_last", "bfloat16", ("B", 7)), ("layer_002_pre_all", "float32", ("T", 3))]
TENSORS = [(name, "input", *rest) for name, *rest in INPUTS] + [(name, "output", *rest) for name, *rest in OUTPUTS]


def layout_of(tensors=tuple(TENSORS), **limits) -> _runtime.Layout:
    return _runtime.Layout(list(tensors), **{**LIMITS, **limits})


def packed(token_ids, offsets, *, layout=None, convention="prefix_sum", **options) -> dict[str, np.ndarray]:
    """Pack into a fresh slot; a copy of every input by name."""
    layout = layout or layout_of()
    slot = _runtime.PinnedArena(layout.slot_bytes, 1).acquire(0)
    token_ids, offsets = np.asarray(token_ids, np.int32), np.asarray(offsets, np.int32)
    _runtime.pack(layout, token_ids, offsets, slot, convention=convention, batch=0, digest=DIGEST, **options)
    return {name: view.numpy().copy() for name, view in slot.inputs().items()}


def reference(token_ids, offsets, convention) -> dict[str, np.ndarray]:
    """The same, one value at a time."""
    sequences = [list(token_ids[begin:end]) for begin, end in zip(offsets[:-1], offsets[1:])]
    lengths = [len(sequence) for sequence in sequences]
    longest, starts = max(lengths), [sum(lengths[:i]) for i in range(len(lengths))]
    rows = [[starts[i] + min(s, n - 1) for s in range(longest)] for i, n in enumerate(lengths)]
    slots = [i * longest + s for i, n in enumerate(lengths) for s in range(n)]
    last = [starts[i] + n - (convention == "index") for i, n in enumerate(lengths)]
    return {
        "input_ids": [token for sequence in sequences for token in sequence],
        "position_ids": [s for n in lengths for s in range(n)],
        "attention_rows": rows,
        "packed_slots": slots,
        "last_token_ids": last,
        "sequence_lengths": lengths,
        "context_lengths": lengths,
        "host_context_lengths": lengths,
        "host_request_types": [0] * len(lengths),
        "host_max_attention_window_sizes": [MAX_SEQ_LEN] * NUM_LAYERS,
        "host_sink_token_length": [0],
        "host_runtime_perf_knobs": [-1] * 16,
        "host_context_progress": [0],
    }


@st.composite
def batches(draw):
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=10))
    before, after = draw(st.integers(0, 5)), draw(st.integers(0, 5))  # offsets of a slice of a longer array
    ids = draw(st.lists(st.integers(0, 49), min_size=(n := before + sum(lengths) + after), max_size=n))
    return ids, np.cumsum([before, *lengths]).tolist()


@settings(max_examples=150, deadline=None)
@given(batches(), st.sampled_from(["prefix_sum", "index"]))
def test_every_array_equals_the_reference_for_any_batch(batch, convention):
    token_ids, offsets = batch
    made, expected = packed(token_ids, offsets, convention=convention), reference(token_ids, offsets, convention)
    assert set(made) == set(expected) == {name for name, *_ in INPUTS}
    for name, dtype, _ in INPUTS:
        assert made[name].dtype == dtype, name
        assert made[name].tolist() == expected[name], name


@settings(max_examples=60, deadline=None)
@given(batches())
def test_padded_slots_stay_within_their_own_sequence_and_packed_slots_undo_them(batch):
    made = packed(*batch)
    owner = np.repeat(np.arange(len(batch[1]) - 1), np.diff(batch[1]))
    assert (owner[made["attention_rows"]] == np.arange(len(batch[1]) - 1)[:, None]).all()
    assert (made["attention_rows"].ravel()[made["packed_slots"]] == np.arange(len(owner))).all()


@settings(max_examples=60, deadline=None)
@given(batches())
def test_tensors_lie_aligned_apart_and_within_the_slot(batch):
    layout = layout_of()
    arena, stream = _runtime.PinnedArena(layout.slot_bytes, 1), _runtime.HostStream()
    slot = arena.acquire(0)
    ids, offsets = np.asarray(batch[0], np.int32), np.asarray(batch[1], np.int32)
    _runtime.pack(layout, ids, offsets, slot, convention="index", batch=0, digest=DIGEST)
    dtypes = {name: np.dtype("uint16") if dtype == "bfloat16" else np.dtype(dtype) for name, _, dtype, _ in TENSORS}
    end = slot.address
    for name, shape, address in sorted(stream.tensors(slot), key=lambda tensor: tensor[2]):
        assert address % 256 == 0 and address >= end, name
        end = address + int(np.prod(shape)) * dtypes[name].itemsize
    assert end <= slot.address + slot.num_bytes
    stream.close(1)


def test_a_slot_holds_the_largest_batches_and_is_not_far_larger():
    layout = layout_of()
    for lengths in ([96, 96, 96, 96], [16] * 24, [50] * 8):
        assert len(packed(np.zeros(sum(lengths)), np.cumsum([0, *lengths]), layout=layout)["input_ids"]) == sum(lengths)
    assert layout.slot_bytes < 3 * (4 * (4 * 400 + 1200) + 400 * 12)


def test_given_gather_values_replace_the_computed_ones():
    given_values = np.array([2, 1, 6], np.int32)
    made = packed([1] * 9, [0, 3, 5, 9], convention="none", last_token_ids=given_values)
    assert made["last_token_ids"].tolist() == [2, 1, 6]


def test_an_engine_that_gathers_is_not_packed_for_without_its_convention():
    with pytest.raises(PlanError, match="convention is not known"):
        packed([1], [0, 1], convention="none")
    with pytest.raises(PlanError, match="not a gather convention"):
        packed([1], [0, 1], convention="B")


@pytest.mark.parametrize(
    ("token_ids", "offsets", "words"),
    [
        ([1, 2], [0, 1, 1], "sequence 1 is empty"),
        ([1, 2], [0, 2, 1], "sequence 1 is empty or runs backwards"),
        ([1, 2], [0, 3], "leave the token ids"),
        ([1, 2], [-1, 2], "leave the token ids"),
        ([1, 2], [0], "the batch is empty"),
        ([], [], "the batch is empty"),
        ([1, 50], [0, 2], "token 1 of the batch is outside the vocabulary"),
        ([-1, 2], [0, 2], "token 0 of the batch is outside the vocabulary"),
        ([0] * 401, np.linspace(0, 401, 11).astype(int), "too many tokens"),
        ([0] * 25, range(26), "too many sequences"),
        ([0] * 97, [0, 97], "too many tokens in one sequence"),
        ([0] * (96 + 20), [0, 96, *range(97, 117)], "too many padded tokens"),
    ],
)
def test_a_batch_outside_the_limits_is_refused_with_the_numbers(token_ids, offsets, words):
    with pytest.raises(PlanError, match=words) as error:
        packed(token_ids, list(offsets))
    assert error.value.expected and error.value.found and error.value.fix


def test_gather_values_outside_the_batch_are_refused():
    for value in (-1, 4):
        with pytest.raises(PlanError, match="leaves the batch"):
            packed([1, 2, 3], [0, 3], convention="none", last_token_ids=np.array([value], np.int32))
    with pytest.raises(ValueError, match="one value a sequence"):
        packed([1, 2, 3], [0, 3], convention="none", last_token_ids=np.array([1, 2], np.int32))


@pytest.mark.parametrize(
    "token_ids",
    [np.zeros(4, np.int64), np.zeros((2, 2), np.int32), np.zeros(8, np.int32)[::2], np.zeros(4, np.float32), np.zeros(4, ">i4")],
    ids=["int64", "two dimensions", "not contiguous", "float32", "big-endian"],
)
def test_token_ids_of_another_form_are_refused_and_never_converted(token_ids):
    layout = layout_of()
    slot = _runtime.PinnedArena(layout.slot_bytes, 1).acquire(0)
    with pytest.raises(PlanError, match="token_ids has another form"):
        _runtime.pack(layout, token_ids, np.array([0, 4], np.int32), slot, convention="index", batch=0, digest=DIGEST)


def test_a_digest_has_sixteen_bytes():
    layout = layout_of()
    slot = _runtime.PinnedArena(layout.slot_bytes, 1).acquire(0)
    with pytest.raises(ValueError, match="16 bytes, found 3"):
        _runtime.pack(layout, np.zeros(1, np.int32), np.array([0, 1], np.int32), slot, convention="index", batch=0, digest=b"abc")


def test_a_slot_that_is_too_small_is_refused():
    layout = layout_of()
    slot = _runtime.PinnedArena(1024, 1).acquire(0)
    with pytest.raises(PlanError, match="does not fit its slot"):
        _runtime.pack(layout, np.zeros(96, np.int32), np.array([0, 96], np.int32), slot, convention="index", batch=0, digest=DIGEST)


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (("kv_cache_block_offsets", "input", "int32", ("B",)), "cannot be filled"),
        (("input_ids", "input", "int64", ("T",)), "another type"),
        (("input_ids", "input", "int32", ("B",)), "another shape"),
        (("position_ids", "input", "int32", (2, "T")), "another shape"),
        (("host_sink_token_length", "input", "int32", (2,)), "another shape"),
        (("out", "output", "float32", ("N",)), "no batch decides"),
        (("out", "output", "float32", (-1,)), "no batch decides"),
        (("out", "output", "float12", ("T",)), "not a type of tensor"),
        (("out", "shadow", "float32", ("T",)), "no role"),
        (("final_post_last", "output", "float32", ("T",)), "named twice"),
    ],
)
def test_an_engine_that_pack_cannot_serve_is_refused_by_the_tensor(tensor, words):
    others = [other for other in TENSORS if other[0] != tensor[0] or words == "named twice"]
    with pytest.raises(PlanError, match=words) as error:
        layout_of([*others, tensor])
    if words == "cannot be filled":
        assert "input_ids" in error.value.expected and "host_context_progress" in error.value.expected


def test_host_inputs_are_known_by_name_and_bound_to_the_host(stand_in):
    layout = layout_of()
    assert layout.has_host_inputs and not layout_of([t for t in TENSORS if not t[0].startswith("host_")]).has_host_inputs
    driver = _runtime.Driver(stand_in.path)
    arena = _runtime.PinnedArena(layout.slot_bytes, 1, driver)
    stream = _runtime.CudaStream(driver, layout.slot_bytes)
    slot = arena.acquire(0)
    _runtime.pack(layout, np.zeros(4, np.int32), np.array([0, 4], np.int32), slot, convention="index", batch=0, digest=DIGEST)
    within = {name: slot.address <= address < slot.address + slot.num_bytes for name, _, address in stream.tensors(slot)}
    assert within == {name: name.startswith("host_") for name, *_ in TENSORS}
    stream.close(1)
