"""The store as a consumer: one writer a partition, exactly one row or one reason for each work item."""

import dataclasses
import json
import threading
import time

import numpy as np
import pytest
from toy_engines import LAST, reference, work_item
from toy_streams import QUICK, items, make_stream, wanted_of, work_messages

from tensorrt_llm_ext.errors import DiskFull, ForeignDataset, InputError, LeaseLost, StoreError
from tensorrt_llm_ext.results import State, rows_hash
from tensorrt_llm_ext.store import Fence, VectorStore, open_vectors
from tensorrt_llm_ext.worker import InProcessBroker, Message, StoreSettings, StoreWriter, partition
from tensorrt_llm_ext.worker.lease import Lease
from tensorrt_llm_ext.worker.messages import Answer, Outcome, answer_from_delivery, message_from_answer
from tensorrt_llm_ext.worker.outcomes import OutcomeLedger
from tensorrt_llm_ext.worker.partition import Partition

IDLE = StoreSettings(name="s", commit_s=0.1, leave_when_idle_s=0.4)


@pytest.fixture
def wanted(engine):
    return wanted_of(engine, dataclasses.replace(QUICK, num_partitions=1))


@pytest.fixture
def local(wanted):
    broker = InProcessBroker()
    make_stream(broker, wanted)
    return broker


def answered(broker, wanted, session, work, *, first=True):
    """Submit items and their answers, as a worker would; the messages of the answers."""
    sequences = [outcome.sequence for outcome in broker.publish(work_messages(wanted, work))] if first else range(1, 1000)
    records = [record for item in work for record in session.submit([item]).wait()]
    messages = [message_from_answer(record, sequence, wanted) for record, sequence in zip(records, sequences)]
    broker.publish(messages)
    return messages


def again(broker, messages):
    """Deliver answers again, as after a message id was forgotten."""
    broker.publish([dataclasses.replace(message, message_id=None) for message in messages])


def lines(out):
    return [json.loads(line) for line in (out / "part-0.refused.jsonl").read_text().splitlines()]


def ids_of(out):
    return [record.request_id for record in open_vectors(out / "part-0").records()]


def test_answers_become_rows_that_lead_back_to_their_work_items(broker, wanted, session, tmp_path):
    make_stream(broker, wanted)
    work = items(30)
    answered(broker, wanted, session, work)
    assert StoreWriter(broker, tmp_path, 0, settings=IDLE).run() == {"stored": 30}
    vectors = open_vectors(tmp_path / "part-0")
    rows = vectors.dataset.to_table(columns=["row", "request_id"]).to_pydict()
    assert sorted(rows["row"]) == list(range(30))  # the work item's sequence, from 0
    for item in work:
        assert np.abs(vectors.vector(item.request_id, "final_post_last") - reference(item.token_ids, LAST)[0]).max() < 1e-5
    assert vectors.header.job["stream"] == {"name": broker.stream, "version": wanted.version, "partition": 0}
    facts = json.loads(broker.get("facts", "store.0").value)
    assert (facts["stored"], facts["refused"], facts["failed"]) == (30, 0, 0)
    assert broker.counts().num_results == 0


def test_refusals_and_failures_become_lines(local, wanted, session, tmp_path):
    answered(local, wanted, session, items(3))
    local.publish(work_messages(wanted, [work_item("x", [1]), work_item("y", [1])]))
    refused = Outcome("refused", "x", None, "too_long", "long", "8", "9", "cut")
    local.publish([message_from_answer(refused, 4, wanted), message_from_answer(Outcome("failed", "y", "f#1", "not_finite", "w"), 5, wanted)])
    counts = StoreWriter(local, tmp_path, 0, settings=IDLE).run()
    assert counts == {"stored": 3, "refused": 1, "failed": 1}
    assert [(line["sequence"], line["kind"], line["request_id"], line["code"]) for line in lines(tmp_path)] == [
        (4, "refused", "x", "too_long"),
        (5, "failed", "y", "not_finite"),
    ]
    assert (lines(tmp_path)[0]["expected"], lines(tmp_path)[0]["found"]) == ("8", "9")


def test_what_is_delivered_again_is_dropped_now_and_after_a_restart(local, wanted, session, tmp_path):
    messages = answered(local, wanted, session, items(10))
    outcome = message_from_answer(Outcome("failed", "x", None, "c", "w"), 11, wanted)
    local.publish([*work_messages(wanted, [work_item("x", [1])]), outcome])
    again(local, messages[:4])
    StoreWriter(local, tmp_path, 0, settings=IDLE).run()
    again(local, [*messages, outcome])
    assert StoreWriter(local, tmp_path, 0, settings=IDLE).run() == {}
    assert sorted(ids_of(tmp_path)) == sorted(f"r{i}" for i in range(10)) and len(lines(tmp_path)) == 1
    assert json.loads(local.get("facts", "store.0").value)["redelivered"] == 11


@pytest.mark.parametrize("restart", [False, True])
def test_a_second_work_item_of_a_request_id_gets_a_reason_instead_of_a_row(local, wanted, session, tmp_path, restart):
    answered(local, wanted, session, [work_item("a", [1, 2])])
    if restart:
        StoreWriter(local, tmp_path, 0, settings=IDLE).run()
    sequences = [
        local.publish([dataclasses.replace(message, is_first=False)])[0].sequence
        for message in work_messages(wanted, [work_item("a", [1, 2]), work_item("a", [3])])
    ]
    for sequence, ids in zip(sequences, ([1, 2], [3]), strict=True):
        (record,) = session.submit([work_item("a", ids)]).wait()
        local.publish([message_from_answer(record, sequence, wanted)])
    StoreWriter(local, tmp_path, 0, settings=IDLE).run()
    assert ids_of(tmp_path) == ["a"]
    assert [(line["sequence"], line["code"]) for line in lines(tmp_path)] == [(2, "duplicate_id"), (3, "conflicting_id")]


def changed(message, wanted, **fields):
    """The answer of another record: one of its fields changed, and all hashes right."""
    record = answer_from_delivery(_delivery(message)).content
    sequence = int(message.headers["Extract-Work-Sequence"])
    return dataclasses.replace(message_from_answer(dataclasses.replace(record, **fields), sequence, wanted), message_id=None)


def _delivery(message):
    from tensorrt_llm_ext.worker import Delivery

    return Delivery(message.subject, message.body, message.headers, 1, 1, "")


@pytest.mark.parametrize(
    "name", ["request_id", "token_hash", "num_tokens", "work_item_id", "engine", "version", "hash", "sequence", "tokenizer"]
)
def test_a_record_that_is_not_the_answer_to_its_work_item_is_not_stored(local, wanted, session, tmp_path, name):
    right = answered(local, wanted, session, items(2))
    record = answer_from_delivery(_delivery(right[0])).content
    local.settle(local.pull_results(0, 10), "ack")
    origin = record.origin
    wrong = {
        "request_id": {"request_id": "r1"},
        "token_hash": {"token_hash": "sha256:0"},
        "num_tokens": {"num_tokens": record.num_tokens + 1},
        "work_item_id": {"work_item_id": "elsewhere"},
        "engine": {"origin": dataclasses.replace(origin, engine_fingerprint="sha256:other")},
        "tokenizer": {"origin": dataclasses.replace(origin, tokenizer_fingerprint="sha256:other")},
        "hash": {"states": tuple(_with_other_rows(state) for state in record.states)},
    }
    message = changed(right[0], wanted, **wrong.get(name, {}))
    if name == "version":
        message = dataclasses.replace(message, headers={**message.headers, "Extract-Contract-Version": "sha256:old"})
    if name == "sequence":
        message = dataclasses.replace(message, headers={**message.headers, "Extract-Work-Sequence": "2"})
    local.publish([message, dataclasses.replace(right[1], message_id=None)] if name != "sequence" else [message])
    StoreWriter(local, tmp_path, 0, settings=IDLE).run()
    (line,) = lines(tmp_path)
    assert line["code"] == "lineage" and line["sequence"] == (2 if name == "sequence" else 1)
    if name != "sequence":
        assert ids_of(tmp_path) == ["r1"]  # the right one is stored all the same


def _with_other_rows(state):
    rows = state.rows.astype(np.float16)
    return State(state.tap, rows, state.computed_dtype, rows_hash(rows))


@pytest.mark.parametrize("number", ["999", "-1", "0", "9" * 30, "one", ""])
def test_a_result_that_names_no_work_item_is_logged_and_dropped(local, wanted, session, tmp_path, number, caplog):
    caplog.set_level("INFO", "tensorrt_llm_ext.worker")
    (right,) = answered(local, wanted, session, items(1))
    again(local, [dataclasses.replace(right, headers={**right.headers, "Extract-Work-Sequence": number})])
    local.publish([Message("results.0.record", b"\x00" * 50), Message("results.0.refusal", b"{}")])
    writer = StoreWriter(local, tmp_path, 0, settings=IDLE)
    assert writer.run() == {"stored": 1}
    assert local.counts().num_results == 0
    events = [json.loads(record.getMessage())["event"] for record in caplog.records]
    assert events.count("unreadable") + events.count("no_work_item") == 3


def test_an_answer_is_acknowledged_only_after_its_commit(local, wanted, session, tmp_path, monkeypatch):
    answered(local, wanted, session, items(5))
    committed = []
    commit = VectorStore.commit
    monkeypatch.setattr(VectorStore, "commit", lambda self, end: (committed.append(commit(self, end)), committed[-1])[1])
    settle = local.settle

    def watched(deliveries, how):
        assert not deliveries or committed
        settle(deliveries, how)

    local.settle = watched
    StoreWriter(local, tmp_path, 0, settings=IDLE).run()
    assert committed == [5]


def test_a_commit_that_fails_leaves_every_answer_with_the_broker(local, wanted, session, tmp_path, monkeypatch):
    answered(local, wanted, session, items(5))
    with monkeypatch.context() as patched:
        full = DiskFull("full", expected="room", found="none", fix="free some")
        patched.setattr(VectorStore, "commit", lambda self, end: (_ for _ in ()).throw(full))
        with pytest.raises(DiskFull):
            StoreWriter(local, tmp_path, 0, settings=IDLE).run()
    deliveries = local.pull_results(0, 10)  # at once: they were given back
    assert len(deliveries) == 5
    local.settle(deliveries, "give_back")
    time.sleep(QUICK.lease_s * 1.2)
    assert StoreWriter(local, tmp_path, 0, settings=IDLE).run() == {"stored": 5}


def test_a_writer_paused_past_its_lease_never_commits_and_goes_on_as_the_next_in_line(broker, wanted, session, tmp_path, monkeypatch):
    """It is paused at the last moment: the lease was renewed, the commit comes next."""
    make_stream(broker, wanted)
    answered(broker, wanted, session, items(40))
    paused, may_go_on, held = threading.Event(), threading.Event(), Fence.held
    names = {}

    def pausing(fence):
        if threading.current_thread().name == "first" and names.setdefault("calls", 0) == 1:
            names["calls"] = 2
            paused.set()
            assert may_go_on.wait(60)
        elif threading.current_thread().name == "first":
            names["calls"] += 1
        return held(fence)

    monkeypatch.setattr(Fence, "held", pausing)
    first = StoreWriter(broker, tmp_path, 0, settings=dataclasses.replace(IDLE, name="first"))
    second = StoreWriter(broker, tmp_path, 0, settings=dataclasses.replace(IDLE, name="second", leave_when_idle_s=3.0))
    stop, counts = threading.Event(), {}
    threads = [threading.Thread(target=lambda w=w: counts.update({w.name: w.run(stop)}), name=w.name) for w in (first, second)]
    threads[0].start()
    assert paused.wait(20)
    threads[1].start()
    deadline = time.monotonic() + 30
    while second.counts["stored"] < 40 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert second.counts["stored"] == 40 and first.counts["stored"] == 0
    may_go_on.set()
    for thread in threads:
        thread.join(60)
    assert counts["first"] == {} and counts["second"] == {"stored": 40}
    assert sorted(ids_of(tmp_path)) == sorted(f"r{i}" for i in range(40))


def test_a_writer_paused_within_its_commit_is_waited_for(local, wanted, session, tmp_path, monkeypatch):
    """The new one cannot know how far the commit is; it takes over once that is done, and drops what is there."""
    answered(local, wanted, session, items(20))
    paused, may_go_on, commit = threading.Event(), threading.Event(), VectorStore.commit

    def pausing(store, end):
        if threading.current_thread().name == "first" and not paused.is_set():
            paused.set()
            assert may_go_on.wait(60)
        return commit(store, end)

    monkeypatch.setattr(VectorStore, "commit", pausing)
    writers = [StoreWriter(local, tmp_path, 0, settings=dataclasses.replace(IDLE, name=name, leave_when_idle_s=2.5)) for name in ("first", "second")]
    threads = [threading.Thread(target=writer.run, name=writer.name) for writer in writers]
    threads[0].start()
    assert paused.wait(20)
    threads[1].start()
    time.sleep(QUICK.lease_s * 1.6)
    assert writers[1].state == "standing by"
    may_go_on.set()
    for thread in threads:
        thread.join(60)
    assert (writers[0].counts["stored"], writers[1].counts["stored"]) == (20, 0)
    assert sorted(ids_of(tmp_path)) == sorted(f"r{i}" for i in range(20))


def test_a_lease_is_lost_for_good_once_it_has_ended(local):
    stop = threading.Event()
    lease = Lease.take(local, "part-0", "a", stop)
    lease.renew()
    time.sleep(QUICK.lease_s * 1.2)
    with pytest.raises(LeaseLost, match="the lease 'part-0' has ended"):
        lease.renew()
    other = Lease.take(local, "part-0", "b", stop)
    assert other.token > lease.token
    stop.set()
    assert Lease.take(local, "part-0", "c", stop) is None
    other.release()
    assert local.get("leases", "part-0") is None


def test_a_writer_keeps_its_lease_while_it_reads_what_a_large_dataset_holds(local, wanted, session, tmp_path, monkeypatch):
    """Else two writers, each needing longer than a lease, would take it from each other and store nothing."""
    answered(local, wanted, session, items(12))
    StoreWriter(local, tmp_path, 0, settings=IDLE).run()
    identities = VectorStore.identities
    monkeypatch.setattr(VectorStore, "identities", lambda self: (time.sleep(QUICK.lease_s / 5) or one for one in identities(self)))
    monkeypatch.setattr(partition, "_IDS_AT_ONCE", 1)
    answered(local, wanted, session, [work_item(f"more{i}", [i + 1]) for i in range(3)])
    stop = threading.Event()
    writers = [StoreWriter(local, tmp_path, 0, settings=dataclasses.replace(IDLE, leave_when_idle_s=None)) for _ in range(2)]
    threads = [threading.Thread(target=writer.run, args=(stop,)) for writer in writers]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 15
    while local.counts().num_results and time.monotonic() < deadline:
        time.sleep(0.05)
    stop.set()
    for thread in threads:
        thread.join(30)
    assert sum(writer.counts["stored"] for writer in writers) == 3 and len(ids_of(tmp_path)) == 15


def test_a_partition_that_cannot_be_opened_leaves_its_dataset_to_the_next(local, wanted, session, tmp_path, monkeypatch):
    answered(local, wanted, session, items(5))
    StoreWriter(local, tmp_path, 0, settings=IDLE).run()
    monkeypatch.setattr(partition, "_IDS_AT_ONCE", 1)

    def lost():
        raise LeaseLost("the lease has ended", expected="it", found="none", fix="nothing")

    with pytest.raises(LeaseLost) as kept:  # the error keeps the partition's frames
        Partition(local, wanted, tmp_path, 0, Fence(tmp_path / "part-0.fence", 100), keep_lease=lost)
    Partition(local, wanted, tmp_path, 0, Fence(tmp_path / "part-0.fence", 101)).close()
    assert kept.value.what == "the lease has ended"


def test_a_folder_of_another_stream_is_refused(local, wanted, session, tmp_path):
    answered(local, wanted, session, items(2))
    StoreWriter(local, tmp_path, 0, settings=IDLE).run()
    other = InProcessBroker("other")
    make_stream(other, wanted)
    with pytest.raises(ForeignDataset, match="stream.name = other"):
        StoreWriter(other, tmp_path, 0, settings=IDLE).run()


def test_a_partition_that_is_not_there_is_refused_at_once(local, tmp_path):
    with pytest.raises(InputError, match="the stream has no such partition"):
        StoreWriter(local, tmp_path, 1)


@pytest.mark.parametrize("torn", [b'{"seq', b'{"sequence": 3}'])
def test_a_line_that_a_killed_writer_has_torn_is_dropped(tmp_path, torn):
    path = tmp_path / "part-0.refused.jsonl"
    ledger = OutcomeLedger(path)
    ledger.write([(1, Outcome("refused", "a", None, "too_long", "w")), (2, Outcome("failed", None, None, "lineage", "w"))])
    ledger.close()
    path.write_bytes(path.read_bytes() + torn)
    ledger = OutcomeLedger(path)
    assert list(ledger.sequences()) == [1, 2] and ledger.counts == {"refused": 1, "failed": 1}
    ledger.write([(5, Outcome("refused", "b", None, "too_long", "w"))])
    assert list(OutcomeLedger(path).sequences()) == [1, 2, 5]


def test_a_damaged_ledger_is_an_error(tmp_path):
    (tmp_path / "l.jsonl").write_bytes(b'{"sequence": 1}\n')
    with pytest.raises(StoreError, match="is damaged at line 1"):
        list(OutcomeLedger(tmp_path / "l.jsonl").sequences())


def test_a_partition_knows_what_it_holds_when_it_is_opened_again(local, wanted, session, tmp_path):
    messages = answered(local, wanted, session, items(5))
    answers = [answer_from_delivery(_delivery(message)) for message in messages]
    partition = Partition(local, wanted, tmp_path, 0, Fence(tmp_path / "part-0.fence", 1))
    partition.commit(answers[:3])
    with pytest.raises(LeaseLost):
        Partition(local, wanted, tmp_path, 0, Fence(tmp_path / "part-0.fence", 2)).close()
        partition.commit(answers[3:])
    reopened = Partition(local, wanted, tmp_path, 0, Fence(tmp_path / "part-0.fence", 3))
    assert reopened.commit([*answers, Answer(1, wanted.version, Outcome("failed", "r0", None, "c", "w"))]) == {"stored": 2}
    assert reopened.facts()["stored"] == 5 and reopened.facts()["redelivered"] == 4
