"""Work items go in, records come out: right, complete, independent of the batch, whatever becomes of tickets."""

import ctypes
import gc
import threading
import time

import numpy as np
import pytest
from toy_engines import (
    ALL, LAST, MEAN, NAN_TOKEN, TOLERANCE, VOCAB_SIZE, Toy, assert_right, random_items, reference, work_item, write_engine,
)  # fmt: skip

import tensorrt_llm_ext
from tensorrt_llm_ext.errors import PlanError
from tensorrt_llm_ext.fingerprint import token_hash
from tensorrt_llm_ext.recipes.contract import read_contract
from tensorrt_llm_ext.results import Failure, Record, Tokenisation, WorkItem, rows_hash
from tensorrt_llm_ext.runtime import Session, batches


def overwrite_the_stamp(engine):
    """Write where the batch's identity lies: before the first output, 256 bytes each as it went in and as it came back."""
    first_output = min(engine.addresses[t.name] for t in engine.tensors() if t.role == "output")
    ctypes.memset(first_output - 512, 0x55, 48)


def rows_by_id(answers, tap=LAST):
    return {record.request_id: state.rows for record in answers for state in record.states if state.tap == tap}


def test_every_item_gets_its_own_rows_of_every_tap(session):
    items = {item.request_id: item for item in random_items(200)}
    records = list(session.extract(items.values()))
    assert sorted(record.request_id for record in records) == sorted(items)
    for record in records:
        assert [state.tap for state in record.states] == [LAST, MEAN, ALL]
        assert_right(record, items[record.request_id])


def test_a_record_says_where_it_comes_from(engine_path):
    tokenisation = Tokenisation(special_tokens="tokenizer", template_hash="sha256:t", prefix="query: ")
    ids = np.array([4, 5], dtype=np.int32)
    item = WorkItem("r", "row 9", ids, token_hash(ids), truncated_from=7)
    with Session.open(engine_path, tokenisation=tokenisation) as session:
        (record,) = session.submit([item]).wait()
    contract = read_contract(engine_path)
    assert (record.request_id, record.work_item_id, record.num_tokens, record.truncated_from) == ("r", "row 9", 2, 7)
    assert record.token_hash == token_hash(ids)
    origin = record.origin
    assert (origin.model_name, origin.checkpoint_fingerprint, origin.tokenizer_fingerprint) == (
        "toy",
        "sha256:c",
        "sha256:t",
    )
    assert (origin.num_layers, origin.hidden_size) == (3, 24)
    assert (origin.special_tokens, origin.template_hash, origin.prefix) == ("tokenizer", "sha256:t", "query: ")
    assert (origin.engine_fingerprint, origin.backend, origin.convention) == (
        contract.engine_fingerprint(),
        "ort",
        "prefix_sum",
    )
    assert origin.code_version == tensorrt_llm_ext.__version__
    assert all(
        state.payload_hash == rows_hash(state.rows) and state.computed_dtype == "float32" for state in record.states
    )


def test_the_batch_is_invisible(session):
    items = random_items(32, seed=3, max_length=8)
    together = rows_by_id(session.submit(items).wait())
    alone = {item.request_id: rows_by_id(session.submit([item]).wait())[item.request_id] for item in items}
    reordered = rows_by_id(session.submit(items[::-1]).wait())
    for item in items:
        np.testing.assert_allclose(alone[item.request_id], together[item.request_id], atol=TOLERANCE)
        np.testing.assert_allclose(reordered[item.request_id], together[item.request_id], atol=TOLERANCE)
    different = [np.abs(alone[a.request_id] - alone[b.request_id]).max() for a, b in zip(items, items[1:])]
    assert min(different) > 100 * TOLERANCE  # so that the comparisons above could fail


def test_the_same_batch_twice_gives_the_same_bytes_and_so_does_one_item_twice_in_it(session):
    items = random_items(10) + [work_item("again", random_items(10)[0].token_ids)]
    first, second = (rows_by_id(session.submit(items).wait()) for _ in range(2))
    assert all(first[name].tobytes() == second[name].tobytes() for name in first)
    assert first["again"].tobytes() == first["0"].tobytes()


def test_a_request_whose_rows_are_not_finite_fails_alone_and_by_name(session):
    items = random_items(9, seed=1)
    poisoned = list(items)
    ids = items[4].token_ids.copy()
    ids[len(ids) // 2] = NAN_TOKEN
    poisoned[4] = work_item("poisoned", ids)
    healthy = rows_by_id(session.submit(items).wait(), ALL)
    answers = session.submit(poisoned).wait()
    failure = answers[4]
    assert isinstance(failure, Failure)
    assert (failure.request_id, failure.work_item_id, failure.code) == ("poisoned", "row poisoned", "not_finite")
    assert "final@last: 24 of 24 values are NaN or Inf, the first at row 0, column 0" in failure.reason
    others = rows_by_id([answer for answer in answers if isinstance(answer, Record)], ALL)
    assert len(others) == 8
    assert all(rows.tobytes() == healthy[name].tobytes() for name, rows in others.items())


def test_tickets_may_be_waited_for_in_any_order(session):
    items = [work_item("a", [1, 2]), work_item("b", [3])]
    tickets = [session.submit([item]) for item in items]
    for ticket, item in zip(reversed(tickets), reversed(items)):
        assert ticket.request_ids == (item.request_id,)
        assert_right(ticket.wait()[0], item)


def test_a_ticket_gives_its_rows_once(session):
    ticket = session.submit([work_item("a", [1])])
    ticket.wait()
    with pytest.raises(PlanError, match="consumed before"):
        ticket.wait()
    assert session.stats()["slots_out"] == 0
    assert_right(session.submit([work_item("b", [2])]).wait()[0], work_item("b", [2]))


def test_a_dropped_ticket_gives_its_slot_back(session):
    for number in range(10):
        session.submit([work_item(str(number), [number])])
    gc.collect()
    assert_right(session.submit([work_item("kept", [5])]).wait()[0], work_item("kept", [5]))
    assert session.stats()["open"] == 0 and session.stats()["refused"] == 10


def test_an_extraction_that_is_abandoned_leaves_nothing_behind(session):
    answers = session.extract(random_items(300))
    next(answers)
    answers.close()
    assert len(list(session.extract(random_items(300, seed=2)))) == 300
    assert session.stats()["slots_out"] == 0


def test_records_do_not_change_when_later_batches_run_and_cannot_be_written_to(session):
    items = random_items(8)
    records = session.submit(items).wait()
    before = [state.rows.tobytes() for record in records for state in record.states]
    list(session.extract(random_items(100, seed=4)))
    assert [state.rows.tobytes() for record in records for state in record.states] == before
    assert not any(state.rows.flags.writeable for record in records for state in record.states)


def test_records_outlive_their_session(engine_path):
    with Session.open(engine_path) as session:
        item = work_item("a", [1, 2, 3])
        (record,) = session.submit([item]).wait()
    del session
    gc.collect()
    assert_right(record, item)


def test_while_a_batch_runs_the_next_one_is_packed(watched):
    session, engine = watched()
    engine.is_open.clear()
    first = session.submit([work_item("a", [1])])
    engine.wait_until_running(1)
    second = session.submit([work_item("b", [2])])
    assert session.stats()["slots_out"] == 2 and engine.num_running == 1
    engine.is_open.set()
    assert_right(first.wait()[0], work_item("a", [1]))
    assert_right(second.wait()[0], work_item("b", [2]))


def test_the_consumer_of_extract_works_while_a_batch_runs(watched):
    session, engine = watched()
    num_batches = len(batches(random_items(100), session.contract.limits))
    answers = session.extract(random_items(100))
    next(answers)
    assert num_batches > 3
    engine.wait_until_running(3)  # the first is being consumed, the second and third run meanwhile


@pytest.mark.slow
def test_a_store_that_takes_a_third_of_the_compute_time_hides_behind_it(watched):
    session, engine = watched()
    engine.before = lambda: time.sleep(0.05)  # the compute
    items = [work_item(str(i), [i % 90, 1]) for i in range(32 * 25)]

    def seconds(store_s):
        started = time.perf_counter()
        for number, _ in enumerate(session.extract(items), 1):
            if number % 32 == 0:
                time.sleep(store_s)  # one batch's records are stored
        return time.perf_counter() - started

    seconds(0)
    without, slowed = (min(seconds(store_s) for _ in range(3)) for store_s in (0, 0.015))
    assert slowed < 1.05 * without


def test_each_batch_is_every_shape_then_every_address_then_one_pass_on_the_stream(watched):
    session, engine = watched()
    for _ in range(2):
        engine.calls.clear()
        session.submit(random_items(5)).wait()
        kinds = [kind for kind, _ in engine.calls]
        assert kinds == ["shape"] * 6 + ["address"] * 9 + ["enqueue"]
        assert engine.calls[-1][1] != threading.main_thread().name
        assert {name for kind, name in engine.calls if kind == "address"} == {t.name for t in engine.tensors()}


def test_rows_of_another_batch_are_a_plan_error_and_are_counted(watched):
    session, engine = watched()
    engine.after = lambda: overwrite_the_stamp(engine)  # as if another batch had been written over this one
    ticket = session.submit([work_item("a", [1])])
    with pytest.raises(PlanError, match="what came back is not batch"):
        ticket.wait()
    assert session.stats()["cross_request"] == 1


def test_token_ids_that_are_not_those_of_the_work_item_fail_by_lineage(session):
    ids = np.array([1, 2], dtype=np.int32)
    wrong = WorkItem("wrong", "row 1", ids, token_hash(ids[:1]))
    failure, record = session.submit([wrong, work_item("right", [3])]).wait()
    assert isinstance(failure, Failure) and failure.code == "lineage" and token_hash(ids) in failure.reason
    assert record.request_id == "right"


def test_two_sessions_and_many_threads_do_not_mix(engine_path):
    items = {item.request_id: item for item in random_items(240)}
    wrong = []

    def work(session, mine):
        for item in mine:
            (record,) = session.submit([item]).wait()
            rows = record.states[0].rows
            if record.request_id != item.request_id or np.abs(rows - reference(item.token_ids, LAST)).max() > TOLERANCE:
                wrong.append(item.request_id)

    with Session.open(engine_path, num_threads=1) as one, Session.open(engine_path, num_threads=1) as two:
        threads = [
            threading.Thread(target=work, args=(session, list(items.values())[start::6]))
            for start, session in enumerate([one, two] * 3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stats = [one.stats(), two.stats()]
    assert wrong == []
    assert all(s["cross_request"] == s["refused"] == s["open"] == s["slots_out"] == 0 < s["consumed"] for s in stats)


def test_an_index_engine_is_served_by_its_own_convention(tmp_path):
    path = write_engine(tmp_path, Toy(last=lambda graph: "last_token_ids"))
    items = random_items(40)
    with Session.open(path) as session:
        assert session.convention == session.origin.convention == "index"
        rows = rows_by_id(session.extract(items))
    for item in items:
        np.testing.assert_allclose(rows[item.request_id], reference(item.token_ids, LAST), atol=TOLERANCE)


def test_the_largest_batches_of_the_limits_fit_their_slots(session):
    limits = session.contract.limits
    rng = np.random.default_rng(0)
    shapes = [[40] * 6, [12] * 20, [8] * 32, [40] + [8] * 9]
    for lengths in shapes:
        assert sum(lengths) <= limits.max_num_tokens and len(lengths) * max(lengths) <= limits.max_padded_tokens
        items = [work_item(str(i), rng.integers(0, VOCAB_SIZE - 1, size=n)) for i, n in enumerate(lengths)]
        for record, item in zip(session.submit(items).wait(), items, strict=True):
            assert_right(record, item)
