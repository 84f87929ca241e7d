"""Streams of work over toy engines."""

from __future__ import annotations

import dataclasses
import threading
import time
from contextlib import contextmanager

import numpy as np
from toy_engines import ALL, NAN_TOKEN, reference, work_item

from fakes import byte_tokenizer
from tensorrt_llm_ext.checks.whole import check_dataset
from tensorrt_llm_ext.inputs import Fields, token_policy
from tensorrt_llm_ext.recipes import read_contract
from tensorrt_llm_ext.recipes.contract import Limits
from tensorrt_llm_ext.store import open_states
from tensorrt_llm_ext.worker import Message, StreamSettings, Wanted
from tensorrt_llm_ext.worker.broker import results_subject, work_subject
from tensorrt_llm_ext.worker.messages import answer_from_delivery, message_from_work

LIMITS = Limits(max_num_tokens=64, max_batch_size=16, max_seq_len=32, max_padded_tokens=128)
QUICK = StreamSettings(
    num_partitions=2,
    ack_wait_s=1.0,
    lease_s=1.0,
    max_message_bytes=1 << 16,
    max_results_bytes=64 << 20,
    max_rows_bytes=64 << 20,
    deliveries_before_alone=2,
    max_alone=2,
)


SMALL = dataclasses.replace(QUICK, num_partitions=1, max_message_bytes=2600, max_rows_bytes=1 << 20)
"""Messages hold the answers to short items of ``ALL``; those to others, of one chunk to three, do not fit."""


def wanted_of(engine, settings: StreamSettings = QUICK) -> Wanted:
    """What a stream of this engine asks for; of states with a loss mask."""
    contract = read_contract(engine)
    loss_mask = "ones" if contract.taps[0].rows == "all" else None
    return Wanted(contract, token_policy(Fields(ids="ids"), byte_tokenizer(), contract.limits, loss_mask=loss_mask), settings)


def items(num_items: int, seed: int = 0, max_length: int = 20):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, max_length + 1, size=num_items)
    return [work_item(f"r{i}", rng.integers(0, NAN_TOKEN, size=length)) for i, length in enumerate(lengths)]


def masked(work):
    """The items with a loss mask, each its own."""
    return [dataclasses.replace(item, loss_mask=(item.token_ids % 2).astype(np.uint8)) for item in work]


def work_messages(wanted: Wanted, work, priority: str = "normal") -> list[Message]:
    return [message_from_work(item, wanted, priority) for item in work]


def work_message(wanted: Wanted, request_id: str, body: bytes = b"{}", priority: str = "normal", **changed) -> Message:
    return Message(work_subject(wanted.lane_of(1, priority), request_id), body, **changed)


def result_message(partition: int = 0, body: bytes = b"x", **changed) -> Message:
    return Message(results_subject(partition, "record"), body, **changed)


def make_stream(broker, wanted: Wanted) -> None:
    """Make the stream and say what it asks for."""
    broker.create(wanted)
    broker.put("facts", "wanted", wanted.to_json())


def answers_of(broker, wanted: Wanted) -> dict:
    """Every answer on the results, by the work item's sequence; each is there once. They are acknowledged."""
    found = {}
    for partition in range(wanted.settings.num_partitions):
        while deliveries := broker.pull_results(partition, 100):
            for delivery in deliveries:
                answer = answer_from_delivery(delivery)
                assert answer.sequence not in found and answer.contract_version == wanted.version
                found[answer.sequence] = answer.content
            broker.settle(deliveries, "ack")
    return found


def rows_bytes(broker):
    return broker.counts().rows_bytes


def check_stored(folder, work):
    """The dataset is whole, and holds each item's rows, tokens and loss mask, once."""
    wholeness = check_dataset(folder)
    assert (wholeness.damages, wholeness.num_rows) == ((), len(work))
    by_id = {item.request_id: item for item in work}
    for sequence in open_states(folder).sequences():
        item = by_id.pop(sequence.request_id)
        assert sequence.token_ids.tolist() == item.token_ids.tolist() and sequence.loss_mask.tolist() == item.loss_mask.tolist()
        (rows,) = sequence.states.values()
        assert np.abs(rows - reference(item.token_ids, ALL)).max() < 1e-5
    assert not by_id


def wait_for(is_so, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@contextmanager
def running(*parts):
    """Workers or store writers, each in a thread, until the block is left."""
    stop = threading.Event()
    threads = [threading.Thread(target=part.run, args=(stop,)) for part in parts]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
