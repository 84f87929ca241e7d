"""Orphans go while their items are open, and in no order of events does an item get a wrong answer, or none."""

import dataclasses
import json
import time

import pytest
from toy_engines import work_item
from toy_streams import SMALL, check_stored, items, make_stream, masked, rows_bytes, running, wait_for, wanted_of, work_messages

from tensorrt_llm_ext.results import payload_from_record
from tensorrt_llm_ext.runtime import Session
from tensorrt_llm_ext.worker import StoreSettings, StoreWriter, Worker, WorkerSettings, status_of
from tensorrt_llm_ext.worker.messages import message_from_answer
from tensorrt_llm_ext.worker.orphans import Orphans, were_asked_about
from tensorrt_llm_ext.worker.reference import Reference, put_rows, reference_to
from tensorrt_llm_ext.worker.wanted import LANES

STORE = StoreSettings(name="s", commit_s=0.1, leave_when_idle_s=0.6, shard_bytes=1 << 20)  # one commit takes all that waits
ITEM = masked([work_item("a", list(range(30)))])[0]


@pytest.fixture
def wanted(states_engine):
    """Nothing comes again, and the store removes no orphans by itself, while a test lasts."""
    return wanted_of(states_engine, dataclasses.replace(SMALL, ack_wait_s=60.0))


@pytest.fixture
def session(states_engine):
    with Session.open(states_engine, num_threads=1) as opened:
        yield opened


@pytest.fixture
def attempt(broker, wanted, session):
    """A function that puts the rows of the one item on the stream, as a worker does, and returns its reference."""
    make_stream(broker, wanted)
    broker.publish(work_messages(wanted, [ITEM]))

    def put() -> Reference:
        (record,) = session.submit([ITEM]).wait()
        payload = payload_from_record(record)
        return reference_to(record, payload, put_rows(broker, payload, 0, 1, max_chunk_bytes=1000))

    return put


@pytest.fixture
def refer(broker, wanted):
    """A function that publishes a reference."""
    return lambda referred: broker.publish([message_from_answer(referred, 1, wanted)])


def stored_by(broker, out):
    return dict(StoreWriter(broker, out, 0, settings=STORE).run())


def remove_orphans(broker, after_s=0.0):
    """Ask about all rows there are, and remove those nobody refers to; returns of how many items."""
    return Orphans(broker, 0, after_s).remove(*broker.items_with_rows(0), lambda: None)


def meanwhile(monkeypatch, broker, name, act, *, call=1):
    """Act once, right before the n-th call of a method of the broker."""
    method, numbers = getattr(broker, name), iter(range(1, 1000))

    def acting(*args, **kwargs):
        if next(numbers) == call:
            act()
        return method(*args, **kwargs)

    monkeypatch.setattr(broker, name, acting)


def are_there(broker, referred):
    return [chunk is not None for chunk in broker.read("rows", referred.chunks)] == [True] * len(referred.chunks)


@pytest.mark.parametrize("max_tokens", [None, 60], ids=["they hold the orphans' items", "their hands are full"])
def test_workers_get_the_room_that_orphans_take(states_engine, broker, session, tmp_path, max_tokens):
    """Three workers died before they published a reference; what is left has no room for any answer."""
    wanted = wanted_of(states_engine, dataclasses.replace(SMALL, max_rows_bytes=25_000))
    make_stream(broker, wanted)
    work = masked([work_item(f"r{number}", [number] * 30) for number in range(10)])
    broker.publish(work_messages(wanted, work))
    (lane,) = (lane for lane in LANES if lane.name == "normal.long")
    for delivery in broker.pull_work({lane: 3})[lane]:
        assert isinstance(put_rows(broker, b"x" * 6000, 0, delivery.sequence, max_chunk_bytes=2600), tuple)
    worker = Worker(session, broker, settings=WorkerSettings(max_tokens_in_flight=max_tokens, drain_s=0.5))
    store = StoreWriter(broker, tmp_path, 0, settings=dataclasses.replace(STORE, leave_when_idle_s=None))
    with running(worker, store):
        wait_for(lambda: status_of(broker).is_done, timeout_s=20.0)
    assert worker.metrics.value("extract_backpressure_seconds_total") and store.counts == {"stored": 10}
    check_stored(tmp_path / "part-0", work)
    assert rows_bytes(broker) == 0


def test_rows_are_orphans_only_after_some_time_and_never_those_that_were_put_since(broker, attempt):
    first, orphans = attempt(), Orphans(broker, 0, after_s=0.2)
    assert orphans.remove(*broker.items_with_rows(0), lambda: None) == 0
    time.sleep(0.25)
    second = attempt()
    assert orphans.remove(*broker.items_with_rows(0), lambda: None) == 1
    assert broker.read("rows", first.chunks) == [None] * len(first.chunks) and are_there(broker, second)
    assert were_asked_about(broker, 1, first.chunks) and not were_asked_about(broker, 1, second.chunks)


def test_rows_stay_while_a_reference_waits_or_is_being_stored(broker, attempt, refer, tmp_path):
    referred = attempt()
    refer(referred)
    assert remove_orphans(broker) == 0
    (delivery,) = broker.pull_results(0, 10)
    assert remove_orphans(broker) == 0 and are_there(broker, referred)
    assert not were_asked_about(broker, 1, referred.chunks)
    broker.settle([delivery], "give_back")
    assert stored_by(broker, tmp_path) == {"stored": 1}


def test_a_slow_worker_whose_rows_were_removed_before_its_reference_puts_them_again(broker, attempt, session, tmp_path, monkeypatch):
    """It sees that they were asked about, and acknowledges its item only for the second reference."""
    num_removed, publish = [], broker.publish

    def slow(messages):
        if messages[0].subject.startswith("results.0.reference") and not num_removed:
            num_removed.append(remove_orphans(broker))
        return publish(messages)

    with monkeypatch.context() as patched:
        patched.setattr(broker, "publish", slow)
        report = Worker(session, broker, settings=WorkerSettings(leave_when_idle_s=0.4)).run()
    assert num_removed == [1] and report.answered == 1 and broker.counts().num_results == 2
    assert stored_by(broker, tmp_path) == {"stored": 1}
    check_stored(tmp_path / "part-0", [ITEM])
    assert rows_bytes(broker) == 0 and status_of(broker).is_done


def test_a_reference_that_comes_between_asking_and_looking_keeps_its_rows(broker, attempt, refer, tmp_path, monkeypatch):
    referred = attempt()
    with monkeypatch.context() as patched:
        meanwhile(patched, broker, "items_referred_to", lambda: refer(referred), call=2)
        assert remove_orphans(broker) == 0
    assert were_asked_about(broker, 1, referred.chunks) and are_there(broker, referred)
    assert stored_by(broker, tmp_path) == {"stored": 1}


def test_a_reference_that_comes_between_looking_and_removing_is_passed_over_and_its_item_stays_open(
    broker, attempt, refer, tmp_path, monkeypatch
):
    referred = attempt()
    with monkeypatch.context() as patched:
        meanwhile(patched, broker, "remove_rows", lambda: refer(referred))
        assert remove_orphans(broker) == 1
    assert were_asked_about(broker, 1, referred.chunks)  # so its worker has not acknowledged the item
    assert stored_by(broker, tmp_path) == {} and not status_of(broker).is_done and broker.counts().num_results == 0
    refer(attempt())  # the same worker, or the next
    assert stored_by(broker, tmp_path) == {"stored": 1} and rows_bytes(broker) == 0
    check_stored(tmp_path / "part-0", [ITEM])


def test_of_two_references_in_one_commit_the_one_with_rows_is_stored(broker, attempt, refer, tmp_path):
    """The second is another worker's, and the broker does not take it for the first again."""
    first = attempt()
    assert remove_orphans(broker) == 1
    refer(first)
    refer(attempt())
    assert broker.counts().num_results == 2 and stored_by(broker, tmp_path) == {"stored": 1}
    check_stored(tmp_path / "part-0", [ITEM])


def test_a_reference_that_is_passed_over_takes_no_rows_of_the_next_attempt_with_it(broker, attempt, refer, tmp_path):
    first = attempt()
    remove_orphans(broker)
    second = attempt()  # not referred to yet
    refer(first)
    assert stored_by(broker, tmp_path) == {} and are_there(broker, second)
    refer(second)
    assert stored_by(broker, tmp_path) == {"stored": 1}


def test_rows_that_vanish_while_they_are_read_settle_nothing(broker, attempt, refer, tmp_path, monkeypatch):
    """An older writer was paused before its removal, and goes on while the newer one reads."""
    referred, paused, remove, read = attempt(), [], broker.remove_rows, broker.read

    def read_meanwhile(part, sequences):
        if part == "rows":
            for args, kwargs in paused:
                remove(*args, **kwargs)
        return read(part, sequences)

    with monkeypatch.context() as patched:
        patched.setattr(broker, "remove_rows", lambda *args, **kwargs: paused.append((args, kwargs)))
        assert remove_orphans(broker) == 1 and are_there(broker, referred)
    refer(referred)
    with monkeypatch.context() as patched:
        patched.setattr(broker, "read", read_meanwhile)
        assert stored_by(broker, tmp_path) == {} and not are_there(broker, referred)
    second = attempt()
    remove(*paused[0][0], **paused[0][1])  # once more, and later still
    assert are_there(broker, second)
    refer(second)
    assert stored_by(broker, tmp_path) == {"stored": 1}


def test_a_writer_that_was_overtaken_between_asking_and_removing_removes_nothing_unasked(broker, attempt, monkeypatch):
    """Both ask; what was asked about never falls, and who finds it changed leaves the rows for the next time."""
    first = attempt()
    items, newest = broker.items_with_rows(0)
    second = attempt()
    with monkeypatch.context() as patched:
        meanwhile(patched, broker, "put", lambda: remove_orphans(broker))
        assert Orphans(broker, 0, 0.0).remove(items, newest, lambda: None) == 0
    assert were_asked_about(broker, 1, first.chunks) and were_asked_about(broker, 1, second.chunks)
    third = attempt()
    assert Orphans(broker, 0, 0.0).remove(items, newest, lambda: None) == 1  # the old one, late
    assert were_asked_about(broker, 1, second.chunks) and are_there(broker, third)


def test_rows_that_were_asked_about_but_lost_otherwise_settle_their_item_with_the_reason(
    broker, attempt, refer, tmp_path, monkeypatch
):
    """Its worker may have acknowledged it before: it must not stay open for ever."""
    referred = attempt()
    with monkeypatch.context() as patched:
        meanwhile(patched, broker, "items_referred_to", lambda: refer(referred), call=2)
        assert remove_orphans(broker) == 0
    broker.remove_chunks(referred.chunks[:1])
    assert stored_by(broker, tmp_path) == {"failed": 1} and status_of(broker).is_done
    assert json.loads((tmp_path / "part-0.refused.jsonl").read_text())["code"] == "rows_lost"


def test_an_answer_whose_rows_are_there_is_stored_before_lost_ones_are_a_reason(broker, attempt, refer, tmp_path):
    lost, good = attempt(), attempt()
    refer(lost)
    refer(good)
    broker.remove_chunks(lost.chunks[:1])
    assert stored_by(broker, tmp_path) == {"stored": 1}


def test_a_store_without_answers_frees_the_room_of_settled_items(states_engine, broker, session, tmp_path):
    """A slow worker puts rows of an item that is settled; while they take the room, no answer comes."""
    wanted = wanted_of(states_engine, SMALL)
    make_stream(broker, wanted)
    work = masked(items(3, max_length=30))
    broker.publish(work_messages(wanted, work))
    with running(StoreWriter(broker, tmp_path, 0, settings=dataclasses.replace(STORE, leave_when_idle_s=None))):
        Worker(session, broker, settings=WorkerSettings(leave_when_idle_s=0.4)).run()
        wait_for(lambda: status_of(broker).is_done, timeout_s=20.0)
        put_rows(broker, b"late" * 1000, 0, 1, max_chunk_bytes=1000)
        wait_for(lambda: not rows_bytes(broker), timeout_s=20.0)
    check_stored(tmp_path / "part-0", work)
