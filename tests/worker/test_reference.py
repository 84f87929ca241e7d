"""Answers too large for a message: rows in chunks, a reference, and exactly one row of the store for each, or a reason."""

import dataclasses
import json
import random
import re
import time

import numpy as np
import pytest
from toy_engines import ALL, reference, work_item
from toy_streams import (
    QUICK,
    SMALL,
    answers_of,
    check_stored,
    items,
    make_stream,
    masked,
    rows_bytes,
    running,
    wait_for,
    wanted_of,
    work_messages,
)

from tensorrt_llm_ext.errors import DiskFull, ForeignDataset, LeaseLost, LineageError, RowsLost, StoreError
from tensorrt_llm_ext.results import Record, payload_from_record
from tensorrt_llm_ext.runtime import Session
from tensorrt_llm_ext.store import Fence, StatesStore, open_states
from tensorrt_llm_ext.worker import InProcessBroker, NotPublished, StoreSettings, StoreWriter, Worker, WorkerSettings, status_of
from tensorrt_llm_ext.worker.broker import Delivery, Message, results_subject, rows_subject
from tensorrt_llm_ext.worker.messages import answer_from_delivery, message_from_answer
from tensorrt_llm_ext.worker.partition import Partition
from tensorrt_llm_ext.worker.reference import Reference, fetched, put_rows, reference_from_json, reference_to

SHARD_BYTES = 8 << 10  # some 80 tokens
IDLE = WorkerSettings(name="w", leave_when_idle_s=0.4)
STORE = StoreSettings(name="s", commit_s=0.1, leave_when_idle_s=0.6, shard_bytes=SHARD_BYTES)


@pytest.fixture
def wanted(states_engine):
    """Messages hold the answers to short items; those to others, of one chunk to three, do not fit."""
    return wanted_of(states_engine, SMALL)


@pytest.fixture
def session(states_engine):
    with Session.open(states_engine, num_threads=1) as opened:
        yield opened


@pytest.fixture
def local(wanted):
    broker = InProcessBroker()
    make_stream(broker, wanted)
    return broker


def answered(broker, wanted, session, work):
    broker.publish(work_messages(wanted, work))
    report = Worker(session, broker, settings=IDLE).run()
    assert report.answered == len(work)


def test_rows_of_every_token_become_states_and_leave_nothing_at_the_broker(broker, wanted, session, tmp_path):
    make_stream(broker, wanted)
    work = masked(items(60))
    answered(broker, wanted, session, work)
    kinds = [delivery.subject.split(".")[2] for delivery in broker.pull_results(0, 100)]
    assert len(kinds) == 60 and {"record", "reference"} == set(kinds)
    status = status_of(broker)
    assert status.unstored_rows_bytes == rows_bytes(broker) > 10_000
    time.sleep(QUICK.ack_wait_s * 1.1)
    assert StoreWriter(broker, tmp_path, 0, settings=STORE).run() == {"stored": 60}
    check_stored(tmp_path / "part-0", work)
    assert rows_bytes(broker) == 0 and broker.counts().num_results == 0 and status_of(broker).is_done
    assert len(list((tmp_path / "part-0" / "states").glob("shard-*"))) > 3


def test_a_dataset_of_states_grows_from_run_to_run_and_forgets_what_it_has(local, wanted, session, tmp_path):
    work = masked(items(40))
    for part in (work[:13], work[13:]):
        answered(local, wanted, session, part)
        deliveries = local.pull_results(0, 100)
        messages = [Message(one.subject, one.body, one.headers) for one in deliveries]
        local.settle(deliveries, "give_back")
        StoreWriter(local, tmp_path, 0, settings=STORE).run()
        local.publish(messages)  # again: their rows are gone by now
        assert StoreWriter(local, tmp_path, 0, settings=STORE).run() == {}
    check_stored(tmp_path / "part-0", work)


def test_the_partitions_of_a_stream_are_read_together(states_engine, session, tmp_path):
    wanted = wanted_of(states_engine, dataclasses.replace(SMALL, num_partitions=3))
    streams = []
    for name in ("one", "other"):
        broker = InProcessBroker(name)
        make_stream(broker, wanted)
        answered(broker, wanted, session, masked(items(30)))
        for number in range(3):
            StoreWriter(broker, tmp_path / name, number, settings=STORE).run()
        streams.append([tmp_path / name / f"part-{number}" for number in range(3)])
    stored = open_states(*streams[0])
    assert sorted(one.request_id for one in stored.sequences()) == sorted(item.request_id for item in items(30))
    with pytest.raises(ForeignDataset, match="not partitions of one stream, each once"):
        open_states(streams[0][0], *streams[0])
    with pytest.raises(ForeignDataset, match="of another engine or another way") as caught:
        open_states(streams[0][0], streams[1][1])
    assert "stream.name" in caught.value.expected


def test_the_size_of_a_shard_is_that_of_the_dataset_unless_another_is_asked_for(local, wanted, session, tmp_path):
    answered(local, wanted, session, masked(items(3)))
    StoreWriter(local, tmp_path, 0, settings=STORE).run()
    StoreWriter(local, tmp_path, 0, settings=dataclasses.replace(STORE, shard_bytes=None)).run()
    with pytest.raises(StoreError, match="another way to make token ids") as caught:
        StoreWriter(local, tmp_path, 0, settings=dataclasses.replace(STORE, shard_bytes=SHARD_BYTES * 2)).run()
    assert "shard_bytes" in caught.value.expected
    with pytest.raises(StoreError, match="a shard could not hold the longest sequence"):
        StoreWriter(local, tmp_path / "other", 0, settings=dataclasses.replace(STORE, shard_bytes=1000)).run()


@pytest.fixture
def put(local, wanted, session):
    """One item, and its rows and reference as a worker puts them."""
    item = masked([work_item("a", list(range(30)))])[0]
    local.publish(work_messages(wanted, [item]))
    (record,) = session.submit([item]).wait()
    payload = payload_from_record(record)
    chunks = put_rows(local, payload, 0, 1, max_chunk_bytes=1000)
    return item, record, payload, reference_to(record, payload, chunks)


def test_a_reference_says_whose_rows_they_are_where_and_how_large(put, local, wanted):
    item, record, payload, referred = put
    assert len(referred.chunks) == -(-len(payload) // 1000) and referred.num_bytes == len(payload)
    message = message_from_answer(referred, 1, wanted)
    value = json.loads(message.body)
    assert (value["request_id"], value["work_item_id"], value["token_hash"]) == ("a", "row a", item.token_hash)
    assert value["engine_fingerprint"] == wanted.contract.engine_fingerprint() and message.subject == "results.0.reference.1"
    answer = answer_from_delivery(Delivery(message.subject, message.body, message.headers, 1, 1, ""))
    assert answer.content == referred and answer.num_bytes == len(message.body) + len(payload)
    read = fetched(local, referred)
    assert read.request_id == "a" and (read.states[0].rows == record.states[0].rows).all()


def test_rows_that_are_gone_damaged_or_another_s_are_errors(put, local):
    _, _, payload, referred = put
    for changed in ({"payload_hash": "xxh3-128:0"}, {"num_bytes": len(payload) - 1}, {"chunks": referred.chunks[::-1]}):
        with pytest.raises(RowsLost, match="gone or damaged"):
            fetched(local, dataclasses.replace(referred, **changed))
    with pytest.raises(LineageError, match="are another's") as caught:
        fetched(local, dataclasses.replace(referred, request_id="b"))
    assert (caught.value.expected, caught.value.found) == ("request_id b", "request_id a")
    noise = random.Random(0).randbytes(500)
    (taken,) = local.publish([Message(rows_subject(0, 1), noise)])
    with pytest.raises(RowsLost):
        fetched(local, dataclasses.replace(referred, chunks=(taken.sequence,), num_bytes=500))
    local.remove_chunks(referred.chunks[1:2])
    with pytest.raises(RowsLost) as caught:
        fetched(local, referred)
    assert caught.value.found == f"no chunk {referred.chunks[1]}"


@pytest.mark.parametrize("how", ["gone", "damaged", "another's", "nothing is wrong"])
def test_a_reference_whose_rows_cannot_be_had_settles_its_item_with_the_reason(put, local, wanted, tmp_path, how):
    item, _, _, referred = put
    local.publish([message_from_answer(referred if how != "another's" else dataclasses.replace(referred, request_id="x"), 1, wanted)])
    if how == "gone":
        local.remove_chunks(referred.chunks[:1])
    if how == "damaged":
        kept = local._streams["rows"].kept[referred.chunks[0]]
        kept.wire = kept.wire[:-1] + bytes([kept.wire[-1] ^ 1])
    counts = StoreWriter(local, tmp_path, 0, settings=STORE).run()
    if how == "nothing is wrong":
        assert counts == {"stored": 1}
        return
    assert counts == {"failed": 1} and status_of(local).is_done
    line = json.loads((tmp_path / "part-0.refused.jsonl").read_text())
    assert (line["sequence"], line["code"]) == (1, "lineage" if how == "another's" else "rows_lost")
    assert line["what"] and line["expected"] and line["found"] and rows_bytes(local) == 0


BAD_FIELDS = [
    {"num_bytes": "1"}, {"num_bytes": 0}, {"num_bytes": True}, {"chunks": []}, {"chunks": [1, 1]}, {"chunks": ["1"]}, {"chunks": 7},
    {"chunks": [0]}, {"chunks": [1 << 70]}, {"request_id": None}, {"request_id": []}, {"format": "x"}, {"format_version": 2}, {"more": 1},
]  # fmt: skip


@pytest.mark.parametrize("changed", BAD_FIELDS, ids=str)
def test_a_damaged_reference_is_none_and_does_not_end_the_store(put, local, wanted, tmp_path, changed):
    *_, referred = put
    body = json.dumps({**json.loads(referred.to_json()), **changed}).encode()
    with pytest.raises((KeyError, TypeError, ValueError)):
        reference_from_json(body)
    message = message_from_answer(referred, 1, wanted)
    local.publish([dataclasses.replace(message, body=body, message_id=None), message])
    assert StoreWriter(local, tmp_path, 0, settings=STORE).run() == {"stored": 1}


def test_rows_that_nobody_refers_to_go_when_their_item_is_settled(broker, states_engine, session, tmp_path):
    """A worker died between its rows and its reference; another answered. A third item's rows are too young to be orphans."""
    wanted = wanted_of(states_engine, dataclasses.replace(SMALL, ack_wait_s=60.0))
    make_stream(broker, wanted)
    work = masked([work_item(name, list(range(30))) for name in ("a", "b")])
    broker.publish(work_messages(wanted, work))
    for item in (1, 2):
        put_rows(broker, b"left behind" * 300, 0, item, max_chunk_bytes=1000)
    assert broker.items_with_rows(0)[0] == [1, 2]
    (record,) = session.submit(work[:1]).wait()
    payload = payload_from_record(record)
    chunks = put_rows(broker, payload, 0, 1, max_chunk_bytes=1000)
    broker.publish([message_from_answer(reference_to(record, payload, chunks), 1, wanted)])
    assert StoreWriter(broker, tmp_path, 0, settings=STORE).run() == {"stored": 1}
    assert broker.items_with_rows(0)[0] == [2]
    put_rows(broker, payload, 0, 1, max_chunk_bytes=1000)  # by a slow worker, long after
    StoreWriter(broker, tmp_path, 0, settings=STORE).run()
    assert broker.items_with_rows(0)[0] == [2]


def test_where_rows_have_no_room_nothing_of_them_stays_and_what_others_put_does(broker, wanted):
    make_stream(broker, wanted)
    theirs = put_rows(broker, b"x" * 600_000, 0, 7, max_chunk_bytes=2000)
    before = rows_bytes(broker)
    outcome = put_rows(broker, b"y" * 300_000, 0, 7, max_chunk_bytes=2000)
    assert isinstance(outcome, NotPublished) and outcome.code == "full"
    assert rows_bytes(broker) == before and broker.read("rows", theirs) == [b"x" * 2000] * 300


def test_workers_wait_while_there_is_no_room_for_rows_and_lose_nothing(states_engine, broker, tmp_path):
    wanted = wanted_of(states_engine, dataclasses.replace(SMALL, max_rows_bytes=20_000))
    make_stream(broker, wanted)
    work = masked(items(80, max_length=30))
    broker.publish(work_messages(wanted, work))
    patient = WorkerSettings(max_tokens_in_flight=200, drain_s=1.0)
    with Session.open(states_engine, num_threads=1) as one, Session.open(states_engine, num_threads=1) as other:
        workers = [Worker(session, broker, settings=patient) for session in (one, other)]
        with running(*workers):
            wait_for(lambda: all(worker.metrics.value("extract_backpressure_seconds_total") for worker in workers))
            assert rows_bytes(broker) <= 20_000
            store = StoreWriter(broker, tmp_path, 0, settings=dataclasses.replace(STORE, leave_when_idle_s=None))
            with running(store):
                wait_for(lambda: status_of(broker).is_done)
    assert store.counts == {"stored": 80}
    check_stored(tmp_path / "part-0", work)


def test_a_commit_that_fails_leaves_rows_and_references_with_the_broker(local, wanted, session, tmp_path, monkeypatch):
    work = masked(items(20))
    answered(local, wanted, session, work)
    with monkeypatch.context() as patched:
        full = DiskFull("full", expected="room", found="none", fix="free some")
        patched.setattr(StatesStore, "flush", lambda self: (_ for _ in ()).throw(full))
        with pytest.raises(DiskFull):
            StoreWriter(local, tmp_path, 0, settings=STORE).run()
    time.sleep(QUICK.lease_s * 1.2)
    StoreWriter(local, tmp_path, 0, settings=STORE).run()
    check_stored(tmp_path / "part-0", work)


def test_a_writer_that_lost_its_lease_touches_nothing_of_the_dataset(local, wanted, session, tmp_path):
    """The older one has committed, is overtaken, tries again and ends, while the newer one's files lie half written."""
    work = masked(items(30))
    answered(local, wanted, session, work)
    answers = [answer_from_delivery(delivery) for delivery in local.pull_results(0, 100)]
    fence, folder = tmp_path / "part-0.fence", tmp_path / "part-0"
    old = Partition(local, wanted, tmp_path, 0, Fence(fence, 1), shard_bytes=SHARD_BYTES)
    old.commit(answers[:10])
    new = Partition(local, wanted, tmp_path, 0, Fence(fence, 2))
    new.commit(answers[10:20])
    hidden = [folder / "states" / ".part-shard-000009", folder / "states" / "index" / ".part-000009.parquet"]
    for path in hidden:
        path.write_bytes(b"of the newer one")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(LeaseLost, match="another writer has taken over"):
        old.commit(answers[20:])
    old.close()
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    new.commit(answers)
    new.seal()
    new.close()
    check_stored(folder, work)


def test_rows_are_removed_only_after_their_commit(local, wanted, session, tmp_path, monkeypatch):
    answered(local, wanted, session, masked(items(20)))
    flush, removed = StatesStore.flush, local.remove_rows
    steps = []
    monkeypatch.setattr(StatesStore, "flush", lambda self: (flush(self), steps.append("commit")))
    local.remove_rows = lambda partition, items: (steps.append("remove") if items else None, removed(partition, items))
    settle = local.settle
    local.settle = lambda deliveries, how: (steps.append(how) if deliveries else None, settle(deliveries, how))
    StoreWriter(local, tmp_path, 0, settings=STORE).run()
    assert re.fullmatch("(commit (remove )?ack )+", " ".join([*steps, ""])) and "remove" in steps


def test_an_answer_that_fits_a_message_but_not_with_its_headers_goes_by_reference(nats_server, states_engine, session):
    """A server counts headers, and closes the connection of a client that sends more than it takes."""
    from tensorrt_llm_ext.worker import Access, JetStreamBroker

    wanted = wanted_of(states_engine, dataclasses.replace(SMALL, max_message_bytes=1 << 20, max_rows_bytes=8 << 20))
    with JetStreamBroker.open(Access(nats_server.url), "headers", name="test") as broker:
        make_stream(broker, wanted)
        limit = broker.max_body_bytes()
        assert 1_000_000 < limit < 1 << 20
        for size in (limit, limit + 1, (1 << 20) - 10, 1 << 20):
            (outcome,) = broker.publish([Message(results_subject(0, "record"), b"x" * size, {"A": "b" * 100}, message_id=str(size))])
            assert isinstance(outcome, NotPublished) == (size > limit)
        chunks = put_rows(broker, b"z" * 3_000_000, 0, 1, max_chunk_bytes=limit)
        assert b"".join(broker.read("rows", chunks)) == b"z" * 3_000_000 and broker.is_connected()


def test_answers_of_every_length_come_back_the_same_by_message_and_by_reference(local, wanted, session):
    work = masked([work_item(f"n{length}", [length] * length) for length in range(1, 31)])
    answered(local, wanted, session, work)
    answers = answers_of(local, wanted)
    kinds = [type(answers[number]) for number in range(1, 31)]
    assert kinds == sorted(kinds, key=lambda kind: kind is Reference) and set(kinds) == {Record, Reference}
    for number, item in enumerate(work, 1):
        record = answers[number] if isinstance(answers[number], Record) else fetched(local, answers[number])
        assert np.abs(record.states[0].rows - reference(item.token_ids, ALL)).max() < 1e-5


def test_a_writer_that_reads_rows_for_longer_than_its_lease_keeps_it(local, wanted, session, tmp_path, monkeypatch):
    """Else writers that stand by would take the partition from each other for ever, and none would commit."""
    work = masked(items(30, max_length=30))
    answered(local, wanted, session, work)
    read = InProcessBroker.read

    def slow(self, part, sequences):
        time.sleep(0.2 if part == "rows" else 0)
        return read(self, part, sequences)

    monkeypatch.setattr(InProcessBroker, "read", slow)
    settings = dataclasses.replace(STORE, shard_bytes=1 << 20, commit_s=0.5, leave_when_idle_s=None)
    with running(*(StoreWriter(local, tmp_path, 0, settings=settings) for _ in range(2))):
        wait_for(lambda: status_of(local).is_done, timeout_s=20.0)
    check_stored(tmp_path / "part-0", work)
