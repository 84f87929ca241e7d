"""Both brokers keep the same rules; the worker, the store and the submitter stand on nothing else."""

import asyncio
import dataclasses
import json
import random
import time
from types import SimpleNamespace

import pytest
from toy_streams import QUICK, result_message, wait_for, wanted_of, work_message

from tensorrt_llm_ext.errors import BrokerError, InputError
from tensorrt_llm_ext.worker import Access, InProcessBroker, JetStreamBroker, Message, NotPublished, Published
from tensorrt_llm_ext.worker import jetstream
from tensorrt_llm_ext.worker.broker import reference_subject, rows_subject
from tensorrt_llm_ext.worker.wanted import LANES


@pytest.fixture
def made(broker, wanted):
    broker.create(wanted)
    return broker


def lane_named(name):
    return next(lane for lane in LANES if lane.name == name)


NORMAL = lane_named("normal.short")


def pulled(broker, number=10, lane=NORMAL):
    return broker.pull_work({lane: number})[lane]


def test_a_message_comes_back_as_it_was_with_its_sequence(made, wanted):
    body, headers = bytes(range(256)), {"Extract-Format": "grüße", "A": "b c"}
    assert made.publish([work_message(wanted, "a", body, headers=headers)]) == [Published(1)]
    (delivery,) = pulled(made)
    assert delivery.body == body and dict(delivery.headers) == headers
    assert (delivery.sequence, delivery.num_delivered) == (1, 1)
    assert delivery.subject.startswith("work.normal.short.")


def test_a_lane_gives_its_own_messages_in_order_and_at_most_as_many_as_asked(made, wanted):
    made.publish([work_message(wanted, f"n{i}", str(i).encode()) for i in range(5)])
    made.publish([work_message(wanted, f"h{i}", str(i).encode(), "high") for i in range(2)])
    high = lane_named("high.short")
    taken = made.pull_work({NORMAL: 3, high: 10, lane_named("low.long"): 10})
    assert [d.body for d in taken[NORMAL]] == [b"0", b"1", b"2"] and [d.body for d in taken[high]] == [b"0", b"1"]
    assert [d.body for d in pulled(made)] == [b"3", b"4"]
    assert pulled(made) == []


def test_work_that_is_done_never_comes_again_and_can_still_be_read(made, wanted):
    made.publish([work_message(wanted, f"r{i}", f"body {i}".encode()) for i in range(3)])
    deliveries = pulled(made)
    made.settle(deliveries[:1], "ack")
    made.settle(deliveries[1:2], "terminate")
    made.settle(deliveries[2:], "give_back")
    deadline = time.monotonic() + 5
    while not (again := pulled(made)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [(d.sequence, d.num_delivered) for d in again] == [(3, 2)]
    assert made.read("work", [2, 1, 9, 0]) == [b"body 1", b"body 0", None, None]


def test_work_comes_again_after_its_deadline_unless_it_was_extended(made, wanted):
    made.publish([work_message(wanted, "a"), work_message(wanted, "b")])
    held, forgotten = pulled(made)
    end, again = time.monotonic() + QUICK.ack_wait_s * 1.6, []
    while time.monotonic() < end:
        made.settle([held], "extend")
        again += pulled(made)
        time.sleep(0.2)
    assert [d.sequence for d in again] == [forgotten.sequence]


def test_a_request_id_is_taken_once(made, wanted):
    made.publish([work_message(wanted, "a", b"first", is_first=True), work_message(wanted, "b", is_first=True)])
    made.settle(pulled(made), "ack")
    (refused,) = made.publish([work_message(wanted, "a", b"second", is_first=True)])
    assert isinstance(refused, NotPublished) and (refused.code, refused.sequence) == ("taken", 1)
    assert made.counts().num_work == 2


def test_work_is_found_by_its_subject_and_lanes_by_their_use_even_when_it_is_done(made, wanted):
    assert made.used_lanes() == set() and made.find_work([]) == []
    messages = [work_message(wanted, "a"), work_message(wanted, "b", priority="low")]
    made.publish(messages)
    made.settle(pulled(made), "ack")
    assert made.find_work([messages[1].subject, messages[0].subject, messages[0].subject + "x"]) == [2, 1, None]
    assert made.used_lanes() == {NORMAL, lane_named("low.short")}


def test_rows_lie_under_their_work_item_until_they_are_removed(made):
    messages = [Message(rows_subject(partition, item), bytes([item])) for partition, item in ((0, 7), (0, 8), (1, 7), (0, 7))]
    sequences = [outcome.sequence for outcome in made.publish(messages)]
    made.publish([Message("rows.0.none", b"x")])  # nobody's
    assert made.read("rows", [*sequences, 99]) == [b"\x07", b"\x08", b"\x07", b"\x07", None]
    assert made.items_with_rows(0) == ([7, 8], sequences[-1] + 1) and made.items_with_rows(1)[0] == [7]
    made.remove_rows(0, [7, 9])
    assert made.read("rows", sequences) == [None, b"\x08", b"\x07", None] and made.items_with_rows(0)[0] == [8]
    made.remove_chunks([sequences[1], 99])
    assert made.items_with_rows(0) == ([], sequences[-1] + 1) and made.counts().rows_bytes > 0


def test_of_rows_the_older_ones_can_be_removed_alone(made):
    chunks = [made.publish([Message(rows_subject(0, item), b"x")])[0].sequence for item in (7, 8, 7, 7)]
    made.remove_rows(0, [7], through=chunks[2])
    assert made.read("rows", chunks) == [None, b"x", None, b"x"]
    made.remove_rows(0, [8], through=chunks[0])
    assert made.items_with_rows(0) == ([7, 8], chunks[3])


def test_a_reference_is_known_by_its_work_item_until_it_is_acknowledged(made):
    made.publish([Message(reference_subject(0, 7), b"x"), Message(reference_subject(1, 8), b"x"), result_message()])
    assert made.items_referred_to(0, [6, 7, 8, 77]) == {7} and made.items_referred_to(0, []) == set()
    deliveries = made.pull_results(0, 5)
    assert len(deliveries) == 2 and made.items_referred_to(0, [7]) == {7}
    made.settle(deliveries, "ack")
    wait_for(lambda: made.items_referred_to(0, [7]) == set())
    assert made.items_referred_to(1, [8]) == {8}


def test_a_message_id_is_kept_once_even_after_its_message_is_gone(made):
    message = result_message(message_id="id:a@1")
    assert made.publish([message]) == [Published(1)]
    made.settle(made.pull_results(0, 5), "ack")
    assert made.publish([message]) == [Published(1, is_duplicate=True)]
    assert made.pull_results(0, 5) == [] and made.counts().num_results == 0


def test_results_are_bounded_and_freed_by_the_store(broker, engine):
    wanted = wanted_of(engine, dataclasses.replace(QUICK, max_results_bytes=10_000))
    broker.create(wanted)
    outcomes = [broker.publish([result_message(body=b"x" * 900)])[0] for _ in range(wanted.max_results + 1)]
    assert len(outcomes) == 5 and all(isinstance(one, Published) for one in outcomes[:-1]) and outcomes[-1].code == "full"
    broker.settle(broker.pull_results(0, 1), "ack")
    deadline = time.monotonic() + 5
    while isinstance(broker.publish([result_message(body=b"x" * 900)])[0], NotPublished):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_nothing_that_was_taken_is_dropped_for_what_finds_no_room(broker, engine):
    """A server may drop its oldest message for one that does not quite fit a bound in bytes."""
    wanted = wanted_of(engine, dataclasses.replace(QUICK, max_message_bytes=3000, max_rows_bytes=20_000, max_results_bytes=20_000))
    broker.create(wanted)
    rng, refused, bodies = random.Random(0), 0, {}
    for number in range(150):
        item, body = number % 40, bytes([number]) * rng.randrange(1, 3001)
        (outcome,) = broker.publish([Message(rows_subject(0, item), body)])
        if isinstance(outcome, Published):
            bodies[outcome.sequence] = body
        else:
            refused += 1
            gone = rng.sample(sorted(bodies), rng.randrange(1, 4))
            broker.remove_chunks(gone)
            bodies = {sequence: body for sequence, body in bodies.items() if sequence not in gone}
        assert broker.read("rows", sorted(bodies)) == [bodies[sequence] for sequence in sorted(bodies)]
    assert refused > 20
    outcomes = [broker.publish([result_message(body=b"x" * rng.randrange(1, 3001))])[0] for _ in range(60)]
    taken = [one.sequence for one in outcomes if isinstance(one, Published)]
    assert [delivery.sequence for delivery in broker.pull_results(0, 60)] == taken and 3 < len(taken) < 60


def test_a_message_beyond_the_size_limit_is_not_taken(made):
    (outcome,) = made.publish([result_message(body=b"x" * (QUICK.max_message_bytes + 5000))])
    assert outcome.code == "too_large" and f"{QUICK.max_message_bytes + 5000:,}" in outcome.found
    assert "the stream's max_message_bytes" in outcome.expected and "max_message_bytes" in outcome.fix


def test_a_lease_is_taken_once_renewed_by_its_revision_and_ends_by_itself(made):
    first = made.put("leases", "part-0", b"mine", revision=0)
    assert made.put("leases", "part-0", b"other", revision=0) is None
    renewed = made.put("leases", "part-0", b"mine", revision=first)
    assert renewed > first and made.put("leases", "part-0", b"other", revision=first) is None
    assert made.get("leases", "part-0").value == b"mine" and made.keys("leases") == ["part-0"]
    time.sleep(QUICK.lease_s * 1.8)
    assert made.get("leases", "part-0") is None and made.keys("leases") == []
    assert made.put("leases", "part-0", b"mine", revision=renewed) is None
    assert made.put("leases", "part-0", b"other", revision=0) > renewed


def test_once_a_second_a_pull_may_wait_for_a_moment(nats_server, wanted, monkeypatch):
    """A server that was killed may count no messages where there are some: it looks for them only then."""
    now = [1000.0]
    monkeypatch.setattr(jetstream, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with JetStreamBroker.open(Access(nats_server.url), "patient", name="test") as broker:
        broker.create(wanted)
        client, requests = broker._connection.client, []
        publish = client.publish

        async def watched(subject, body=b"", *rest, **options):
            if ".MSG.NEXT." in subject:
                requests.append("expires" in json.loads(body))
            await publish(subject, body, *rest, **options)

        monkeypatch.setattr(client, "publish", watched)
        for step in (0.0, 0.5, 0.4, 0.2, 0.0):
            now[0] += step
            assert broker.pull_results(0, 5) == []
        assert requests == [True, False, False, True, False]
        broker.publish([result_message()])
        now[0] += 2
        assert len(broker.pull_results(0, 5)) == 1 and requests[-1]


def test_a_lease_that_ends_while_another_asks_for_it_is_free(nats_server, wanted, monkeypatch):
    with JetStreamBroker.open(Access(nats_server.url), "lease-ends", name="test") as broker:
        broker.create(wanted)
        first = broker.put("leases", "part-0", b"mine", revision=0)
        bucket = broker._buckets["leases"]
        look = bucket._get

        async def look_late(*key, **options):
            await asyncio.sleep(QUICK.lease_s * 1.8)
            return await look(*key, **options)

        monkeypatch.setattr(bucket, "_get", look_late)
        assert broker.put("leases", "part-0", b"other", revision=0) > first
        assert broker.get("leases", "part-0").value == b"other"


def test_a_lease_is_removed_only_by_its_newest_revision(made):
    revision = made.put("leases", "part-0", b"mine", revision=0)
    made.delete("leases", "part-0", revision=revision + 7)
    assert made.get("leases", "part-0") is not None
    made.delete("leases", "part-0", revision=revision)
    assert made.get("leases", "part-0") is None
    assert made.put("leases", "part-0", b"other", revision=0) > revision


def test_facts_stay_and_are_overwritten(made):
    assert made.get("facts", "wanted") is None and made.keys("facts") == []
    made.put("facts", "wanted", b"one")
    made.put("facts", "wanted", b"two")
    assert made.get("facts", "wanted").value == b"two" and made.keys("facts") == ["wanted"]


def test_counts_say_what_waits_and_what_is_in_work(made, wanted):
    made.publish([work_message(wanted, f"r{i}") for i in range(5)])
    made.settle(pulled(made, 1), "ack")
    pulled(made, 1)
    made.publish([result_message(body=b"12345")])
    counts = made.counts()
    assert (counts.num_work, counts.waiting["normal.short"], counts.in_work["normal.short"]) == (5, 3, 1)
    assert counts.num_results == 1 and counts.results_bytes > 5 and made.is_connected()


def test_a_stream_that_nobody_made_is_an_error(broker):
    with pytest.raises(BrokerError, match=f"the broker has no stream '{broker.stream}'"):
        broker.put("facts", "a", b"b")


def test_a_stream_is_made_once_and_then_stays_as_it_is(made, wanted):
    made.publish([work_message(wanted, "a")])
    made.create(wanted)
    assert made.counts().num_work == 1


def test_the_in_process_broker_really_encodes(wanted):
    broker = InProcessBroker()
    broker.create(wanted)
    with pytest.raises(TypeError):
        broker.publish([work_message(wanted, "a", json.loads('{"not": "bytes"}'))])
    with pytest.raises(TypeError):
        broker.publish([work_message(wanted, "a", headers={"number": b"bytes are no header"})])


@pytest.mark.parametrize("name", ["", "a.b", "a b", "*", "x" * 65, "grün"])
def test_a_name_that_no_stream_can_have_is_refused(name):
    with pytest.raises(InputError, match="cannot be the name of a stream"):
        InProcessBroker(name)
