"""Submitting: each row once on the stream, by request id; the first submitter says what the stream asks for."""

import dataclasses
import json
import threading
import time

import pytest
from toy_engines import ALL, LAST, Toy, work_item, write_engine
from toy_streams import LIMITS, QUICK, items, wanted_of

from tensorrt_llm_ext.errors import BrokerError, InputError, Refusal, TapError
from tensorrt_llm_ext.inputs import AcceptedRow, RefusedRow
from tensorrt_llm_ext.worker import (
    Access,
    InProcessBroker,
    JetStreamBroker,
    StoreSettings,
    StoreWriter,
    Worker,
    WorkerSettings,
    make_stream,
    status_of,
    submit,
)

BAD = RefusedRow(3, None, 4, "bad", Refusal("too_long", "long", expected="8", found="9", fix="cut"))


def rows_of(work):
    return [AcceptedRow(number, None, item) for number, item in enumerate(work)]


def test_submitting_again_adds_only_what_is_missing(broker, wanted):
    make_stream(broker, wanted)
    first = submit(rows_of(items(15)[:10]), broker, wanted)
    assert (first.read, first.submitted, first.already_submitted, first.shortfall) == (10, 10, 0, 0)
    second = submit(rows_of(items(15)), broker, wanted)
    assert (second.read, second.submitted, second.already_submitted, second.shortfall) == (15, 5, 10, 0)
    assert broker.counts().num_work == 15


def test_the_same_id_with_other_tokens_is_refused_and_a_refused_row_is_told(broker, wanted):
    make_stream(broker, wanted)
    submit(rows_of([work_item("a", [1, 2])]), broker, wanted)
    told = []
    rows = [*rows_of([work_item("a", [1, 3]), work_item("b", [4])]), BAD]
    report = submit(rows, broker, wanted, on_refused=lambda *row: told.append(row))
    assert (report.read, report.submitted, report.refused, report.shortfall) == (3, 1, {"conflicting_id": 1, "too_long": 1}, 0)
    assert {(row, request_id, refusal.code) for row, request_id, refusal in told} == {(3, "bad", "too_long"), (0, "a", "conflicting_id")}


def test_a_request_id_is_on_the_stream_once_whatever_its_priority_and_length(broker, wanted):
    make_stream(broker, wanted)
    work = items(20)
    submit(rows_of(work[:10]), broker, wanted, priority="low")
    longer = [dataclasses.replace(item, token_ids=long.token_ids, token_hash=long.token_hash) for item, long in
              zip(work[:3], [work_item("x", list(range(n, 30))) for n in range(3)], strict=True)]  # fmt: skip
    for priority in ("high", "normal"):
        report = submit(rows_of(work), broker, wanted, priority=priority)
        new = 10 if priority == "high" else 0
        assert (report.submitted, report.already_submitted, report.refused, report.shortfall) == (new, 20 - new, {}, 0)
        report = submit(rows_of(longer), broker, wanted, priority=priority)
        assert (report.submitted, report.refused, report.shortfall) == (0, {"conflicting_id": 3}, 0)
    assert broker.counts().num_work == 20


def test_an_id_too_long_for_every_message_about_it_is_refused(broker, wanted):
    make_stream(broker, wanted)
    told = []
    rows = rows_of([work_item("a" * 4000, [1]), work_item("b" * 4097, [2])])
    report = submit(rows, broker, wanted, on_refused=lambda *row: told.append(row))
    assert (report.submitted, report.refused, report.shortfall) == (1, {"id_too_long": 1}, 0)
    assert told[0][2].found.startswith("4,097 characters") and len(told[0][2].found) < 100


def test_an_item_larger_than_a_message_is_refused(engine):
    wanted = wanted_of(engine, dataclasses.replace(QUICK, max_message_bytes=300))
    broker = InProcessBroker()
    make_stream(broker, wanted)
    report = submit(rows_of([work_item("a" * 400, [1])]), broker, wanted)
    assert report.refused == {"too_large": 1} and report.submitted == 0


def test_an_item_larger_than_the_server_takes_is_refused_with_the_server_s_bound(nats_server, engine):
    wanted, told = wanted_of(engine, dataclasses.replace(QUICK, max_message_bytes=2 << 20)), []
    with JetStreamBroker.open(Access(nats_server.url), "larger", name="test") as broker:
        make_stream(broker, wanted)
        rows = rows_of([work_item("a", [1] * 600_000), work_item("b", [1])])
        report = submit(rows, broker, wanted, on_refused=lambda *row: told.append(row))
    ((_, request_id, refusal),) = told
    assert (report.submitted, request_id, refusal.code) == (1, "a", "too_large") and refusal.found.endswith(" bytes")
    assert refusal.expected == "at most 1,044,480 bytes: the server's max_payload of 1,048,576 less 4,096 for headers"
    assert "raise max_payload" in refusal.fix and "stream" not in refusal.fix


def test_a_stream_that_asks_for_something_else_is_an_error_with_the_differences(broker, wanted):
    assert make_stream(broker, wanted) == wanted
    dated = dataclasses.replace(wanted, policy=dataclasses.replace(wanted.policy, template_date="2001-01-01"))
    assert make_stream(broker, dated) == wanted  # another day
    other = dataclasses.replace(wanted, settings=dataclasses.replace(QUICK, num_partitions=3))
    with pytest.raises(BrokerError, match="asks for something else") as caught:
        make_stream(broker, other)
    assert make_stream(broker, other, defaults=["num_partitions"]) == wanted  # nobody chose the number
    assert (caught.value.expected, caught.value.found) == ("settings.num_partitions 2", "settings.num_partitions 3")


def test_a_stream_of_another_engine_says_what_matters_of_the_two(broker, wanted, states_engine):
    make_stream(broker, wanted)
    with pytest.raises(BrokerError, match="asks for something else") as caught:
        make_stream(broker, wanted_of(states_engine))
    assert caught.value.expected.startswith("taps final@last,final@mean; ") and "contract." not in caught.value.expected
    assert caught.value.found.startswith("taps ") and caught.value.found.endswith("policy.loss_mask ones")


def test_taps_of_one_row_and_of_all_and_states_without_a_loss_mask_make_no_stream(tmp_path):
    both = write_engine(tmp_path / "both", Toy(taps=(LAST, ALL), limits=LIMITS))
    with pytest.raises(TapError, match="these taps give both"):
        make_stream(InProcessBroker(), wanted_of(both))
    wanted = wanted_of(write_engine(tmp_path / "all", Toy(taps=(ALL,), limits=LIMITS)))
    with pytest.raises(InputError, match="a stream of states needs a loss mask"):
        make_stream(InProcessBroker(), dataclasses.replace(wanted, policy=dataclasses.replace(wanted.policy, loss_mask=None)))


def test_the_status_follows_items_from_waiting_to_stored(broker, wanted, session, tmp_path):
    make_stream(broker, wanted)
    submit(rows_of([*items(20), work_item("nan", [96])]), broker, wanted)
    status = status_of(broker)
    assert (status.submitted, status.open, status.is_done, sum(status.waiting.values())) == (21, 21, False, 21)
    Worker(session, broker, settings=WorkerSettings(name="w", leave_when_idle_s=0.3)).run()
    status = status_of(broker)
    assert (status.unstored, status.open, sum(status.waiting.values())) == (21, 21, 0)
    assert status.workers == {}  # it has left
    for number in (0, 1):
        StoreWriter(broker, tmp_path, number, settings=StoreSettings(leave_when_idle_s=0.3)).run()
    status = status_of(broker)
    assert (status.stored, status.failed, status.open, status.is_done, status.unstored) == (20, 1, 0, True, 0)
    assert status.by_code == {"not_finite": 1} and json.dumps(status.to_dict())


def test_a_worker_is_shown_while_it_works_and_one_that_crashed_until_its_presence_ends(broker, wanted, session):
    make_stream(broker, wanted)
    stop, worker = threading.Event(), Worker(session, broker, settings=WorkerSettings(name="w"))
    thread = threading.Thread(target=worker.run, args=(stop,))
    thread.start()
    deadline = time.monotonic() + 20
    while status_of(broker).workers.get("w", {}).get("state") != "working" and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(QUICK.lease_s * 1.5)
    assert status_of(broker).workers["w"]["convention"] == "prefix_sum"  # renewed
    stop.set()
    thread.join(30)
    assert status_of(broker).workers == {}  # at once
    broker.put("leases", "worker.crashed", b"{}")
    assert list(status_of(broker).workers) == ["crashed"]
    time.sleep(QUICK.lease_s * 1.8)
    assert status_of(broker).workers == {}
