"""Storing: the loop of one partition's writer: lease, pull, commit, acknowledge; from the start when the lease is lost."""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tensorrt_llm_ext.errors import ExtractionError, InputError, LeaseLost, StoreError
from tensorrt_llm_ext.store import Fence
from tensorrt_llm_ext.worker.broker import Broker, Delivery
from tensorrt_llm_ext.worker.door import wanted_by
from tensorrt_llm_ext.worker.events import Events
from tensorrt_llm_ext.worker.lease import Lease
from tensorrt_llm_ext.worker.messages import Answer, answer_from_delivery
from tensorrt_llm_ext.worker.metrics import Metrics
from tensorrt_llm_ext.worker.partition import Partition, dataset_folder
from tensorrt_llm_ext.worker.wanted import check_taps

_IDLE_S = 0.05
_VECTORS_COMMIT_S = 1.0
_VECTORS_COMMIT_BYTES = 64 << 20


@dataclass(frozen=True)
class StoreSettings:
    """How a writer commits: after so many rows or bytes, or so long after the first of them came; None: as the taps
    suggest. A commit of states that is smaller than half a shard writes its last shard again."""

    max_rows: int = 1024
    max_bytes: int | None = None  # vectors: 64 MiB; states: half a shard
    commit_s: float | None = None  # vectors: 1 s; states: as late as the broker allows, a quarter of its ack_wait_s
    shard_bytes: int | None = None  # of a new dataset of states; None: the size that a dataset has, or 512 MiB
    name: str | None = None
    leave_when_idle_s: float | None = None  # end by itself when no answer came for so long


@dataclass
class _Gathered:
    """The messages of one commit."""

    answers: list[Answer] = field(default_factory=list)
    readable: list[Delivery] = field(default_factory=list)  # those of the answers
    unreadable: list[Delivery] = field(default_factory=list)

    @property
    def num_messages(self) -> int:
        return len(self.readable) + len(self.unreadable)

    @property
    def num_bytes(self) -> int:
        return sum(answer.num_bytes for answer in self.answers)


def facts_key(partition: int) -> str:
    """The key of what a partition's writer has done."""
    return f"store.{partition}"


class StoreWriter:
    """Writes one partition of a stream into ``out``. Several may run: one holds the lease, the others stand by."""

    def __init__(
        self,
        broker: Broker,
        out: Path,
        partition: int,
        *,
        settings: StoreSettings = StoreSettings(),
        metrics: Metrics | None = None,
    ) -> None:
        self.name = settings.name or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self.partition = partition
        self.settings = settings
        self.metrics = metrics or Metrics()
        self.state = "standing by"
        self.counts: Counter[str] = Counter()  # settled by this writer
        self._broker = broker
        self._out = Path(out)
        self._events = Events(writer=self.name, stream=broker.stream, partition=partition)
        self._last_answer = time.monotonic()
        self.wanted = wanted_by(broker)
        check_taps(self.wanted)
        if not 0 <= partition < self.wanted.settings.num_partitions:
            raise InputError(
                "the stream has no such partition",
                expected=f"0 to {self.wanted.settings.num_partitions - 1}",
                found=partition,
                fix="correct --partition",
            )

    def run(self, stop: threading.Event | None = None) -> Counter[str]:
        """Store until ``stop`` is set: take the lease, commit what comes, stand by again when another took over.

        Returns what it has settled: stored, refused, failed. Raises StoreError, BrokerError.
        """
        stop = stop or threading.Event()
        while not stop.is_set() and not self._is_idle_too_long():
            self.state = "standing by"
            lease = Lease.take(self._broker, f"part-{self.partition}", self.name, stop)
            if lease is None:
                break
            try:
                self._hold(lease, stop)
            except LeaseLost as lost:
                self._events("lease_lost", reason=lost.what, found=lost.found)
        self.state = "left"
        self._events("left", **self.counts)
        return self.counts

    def facts(self) -> dict:
        """This writer's health."""
        is_connected = self._broker.is_connected()
        return {"healthy": is_connected and self.state != "left", "state": self.state, "connected": is_connected, **self.counts}

    def _hold(self, lease: Lease, stop: threading.Event) -> None:
        """Write for as long as the lease is held; release it at the end."""
        self._events("lease_taken", token=lease.token)
        fence = Fence(dataset_folder(self._out, self.partition).with_suffix(".fence"), lease.token)
        partition = Partition(
            self._broker,
            self.wanted,
            self._out,
            self.partition,
            fence,
            shard_bytes=self.settings.shard_bytes,
            keep_lease=lambda: lease.renew_when_due(self.wanted.settings.lease_s),
        )
        self.state, self._last_answer = "storing", time.monotonic()
        try:
            self._publish_facts(partition)
            sweep_at = float("-inf")
            while not stop.is_set() and not self._is_idle_too_long():
                if time.monotonic() >= sweep_at:
                    self._sweep(partition)
                    sweep_at = time.monotonic() + self.wanted.settings.ack_wait_s
                self._commit(partition, lease, self._gathered(partition, lease, stop, sweep_at))
            lease.renew()
            self._sweep(partition)
            partition.seal()
            lease.release()
        finally:
            partition.close()

    def _sweep(self, partition: Partition) -> None:
        if num_items := partition.sweep():
            self._events("swept", num_items=num_items)

    def _gathered(self, partition: Partition, lease: Lease, stop: threading.Event, sweep_at: float) -> _Gathered:
        """Answers for one commit; none when none comes before ``sweep_at``: workers may be waiting for what a sweep removes."""
        settings, gathered, first = self.settings, _Gathered(), 0.0
        max_bytes = settings.max_bytes or partition.commit_bytes or _VECTORS_COMMIT_BYTES
        latest_s = self.wanted.settings.ack_wait_s / 4  # committed before they come again
        commit_s = min(latest_s if partition.commit_bytes else _VECTORS_COMMIT_S, settings.commit_s or latest_s)
        while not stop.is_set():
            lease.renew_when_due(self.wanted.settings.lease_s)
            room = max(1, (max_bytes - gathered.num_bytes) // self.wanted.max_answer_bytes)
            some = self._broker.pull_results(self.partition, min(room, settings.max_rows - gathered.num_messages))
            self._read(some, gathered)
            now = time.monotonic()
            first = first or now if gathered.num_messages else 0.0
            if some:
                self._last_answer = now
            if gathered.num_messages >= settings.max_rows or gathered.num_bytes >= max_bytes:
                break
            if first and now - first > commit_s or not first and (now >= sweep_at or self._is_idle_too_long()):
                break
            if not some:
                stop.wait(_IDLE_S)
        return gathered

    def _commit(self, partition: Partition, lease: Lease, gathered: _Gathered) -> None:
        """Settle the answers, then acknowledge them; before that nothing may be forgotten by the broker."""
        if not gathered.num_messages:
            return
        start = time.monotonic()
        try:
            lease.renew()
            done = partition.commit(gathered.answers)
        except ExtractionError:
            with suppress(ExtractionError):  # then they come again at their deadline
                self._broker.settle(gathered.readable + gathered.unreadable, "give_back")
            raise
        for stray in partition.strays:
            self._events("no_work_item", sequence=stray.sequence, request_id=stray.content.request_id)
            self.metrics.refusals.labels("no_work_item").inc()
        for answer in partition.passed_over:
            self._events("passed_over", sequence=answer.sequence, request_id=answer.content.request_id)
        self._publish_facts(partition)
        self._broker.settle(gathered.readable, "ack")
        self._broker.settle(gathered.unreadable, "terminate")
        self.counts += done
        self.metrics.commits.inc()
        for kind, number in done.items():
            self.metrics.items.labels(kind).inc(number)
        self._events("committed", num_answers=len(gathered.answers), seconds=round(time.monotonic() - start, 3), **done)

    def _read(self, deliveries: Sequence[Delivery], gathered: _Gathered) -> None:
        for delivery in deliveries:
            try:
                gathered.answers.append(answer_from_delivery(delivery))
                gathered.readable.append(delivery)
            except StoreError as error:  # nothing says which work item it is about: only the log can name it
                self._events("unreadable", sequence=delivery.sequence, found=error.found)
                self.metrics.refusals.labels("unreadable").inc()
                gathered.unreadable.append(delivery)

    def _publish_facts(self, partition: Partition) -> None:
        self._broker.put("facts", facts_key(self.partition), json.dumps({"writer": self.name, **partition.facts()}).encode())

    def _is_idle_too_long(self) -> bool:
        limit = self.settings.leave_when_idle_s
        return limit is not None and time.monotonic() - self._last_answer > limit
