"""The worker: proven before it joins, every item answered once, acknowledged only after its answer is persisted."""

import dataclasses
import gc
import random
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from fuzzed import fuzzed_bodies
from toy_engines import LAST, MEAN, NAN_TOKEN, Toy, reference, work_item, write_engine
from toy_streams import LIMITS, QUICK, answers_of, items, make_stream, masked, wanted_of, work_message, work_messages

from tensorrt_llm_ext.errors import BackendError, BrokerError, CanaryError, NotAdmitted
from tensorrt_llm_ext.results import Record, Tokenisation
from tensorrt_llm_ext.runtime import Session
from tensorrt_llm_ext.worker import InProcessBroker, NotPublished, Worker, WorkerSettings, handover

IDLE = WorkerSettings(name="w", leave_when_idle_s=0.4)


@pytest.fixture
def stream(broker, wanted):
    make_stream(broker, wanted)
    return broker


@pytest.fixture
def local(wanted):
    """A stream in this process, where the kind of broker does not matter."""
    broker = InProcessBroker()
    make_stream(broker, wanted)
    return broker


class Wrapped:
    """A session or broker some of whose methods are replaced."""

    def __init__(self, inner, **changed):
        self._inner = inner
        self.__dict__.update(changed)

    def __getattr__(self, name):
        return getattr(self._inner, name)


def test_every_item_is_answered_with_its_own_rows(stream, wanted, session):
    work = items(60)
    stream.publish(work_messages(wanted, work))
    report = Worker(session, stream, settings=IDLE).run()
    answers = answers_of(stream, wanted)
    assert (report.answered, report.refused, report.given_back) == (60, 0, 0) and len(answers) == 60
    assert report.num_tokens == sum(len(item.token_ids) for item in work)
    for place, item in enumerate(work):
        record = answers[place + 1]
        assert record.request_id == item.request_id and record.token_hash == item.token_hash
        for state, tap in zip(record.states, (LAST, MEAN), strict=True):
            assert np.abs(state.rows - reference(item.token_ids, tap)).max() < 1e-5
    counts = stream.counts()
    assert sum(counts.waiting.values()) == sum(counts.in_work.values()) == 0 and counts.num_work == 60


@pytest.mark.parametrize(
    "toy, changed, fields",
    [
        (Toy(taps=(LAST,), limits=LIMITS), {}, ["taps", "dtype", "engine"]),
        (Toy(taps=(LAST, MEAN), limits=dataclasses.replace(LIMITS, max_seq_len=8)), {}, ["engine", "length"]),
        (Toy(taps=(LAST, MEAN), limits=LIMITS), {"model_name": "other"}, ["model", "engine"]),
    ],
)
def test_an_engine_that_is_not_wanted_does_not_join_and_says_each_field(stream, wanted, tmp_path, toy, changed, fields):
    stream.publish(work_messages(wanted, items(3)))
    with Session.open(write_engine(tmp_path / "engine", toy, **changed), num_threads=1) as session:
        worker = Worker(session, stream, settings=IDLE)
        with pytest.raises(NotAdmitted) as caught:
            worker.run()
    assert [part.split()[0] for part in caught.value.expected.split("; ")] == fields
    assert [part.split()[0] for part in caught.value.found.split("; ")] == fields
    counts = stream.counts()
    assert counts.waiting["normal.short"] + counts.waiting["normal.long"] == 3  # it took nothing
    assert b'"admitted": false' in stream.get("leases", "worker.w").value  # its contract is published all the same


def test_a_session_of_another_tokenisation_is_not_admitted(local, engine):
    with Session.open(engine, num_threads=1, tokenisation=Tokenisation("tokenizer")) as session:
        with pytest.raises(NotAdmitted, match="tokenisation"):
            Worker(session, local, settings=IDLE).run()


def test_wrong_numbers_do_not_join(local, engine):
    with Session.open(engine, num_threads=1) as session:
        wrong = Wrapped(session, check_canaries=lambda: (_ for _ in ()).throw(CanaryError("w", expected=1, found=2, fix="f")))
        with pytest.raises(CanaryError):
            Worker(wrong, local, settings=IDLE).run()


def test_a_stream_that_asks_for_nothing_is_an_error(session, wanted):
    broker = InProcessBroker()
    broker.create(wanted)
    with pytest.raises(BrokerError, match="nobody has said what the stream 'work' asks for"):
        Worker(session, broker).run()


def test_a_row_of_nan_fails_by_name_and_the_others_go_on(local, wanted, session):
    work = [*items(5), work_item("nan", [5, NAN_TOKEN, 6])]
    local.publish(work_messages(wanted, work))
    report = Worker(session, local, settings=IDLE).run()
    answers = answers_of(local, wanted)
    assert (report.answered, report.refused) == (5, 1)
    assert (answers[6].kind, answers[6].code, answers[6].request_id) == ("failed", "not_finite", "nan")
    assert answers[6].work_item_id == "row nan"


def test_an_item_is_acknowledged_only_after_the_broker_has_its_answer(stream, wanted, session):
    done = []

    def publish(messages):
        outcomes = stream.publish(messages)
        done.extend(m.headers["Extract-Work-Sequence"] for m, o in zip(messages, outcomes) if not isinstance(o, NotPublished))
        return outcomes

    def settle(deliveries, how):
        if how in ("ack", "terminate"):
            assert all(str(delivery.sequence) in done for delivery in deliveries)
        stream.settle(deliveries, how)

    stream.publish([*work_messages(wanted, items(20)), work_message(wanted, "bad")])
    report = Worker(session, Wrapped(stream, publish=publish, settle=settle), settings=IDLE).run()
    assert (report.answered, report.refused, len(done)) == (20, 1, 21)


def test_an_answer_the_broker_did_not_persist_leaves_its_item_to_others(local, wanted, session):
    def publish(messages):
        raise BrokerError("away", expected="a broker", found="none", fix="wait")

    local.publish(work_messages(wanted, items(20)))
    with pytest.raises(BrokerError):
        Worker(session, Wrapped(local, publish=publish), settings=IDLE).run()
    assert local.counts().num_results == 0
    report = Worker(session, local, settings=IDLE).run()
    assert report.answered == 20


def test_500_malformed_messages_are_each_refused_and_the_worker_serves_on(stream, wanted, session):
    bodies = list(fuzzed_bodies(wanted, 500, random.Random(2)))
    stream.publish([work_message(wanted, f"bad{i}", body) for i, body in enumerate(bodies)])
    stream.publish(work_messages(wanted, items(20)))
    worker = Worker(session, stream, settings=IDLE)
    report = worker.run()
    answers = answers_of(stream, wanted)
    assert (report.answered, report.refused) == (20, 500) and len(answers) == 520
    assert all(answers[number].kind == "refused" and answers[number].code for number in range(1, 501))
    assert worker.metrics.value("extract_engine_reopened_total") == 0


def test_a_long_item_in_a_short_lane_is_refused(local, wanted, session):
    item = work_item("long", list(range(20)))
    message = work_messages(wanted, [item])[0]
    local.publish([dataclasses.replace(message, subject=message.subject.replace(".long.", ".short."))])
    Worker(session, local, settings=IDLE).run()
    assert answers_of(local, wanted)[1].code == "wrong_lane"


def failing_session(session, is_bad):
    """A session whose batch fails, and which is closed from then on, where ``is_bad`` says so of its items."""

    def submit(batch):
        if any(is_bad(item) for item in batch):
            raise BackendError("the engine died", expected="a batch", found="none", fix="reopen")
        return session.submit(batch)

    return Wrapped(session, submit=submit, close=lambda: None)


def test_an_item_that_fails_the_engine_is_found_refused_and_nothing_else_is_lost(local, wanted, session):
    local.publish(work_messages(wanted, items(40)))
    bad = failing_session(session, lambda item: item.request_id == "r13")
    worker = Worker(bad, local, settings=IDLE, reopen=lambda: bad)
    report = worker.run()
    answers = answers_of(local, wanted)
    assert (report.answered, report.refused) == (39, 1)
    assert (answers[14].kind, answers[14].code, answers[14].request_id) == ("failed", "engine_failed", "r13")
    assert worker.metrics.value("extract_engine_reopened_total") == 2  # in its batch, then alone


def test_without_a_way_to_reopen_a_failed_batch_ends_the_worker_and_gives_everything_back(local, wanted, session):
    local.publish(work_messages(wanted, items(40)))
    with pytest.raises(BackendError):
        Worker(failing_session(session, lambda item: item.request_id == "r13"), local, settings=IDLE).run()
    counts = local.counts()
    assert sum(counts.in_work.values()) == 0
    Worker(session, local, settings=IDLE).run()
    assert len(answers_of(local, wanted)) == 40


def test_an_error_that_ends_the_worker_keeps_no_slot_of_the_session(local, wanted, session):
    """A batch was in flight when the next failed; its ticket must not live on in the error's frames."""
    local.publish(work_messages(wanted, items(40)))
    num_batches = iter(range(100))
    gc.disable()
    try:
        with pytest.raises(BackendError):
            Worker(failing_session(session, lambda item: next(num_batches) > 20), local, settings=IDLE).run()
        deadline = time.monotonic() + 10
        while session.stats()["slots_out"] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert session.stats()["slots_out"] == 0
    finally:
        gc.enable()


def test_an_engine_that_never_comes_right_ends_the_worker(local, wanted, session):
    local.publish(work_messages(wanted, items(40)))
    bad = failing_session(session, lambda item: not item.request_id.startswith("canary"))
    with pytest.raises(BackendError):
        Worker(bad, local, settings=IDLE, reopen=lambda: bad).run()


class Killed(BaseException):
    """The process is gone: nothing after it happens."""


def test_an_item_that_ends_its_workers_is_refused_as_poison_and_the_others_are_answered(local, wanted, session):
    """Each worker that runs the item dies at once; others find out which it was."""
    local.publish(work_messages(wanted, items(12)))

    def submit(batch):
        if any(item.request_id == "r5" for item in batch):
            raise Killed
        return session.submit(batch)

    def dying(deliveries, how):
        if how != "give_back":
            local.settle(deliveries, how)  # a dead process gives nothing back

    answered = {}
    for _ in range(12):
        worker = Worker(Wrapped(session, submit=submit), Wrapped(local, settle=dying), settings=IDLE)
        try:
            worker.run()
        except Killed:
            time.sleep(QUICK.ack_wait_s * 1.1)
        answered |= answers_of(local, wanted)
        if len(answered) == 12:
            break
    assert answered[6].code == "poison" and "runs alone" in answered[6].found
    assert sum(isinstance(answer, Record) for answer in answered.values()) == 11


def test_on_drift_nothing_unproven_is_answered_and_everything_is_given_back(local, wanted, session):
    local.publish(work_messages(wanted, items(40)))

    class Drift:
        def wait(self, timeout_s=None):
            raise CanaryError("drift", expected=0, found=1, fix="stop")

    with pytest.raises(CanaryError, match="drift"):
        Worker(Wrapped(session, submit_canaries=Drift), local, settings=IDLE).run()
    assert local.counts().num_results == 0 and sum(local.counts().in_work.values()) == 0
    assert Worker(session, local, settings=IDLE).run().answered == 40


def test_asked_to_stop_it_answers_what_runs_and_gives_back_what_waits(stream, wanted, session):
    stream.publish(work_messages(wanted, items(400)))
    stop, started = threading.Event(), threading.Event()

    def submit(batch):
        started.set()
        time.sleep(0.02)
        return session.submit(batch)

    worker = Worker(Wrapped(session, submit=submit), stream, settings=WorkerSettings(name="w"))
    thread = threading.Thread(target=lambda: reports.append(worker.run(stop)))
    reports = []
    thread.start()
    assert started.wait(20)
    time.sleep(0.1)
    stop.set()
    thread.join(30)
    (report,) = reports
    assert 0 < report.answered < 400 and report.given_back > 0
    counts = stream.counts()
    assert report.answered == counts.num_results and sum(counts.in_work.values()) in (0, report.given_back)
    rest = Worker(session, stream, settings=IDLE).run()
    assert rest.answered + report.answered == 400  # nothing lost, nothing done twice
    assert len(answers_of(stream, wanted)) == 400


def test_tokens_in_flight_stay_within_their_bound(stream, wanted, session):
    stream.publish(work_messages(wanted, items(300)))
    seen = []
    worker = Worker(session, stream, settings=dataclasses.replace(IDLE, max_tokens_in_flight=200))
    worker._measure = lambda: seen.append(worker.held.num_tokens)
    assert worker.run().answered == 300
    assert 100 < max(seen) <= 200


def test_what_is_held_for_long_is_not_handed_to_another(stream, wanted, session):
    """A batch that takes longer than the ack deadline is extended; another worker gets none of it."""
    stream.publish(work_messages(wanted, items(10)))

    def submit(batch):
        time.sleep(QUICK.ack_wait_s * 1.5)
        return session.submit(batch)

    reports = []
    slow = Worker(Wrapped(session, submit=submit), stream, settings=IDLE)
    thread = threading.Thread(target=lambda: reports.append(slow.run()))
    thread.start()
    deadline = time.monotonic() + 10
    while not getattr(slow, "held", ()) and time.monotonic() < deadline:
        time.sleep(0.01)
    other = Worker(session, stream, settings=dataclasses.replace(IDLE, name="o", leave_when_idle_s=QUICK.ack_wait_s * 2)).run()
    thread.join(60)
    assert other.answered == 0 and reports[0].answered == 10


def test_when_results_are_full_it_waits_for_the_store_and_loses_nothing(engine, session, broker):
    wanted = wanted_of(engine, dataclasses.replace(QUICK, max_results_bytes=20_000, num_partitions=1))
    make_stream(broker, wanted)
    broker.publish(work_messages(wanted, items(60)))
    worker = Worker(session, broker, settings=dataclasses.replace(IDLE, leave_when_idle_s=1.0))
    thread = threading.Thread(target=worker.run)
    thread.start()
    found, end = {}, time.monotonic() + 30
    time.sleep(1.5)
    assert broker.counts().results_bytes <= 20_000 and worker.metrics.value("extract_backpressure_seconds_total") > 0
    while len(found) < 60 and time.monotonic() < end:
        found |= answers_of(broker, wanted)
        time.sleep(0.05)
    thread.join(30)
    assert len(found) == 60


def test_while_the_store_makes_room_it_never_waits_for_long(engine, session, monkeypatch):
    wanted = wanted_of(engine, dataclasses.replace(QUICK, max_results_bytes=1, num_partitions=1))
    broker, pauses = InProcessBroker(), []
    make_stream(broker, wanted)
    broker.publish(work_messages(wanted, items(20)))

    def store_one(pause_s):
        pauses.append(pause_s)
        broker.settle(broker.pull_results(0, 1), "ack")

    monkeypatch.setattr(handover, "time", SimpleNamespace(sleep=store_one, monotonic=time.monotonic))
    assert Worker(session, broker, settings=IDLE).run().answered == 20
    assert len(pauses) >= 15 and set(pauses[1:]) == {pauses[0]}


def test_a_record_that_the_broker_never_has_room_for_is_refused_with_the_numbers(states_engine):
    wanted = wanted_of(states_engine, dataclasses.replace(QUICK, max_message_bytes=3000, max_rows_bytes=6000))
    broker = InProcessBroker()
    make_stream(broker, wanted)
    broker.publish(work_messages(wanted, masked([work_item("big", list(range(30))), work_item("small", [1, 2])])))
    with Session.open(states_engine, num_threads=1) as session:
        Worker(session, broker, settings=IDLE).run()
    answers = answers_of(broker, wanted)
    assert isinstance(answers[2], Record) and answers[1].code == "result_too_large"
    assert answers[1].expected.startswith("at most 3,000 bytes") and answers[1].found.endswith(" bytes")


@pytest.mark.parametrize("canary_s, most", [(0.0, 1), (1000.0, 4)])
def test_answers_are_proven_after_some_batches_or_some_seconds(local, wanted, session, canary_s, most):
    local.publish(work_messages(wanted, items(200)))
    runs, batches = [], []

    def submit(batch):
        batches.append(batch)
        return session.submit(batch)

    def submit_canaries():
        runs.append(len(batches))
        batches.clear()
        return session.submit_canaries()

    watched = Wrapped(session, submit=submit, submit_canaries=submit_canaries)
    Worker(watched, local, settings=dataclasses.replace(IDLE, canary_s=canary_s)).run()
    assert len(answers_of(local, wanted)) == 200 and max(runs) == most
