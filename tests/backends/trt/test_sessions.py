"""A session on backend trt: the C++ pipeline on a CUDA stream, the stand-in library, real numbers from the ONNX graph."""

from dataclasses import replace

import numpy as np
import pytest
from stand_in import ILLEGAL_ADDRESS
from toy_engines import ALL, LAST, LIMITS, MEAN, TOLERANCE, Toy, assert_right, random_items, reference, work_item
from toy_plans import INDEX, NINE, TEN, upstream_tensors, write_ours, write_upstream

from tensorrt_llm_ext.errors import BackendError, SessionClosed

KINDS = {
    "ours, prefix sum": lambda path: write_ours(path, Toy(taps=(LAST, MEAN, ALL))),
    "ours, index": lambda path: write_ours(path, Toy(**INDEX)),
    "upstream's nine, prefix sum": lambda path: write_upstream(path, NINE),
    "upstream's nine, index": lambda path: write_upstream(path, NINE, toy=INDEX),
    "upstream's ten, prefix sum": lambda path: write_upstream(path, TEN),
    "upstream's ten, index": lambda path: write_upstream(path, TEN, toy=INDEX),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_item_gets_its_own_rows_under_the_measured_convention(kind, upstream, open_session, tmp_path, driver):
    session = open_session(KINDS[kind](tmp_path / "engine"))
    driver.delay(300)  # device work comes later than the host's, by chance
    assert session.convention == ("index" if kind.endswith("index") else "prefix_sum")
    items = {item.request_id: item for item in random_items(120, max_length=40)}
    records = list(session.extract(items.values()))
    assert sorted(record.request_id for record in records) == sorted(items)
    for record in records:
        assert_right(record, items[record.request_id])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_states_come_in_the_type_that_upstreams_model_has(dtype, upstream, open_session, tmp_path):
    promised = tuple(replace(t, dtype=dtype) if t.tap else t for t in upstream_tensors())
    described = {t.name: (t.role, t.dtype, list(t.shape)) for t in promised}
    folder = write_upstream(tmp_path / "engine", facts=dict(tensors=described), tensors=promised)
    session = open_session(folder, prove=False)  # the toys' canaries are for float32
    assert session.convention == "prefix_sum"
    items = {item.request_id: item for item in random_items(40, max_length=40)}
    records = list(session.extract(items.values()))
    assert len(records) == 40
    for record in records:
        for state in record.states:
            assert state.rows.dtype == np.dtype(dtype)
            right = reference(items[record.request_id].token_ids, state.tap)
            np.testing.assert_allclose(state.rows.astype(np.float32), right, rtol=2**-8, atol=TOLERANCE)


@pytest.mark.parametrize(("inputs", "num_inputs"), [(NINE, 9), (TEN, 10)])
def test_upstreams_inputs_are_those_of_a_batch_of_prompts(inputs, num_inputs, upstream, open_session, tmp_path):
    session = open_session(write_upstream(tmp_path / "engine", inputs))
    upstream.inputs.clear()
    session.submit([work_item("a", [5, 6, 7]), work_item("b", [8]), work_item("c", [9, 10])]).wait()
    (given,) = upstream.inputs
    assert len(given) == num_inputs
    right = {
        "input_ids": [5, 6, 7, 8, 9, 10],
        "position_ids": [0, 1, 2, 0, 0, 1],
        "last_token_ids": [3, 4, 6],
        "context_lengths": [3, 1, 2],
        "host_context_lengths": [3, 1, 2],
        "host_request_types": [0, 0, 0],
        "host_max_attention_window_sizes": [LIMITS.max_seq_len] * 3,
        "host_sink_token_length": [0],
        "host_runtime_perf_knobs": [-1] * 16,
        "host_context_progress": [0],
    }
    assert {name: array.tolist() for name, array in given.items()} == {name: right[name] for name, _, _ in inputs}
    assert {name: str(array.dtype) for name, array in given.items()} == {name: dtype for name, dtype, _ in inputs}


def test_each_batch_is_every_shape_then_every_address_then_one_enqueue(library, open_session, tmp_path):
    session = open_session(write_ours(tmp_path / "engine"))
    for _ in range(2):
        library.calls.clear()
        session.submit([work_item("a", [5, 6, 7]), work_item("b", [8])]).wait()
        right = ["set_input_shape"] * 5 + ["set_tensor_address"] * 6 + ["execute_async_v3"]
        assert [call for call, _ in library.calls] == right


def test_a_batch_takes_the_first_profile_that_holds_it(library, open_session, tmp_path):
    session = open_session(write_ours(tmp_path / "engine"))
    library.calls.clear()
    batches = [[8] * 8, [8] * 9, [9], [20] * 12, [21] * 10, [40], [1]]  # 64 tokens of at most 8; 72 of them; …
    for lengths in batches:
        items = [work_item(str(i), range(i, i + length)) for i, length in enumerate(lengths)]
        for record, item in zip(session.submit(items).wait(), items, strict=True):
            assert_right(record, item)
    selected = [profile for call, profile in library.calls if call == "set_optimization_profile_async"]
    assert selected == [1, 2, 0]  # and is not selected again while it stays


REFUSALS = ["set_optimization_profile_async", "set_input_shape", "set_tensor_address", "execute_async_v3"]


@pytest.mark.parametrize("call", REFUSALS)
def test_a_call_that_the_library_refuses_fails_the_batch_with_its_words(call, library, open_session, tmp_path):
    session = open_session(write_ours(tmp_path / "engine"))
    library.failures[call] = "Error Code 3: API Usage Error (no more of this)"
    with pytest.raises((BackendError, SessionClosed), match="no more of this"):
        session.submit([work_item("a", range(30))]).wait()
    library.failures.clear()
    with pytest.raises(SessionClosed, match="no more of this"):
        session.submit([work_item("b", [1])]).wait()


def test_a_device_that_breaks_after_the_enqueue_is_a_backend_error(library, driver, open_session, tmp_path):
    session = open_session(write_ours(tmp_path / "engine"))
    driver.delay(5000)
    ticket = session.submit([work_item("a", [1])])
    driver.break_device(ILLEGAL_ADDRESS)
    with pytest.raises(BackendError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        ticket.wait()


def test_what_ran_before_does_not_show_in_a_later_batch(library, open_session, tmp_path):
    session = open_session(write_ours(tmp_path / "engine"))
    items = random_items(9, max_length=8)
    alone = {item.request_id: session.submit([item]).wait()[0].states[0].rows for item in items}
    together = {record.request_id: record.states[0].rows for record in session.submit(items).wait()}
    reordered = {record.request_id: record.states[0].rows for record in session.submit(items[::-1]).wait()}
    for name, rows in alone.items():
        np.testing.assert_allclose(together[name], rows, atol=TOLERANCE)
        np.testing.assert_allclose(reordered[name], rows, atol=TOLERANCE)
    different = [np.abs(alone[a.request_id] - alone[b.request_id]).max() for a, b in zip(items, items[1:])]
    assert min(different) > 100 * TOLERANCE  # so that the comparisons above could fail


def test_a_lower_limit_than_the_plans_is_served(library, open_session, tmp_path):
    limits = replace(LIMITS, max_seq_len=12, max_num_tokens=64)
    session = open_session(write_ours(tmp_path / "engine", limits=limits))
    assert_right(session.submit([work_item("a", range(12))]).wait()[0], work_item("a", range(12)))
