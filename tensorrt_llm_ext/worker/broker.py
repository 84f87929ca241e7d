"""Broker: what the worker, the store and the submitter need of one stream of work; brokers are ``jetstream`` and ``in_process``.

A stream NAME is made of

* the **work** ``NAME.work.<priority>.<length>.<hash of the request id>``: kept after it is done, so that a result can be
  held against it and the same request id cannot be submitted twice;
* the **results** ``NAME.results.<partition>.<record | refusal | reference.<work item's sequence>>``: kept until the store
  has committed them, bounded in number, the newest refused beyond;
* the **rows** ``NAME.rows.<partition>.<work item's sequence>``: chunks of answers too large for a message (``reference``
  and ``orphans`` say more), kept until their work item is settled, bounded in the same way;
* a bucket of **facts** without end (what the owner asks for, what the store has done) and a bucket of **leases**, whose
  keys end by themselves when nobody renews them.

Every call of a broker is safe from any thread, and either happens or raises BrokerError.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import xxhash

from tensorrt_llm_ext.errors import InputError
from tensorrt_llm_ext.worker.wanted import Lane, Wanted

Bucket = Literal["facts", "leases"]
Part = Literal["work", "rows"]
Settling = Literal["ack", "extend", "give_back", "terminate"]

FULL = {"expected": "room for one more message", "fix": "wait until the store has made room, or make a stream with more of it"}
"""What a ``NotPublished`` of a bound of messages says."""

STREAM_TOO_SMALL = "shorten it, or make a stream with a larger max_message_bytes"
"""What to do about a message that is larger than its stream takes."""

_NAME = re.compile(r"^[A-Za-z0-9_-]{1,64}$")


@dataclass(frozen=True)
class Message:
    """What is published: a subject within the stream (``work.normal.short.…``), headers, a body."""

    subject: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    message_id: str | None = None  # the broker keeps one message of an id, for some minutes
    is_first: bool = False  # only when no message has this subject


@dataclass(frozen=True)
class Delivery:
    """A message that was handed to this consumer, until it is settled or its deadline ends."""

    subject: str
    body: bytes
    headers: Mapping[str, str]
    sequence: int  # of the message in its stream, from 1: its identity
    num_delivered: int  # how often it was handed to anyone, this time included
    reply: str  # by which the broker knows the delivery


@dataclass(frozen=True)
class Published:
    """A message the broker has persisted, now or, with ``is_duplicate``, before."""

    sequence: int
    is_duplicate: bool = False


@dataclass(frozen=True)
class NotPublished:
    """A message the broker did not take: ``taken`` (its subject has a message: ``sequence``), ``full``, ``too_large``.

    Of the last two ``expected`` and ``fix`` say whose bound it was, the stream's or the server's, and what to do about it.
    """

    code: Literal["taken", "full", "too_large"]
    found: str
    sequence: int | None = None
    expected: str = ""
    fix: str = ""


@dataclass(frozen=True)
class Entry:
    """A value of a bucket; ``revision`` rises with every change of the bucket and is never used twice."""

    value: bytes
    revision: int


@dataclass(frozen=True)
class Counts:
    """How much lies where. ``waiting`` and ``in_work`` count work items, by lane."""

    num_work: int
    waiting: Mapping[str, int]
    in_work: Mapping[str, int]
    num_results: int
    results_bytes: int
    rows_bytes: int


class Broker(Protocol):
    """One stream of work at a broker."""

    stream: str

    def create(self, wanted: Wanted) -> None:
        """Make the parts of a stream that is to ask for this; one that is there already stays as it is."""

    def publish(self, messages: Sequence[Message]) -> list[Published | NotPublished]:
        """Publish messages; return, in their order, what became of each once the broker has persisted it."""

    def pull_work(self, wants: Mapping[Lane, int]) -> dict[Lane, list[Delivery]]:
        """Take at most so many work items from each lane, without waiting for more."""

    def pull_results(self, partition: int, num_messages: int) -> list[Delivery]:
        """Take at most so many answers of a partition, without waiting for more."""

    def settle(self, deliveries: Sequence[Delivery], how: Settling) -> None:
        """Say that deliveries are done, need longer, are given back, or are never to come again."""

    def max_body_bytes(self) -> int:
        """The largest body that a message may have here."""

    def read(self, part: Part, sequences: Sequence[int]) -> list[bytes | None]:
        """The bodies of work items, or of chunks of rows, by their sequence; None for one that is not there."""

    def find_work(self, subjects: Sequence[str]) -> list[int | None]:
        """The sequences of the newest work items of these subjects; None where there is none."""

    def used_lanes(self) -> set[Lane]:
        """The lanes that ever had a work item."""

    def items_with_rows(self, partition: int) -> tuple[list[int], int]:
        """The sequences of the work items of which rows lie here, and that of the newest chunk of any, 0 before the first."""

    def items_referred_to(self, partition: int, items: Sequence[int]) -> set[int]:
        """Those of these work items to whose rows a reference waits, or is being stored: the store has not acknowledged it."""

    def remove_chunks(self, sequences: Sequence[int]) -> None:
        """Remove chunks of rows by their sequence."""

    def remove_rows(self, partition: int, items: Sequence[int], *, through: int | None = None) -> None:
        """Remove the rows of these work items, whoever put them here: all, or the chunks up to and with this sequence."""

    def get(self, bucket: Bucket, key: str) -> Entry | None:
        """The value of a key; None where there is none, or no such stream."""

    def put(self, bucket: Bucket, key: str, value: bytes, *, revision: int | None = None) -> int | None:
        """Set a key; with ``revision`` only while that is its newest (0: while it has none), else return None."""

    def delete(self, bucket: Bucket, key: str, *, revision: int) -> None:
        """Remove a key while ``revision`` is its newest; else nothing."""

    def keys(self, bucket: Bucket) -> list[str]:
        """The keys of a bucket, sorted."""

    def counts(self) -> Counts:
        """How much lies where."""

    def is_connected(self) -> bool:
        """Whether the broker can be reached now."""

    def close(self) -> None:
        """Let go of the broker. Idempotent; what was not settled comes again."""


def check_stream_name(name: str) -> str:
    """The name itself. Raises InputError for one that cannot be a stream's."""
    if not _NAME.match(name):
        raise InputError(
            "this cannot be the name of a stream",
            expected="1 to 64 letters, digits, - and _",
            found=repr(name)[:80],
            fix="name the stream with --stream",
        )
    return name


def work_subject(lane: Lane, request_id: str) -> str:
    """Where a work item goes: one place for one request id in one lane."""
    return f"work.{lane.name}.{xxhash.xxh3_128_hexdigest(request_id.encode())}"


def results_subject(partition: int, kind: Literal["record", "refusal"]) -> str:
    """Where an answer goes that is whole in its message."""
    return f"results.{partition}.{kind}"


def reference_subject(partition: int, item: int) -> str:
    """Where a reference to the rows of the work item of this sequence goes: one can ask whether it waits."""
    return f"results.{partition}.reference.{item}"


def rows_subject(partition: int, item: int | None = None) -> str:
    """Where the chunks of an answer to the work item of this sequence go; without one, how all of a partition begin."""
    return f"rows.{partition}.{'' if item is None else item}"
