"""A broker in this process, for tests and small jobs: the same rules as JetStream's, and every message really encoded."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tensorrt_llm_ext.errors import BrokerError
from tensorrt_llm_ext.worker.broker import (
    FULL,
    STREAM_TOO_SMALL,
    Bucket,
    Counts,
    Delivery,
    Entry,
    Message,
    NotPublished,
    Part,
    Published,
    Settling,
    check_stream_name,
    reference_subject,
    rows_subject,
)
from tensorrt_llm_ext.worker.wanted import LANES, Lane, Wanted


@dataclass
class _Kept:
    """A message as it lies: bytes, and what became of its deliveries."""

    subject: str
    wire: bytes  # headers as JSON, a line feed, the body
    num_delivered: int = 0
    due: float = 0.0  # when it may be handed out, again
    is_settled: bool = False

    def delivery(self, sequence: int) -> Delivery:
        headers, _, body = self.wire.partition(b"\n")
        reply = f"{self.subject} {sequence} {self.num_delivered}"
        return Delivery(self.subject, body, json.loads(headers), sequence, self.num_delivered, reply)


@dataclass
class _Stream:
    kept: dict[int, _Kept] = field(default_factory=dict)
    last_sequence: int = 0
    message_ids: dict[str, int] = field(default_factory=dict)


class InProcessBroker:
    """One stream of work in memory. Whoever shares the object shares the stream."""

    def __init__(self, stream: str = "work") -> None:
        self.stream = check_stream_name(stream)
        self._lock = threading.RLock()
        self._wanted: Wanted | None = None
        self._streams = {part: _Stream() for part in ("work", "results", "rows")}
        self._revision = 0
        self._entries: dict[tuple[Bucket, str], tuple[Entry, float]] = {}

    def create(self, wanted: Wanted) -> None:
        with self._lock:
            self._wanted = self._wanted or wanted

    def publish(self, messages: Sequence[Message]) -> list[Published | NotPublished]:
        with self._lock:
            return [self._publish(message) for message in messages]

    def _publish(self, message: Message) -> Published | NotPublished:
        part = message.subject.partition(".")[0]
        stream, wanted = self._streams[part], self._made()
        wire = json.dumps(dict(message.headers)).encode() + b"\n" + message.body
        if len(message.body) > (limit := wanted.settings.max_message_bytes):
            found, expected = f"{len(message.body):,} bytes", f"at most {limit:,} bytes: the stream's max_message_bytes"
            return NotPublished("too_large", found, expected=expected, fix=STREAM_TOO_SMALL)
        if message.message_id is not None and message.message_id in stream.message_ids:
            return Published(stream.message_ids[message.message_id], is_duplicate=True)
        if message.is_first:
            (taken,) = self.find_work([message.subject])
            if taken is not None:
                return NotPublished("taken", f"sequence {taken}", taken)
        most = {"results": wanted.max_results, "rows": wanted.settings.max_chunks}.get(part)
        if most is not None and len(stream.kept) >= most:
            return NotPublished("full", f"{most:,} messages wait for the store", **FULL)
        stream.last_sequence += 1
        stream.kept[stream.last_sequence] = _Kept(message.subject, wire)
        if message.message_id is not None:
            stream.message_ids[message.message_id] = stream.last_sequence
        return Published(stream.last_sequence)

    def pull_work(self, wants: Mapping[Lane, int]) -> dict[Lane, list[Delivery]]:
        return {lane: self._pull("work", f"work.{lane.name}.", number) for lane, number in wants.items()}

    def pull_results(self, partition: int, num_messages: int) -> list[Delivery]:
        return self._pull("results", f"results.{partition}.", num_messages)

    def _pull(self, part: str, prefix: str, num_messages: int) -> list[Delivery]:
        with self._lock:
            deliveries, now = [], time.monotonic()
            for sequence, kept in self._streams[part].kept.items():
                if len(deliveries) == num_messages:
                    break
                if kept.subject.startswith(prefix) and not kept.is_settled and kept.due <= now:
                    kept.num_delivered, kept.due = kept.num_delivered + 1, now + self._made().settings.ack_wait_s
                    deliveries.append(kept.delivery(sequence))
            return deliveries

    def settle(self, deliveries: Sequence[Delivery], how: Settling) -> None:
        with self._lock:
            for delivery in deliveries:
                part = delivery.subject.partition(".")[0]
                kept = self._streams[part].kept.get(delivery.sequence)
                if kept is None:
                    continue
                if how in ("ack", "terminate"):
                    kept.is_settled = True
                    if part == "results":
                        del self._streams[part].kept[delivery.sequence]
                elif kept.num_delivered == delivery.num_delivered:  # else it is somebody else's by now
                    kept.due = 0.0 if how == "give_back" else time.monotonic() + self._made().settings.ack_wait_s

    def max_body_bytes(self) -> int:
        return self._made().settings.max_message_bytes

    def read(self, part: Part, sequences: Sequence[int]) -> list[bytes | None]:
        with self._lock:
            kept = self._streams[part].kept
            return [kept[number].wire.partition(b"\n")[2] if number in kept else None for number in sequences]

    def find_work(self, subjects: Sequence[str]) -> list[int | None]:
        with self._lock:
            there = {kept.subject: number for number, kept in self._streams["work"].kept.items()}
            return [there.get(subject) for subject in subjects]

    def used_lanes(self) -> set[Lane]:
        with self._lock:
            used = {kept.subject.rpartition(".")[0] for kept in self._streams["work"].kept.values()}
            return {lane for lane in LANES if f"work.{lane.name}" in used}

    def items_with_rows(self, partition: int) -> tuple[list[int], int]:
        with self._lock:
            prefix, rows = rows_subject(partition), self._streams["rows"]
            items = {one.subject.removeprefix(prefix) for one in rows.kept.values() if one.subject.startswith(prefix)}
            return sorted(int(item) for item in items if item.isdecimal()), rows.last_sequence

    def items_referred_to(self, partition: int, items: Sequence[int]) -> set[int]:
        with self._lock:
            subjects = {kept.subject for kept in self._streams["results"].kept.values()}
            return {item for item in items if reference_subject(partition, item) in subjects}

    def remove_chunks(self, sequences: Sequence[int]) -> None:
        with self._lock:
            for sequence in sequences:
                self._streams["rows"].kept.pop(sequence, None)

    def remove_rows(self, partition: int, items: Sequence[int], *, through: int | None = None) -> None:
        with self._lock:
            rows, subjects = self._streams["rows"].kept, {rows_subject(partition, item) for item in items}
            for sequence in [sequence for sequence, kept in rows.items() if kept.subject in subjects]:
                if through is None or sequence <= through:
                    del rows[sequence]

    def get(self, bucket: Bucket, key: str) -> Entry | None:
        with self._lock:
            entry, until = self._entries.get((bucket, key), (None, 0.0))
            return entry if until > time.monotonic() else None

    def put(self, bucket: Bucket, key: str, value: bytes, *, revision: int | None = None) -> int | None:
        with self._lock:
            entry = self.get(bucket, key)
            if revision is not None and revision != (entry.revision if entry else 0):
                return None
            lease_s = self._made().settings.lease_s
            self._revision += 1
            until = time.monotonic() + lease_s if bucket == "leases" else float("inf")
            self._entries[bucket, key] = Entry(bytes(value), self._revision), until
            return self._revision

    def delete(self, bucket: Bucket, key: str, *, revision: int) -> None:
        with self._lock:
            entry = self.get(bucket, key)
            if entry is not None and entry.revision == revision:
                del self._entries[bucket, key]

    def keys(self, bucket: Bucket) -> list[str]:
        with self._lock:
            return sorted(key for place, key in self._entries if place == bucket and self.get(bucket, key))

    def counts(self) -> Counts:
        with self._lock:
            now, waiting, in_work = time.monotonic(), {}, {}
            for lane in LANES:
                prefix = f"work.{lane.name}."
                kept = [k for k in self._streams["work"].kept.values() if k.subject.startswith(prefix) and not k.is_settled]
                waiting[lane.name] = sum(k.due <= now for k in kept)
                in_work[lane.name] = len(kept) - waiting[lane.name]
            num_results = len(self._streams["results"].kept)
            num_bytes = self._num_bytes("results"), self._num_bytes("rows")
            return Counts(len(self._streams["work"].kept), waiting, in_work, num_results, *num_bytes)

    def is_connected(self) -> bool:
        return True

    def close(self) -> None:
        """Nothing to let go of: the stream lives as long as the object."""

    def _num_bytes(self, part: str) -> int:
        return sum(len(kept.wire) for kept in self._streams[part].kept.values())

    def _made(self) -> Wanted:
        if self._wanted is None:
            raise BrokerError(
                f"the broker has no stream '{self.stream}'",
                expected="a stream that was made",
                found="none",
                fix="submit the first work items",
            )
        return self._wanted
