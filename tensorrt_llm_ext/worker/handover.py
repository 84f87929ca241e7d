"""Handover: a thread that publishes answers and settles a work item only once the broker has persisted its answer.

An answer that no message can carry goes among the stream's rows first, and a reference to it is published.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tensorrt_llm_ext.errors import BrokerError
from tensorrt_llm_ext.results import Record
from tensorrt_llm_ext.worker.broker import Broker, Delivery, Message, NotPublished
from tensorrt_llm_ext.worker.events import Events
from tensorrt_llm_ext.worker.held import Held, HeldItem
from tensorrt_llm_ext.worker.messages import Outcome, message_from_answer, partition_of_answer
from tensorrt_llm_ext.worker.metrics import Metrics
from tensorrt_llm_ext.worker.orphans import were_asked_about
from tensorrt_llm_ext.worker.reference import put_rows, reference_to
from tensorrt_llm_ext.worker.wanted import Wanted

_MESSAGES_AT_ONCE = 128
_BYTES_AT_ONCE = 8 << 20
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0


@dataclass(eq=False)
class _Answered:
    """An answer on its way: to a held item, or to a delivery that was refused and never held."""

    delivery: Delivery
    held: HeldItem | None
    content: Record | Outcome
    chunks: tuple[int, ...] = ()  # where its rows lie, once they were put


_Sent = tuple[_Answered, Message]


class Handover:
    """Takes answers from any thread. An error of the broker ends it and is in ``error``."""

    def __init__(self, broker: Broker, wanted: Wanted, held: Held, metrics: Metrics, events: Events) -> None:
        self.error: BaseException | None = None
        self.num_tokens = 0  # of records the broker has
        self.num_records = 0
        self.num_outcomes = 0
        self.last_persisted = time.monotonic()
        self._broker = broker
        self._wanted = wanted
        self._held = held
        self._metrics = metrics
        self._events = events
        self._answers: queue.SimpleQueue[_Answered | None] = queue.SimpleQueue()
        self._num_open = 0
        self._changed = threading.Condition()
        self._is_given_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="handover", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, held: HeldItem, content: Record | Outcome) -> None:
        """Hand over the answer to a held item."""
        self._put(_Answered(held.delivery, held, content))

    def refuse(self, delivery: Delivery, outcome: Outcome) -> None:
        """Hand over why a delivery is not served."""
        self._put(_Answered(delivery, None, outcome))

    def finish(self, timeout_s: float) -> bool:
        """Wait until everything handed over is persisted and settled; False when it is not in time. Ends the thread."""
        with self._changed:
            done = self._changed.wait_for(lambda: not self._num_open or self.error is not None, timeout_s)
        self._is_given_up.set()
        self._answers.put(None)
        self._thread.join()
        return done and self.error is None

    @property
    def num_open(self) -> int:
        """Answers that are not persisted yet."""
        return self._num_open

    def _put(self, answered: _Answered) -> None:
        with self._changed:
            self._num_open += 1
        self._answers.put(answered)

    def _run(self) -> None:
        try:
            while (some := self._next()) is not None:
                self._persist(some)
        except BaseException as error:  # handed to the worker, whatever it is
            with self._changed:
                self.error = error
                self._changed.notify_all()

    def _next(self) -> list[_Sent] | None:
        """The next answers, encoded, a bounded number and size of them."""
        some, num_bytes = [], 0
        answered = self._answers.get()
        while answered is not None:
            some.append(self._encoded(answered))
            num_bytes += len(some[-1][1].body)
            if len(some) == _MESSAGES_AT_ONCE or num_bytes > _BYTES_AT_ONCE or self._answers.empty():
                return some
            answered = self._answers.get()
        if some:
            self._answers.put(None)
        return some or None

    def _encoded(self, answered: _Answered) -> _Sent:
        return answered, message_from_answer(answered.content, answered.delivery.sequence, self._wanted)

    def _persist(self, some: list[_Sent]) -> None:
        """Publish until the broker has all of them; a full stream is waited for, what is too large becomes a refusal.

        An answer whose rows were asked about meanwhile is not settled: its rows are put again (``orphans`` says why).
        """
        pause_s = _FIRST_PAUSE_S
        while some and not self._is_given_up.is_set():
            ready, full = self._with_rows_put(some)
            outcomes = self._broker.publish([message for _, message in ready])
            persisted = [pair[0] for pair, outcome in zip(ready, outcomes, strict=True) if not isinstance(outcome, NotPublished)]
            again = [one for one in persisted if one.chunks and were_asked_about(self._broker, one.delivery.sequence, one.chunks)]
            self._settle([answered for answered in persisted if answered not in again])
            for answered in again:
                self._events("rows_put_again", request_id=answered.content.request_id, sequence=answered.delivery.sequence)
            refused = [(pair, out) for pair, out in zip(ready, outcomes, strict=True) if isinstance(out, NotPublished)]
            full = [pair for pair, out in refused if out.code == "full"] + full
            some = full + [self._refused(answered, out) for (answered, _), out in refused if out.code != "full"]
            some += [self._encoded(answered) for answered in again]
            if full:
                self._events("back_pressure", num_answers=len(full), pause_s=pause_s)
                self._metrics.backpressure_s.inc(pause_s)
                time.sleep(pause_s)
                pause_s = _FIRST_PAUSE_S if persisted else min(2 * pause_s, _LONGEST_PAUSE_S)

    def _with_rows_put(self, some: list[_Sent]) -> tuple[list[_Sent], list[_Sent]]:
        """What can be published, references instead of what no message can carry; and what waits for room among the rows."""
        limit = min(self._wanted.settings.max_message_bytes, self._broker.max_body_bytes())
        ready: list[_Sent] = []
        for place, (answered, message) in enumerate(some):
            record, sequence, payload = answered.content, answered.delivery.sequence, message.body
            if len(payload) <= limit or not isinstance(record, Record):
                ready.append((answered, message))
                continue
            if len(payload) > self._most_rows_bytes:
                ready.append(self._refused(answered, self._no_room(payload)))
                continue
            partition = partition_of_answer(record.request_id, sequence, self._wanted)
            chunks = put_rows(self._broker, payload, partition, sequence, max_chunk_bytes=self._chunk_bytes)
            if isinstance(chunks, NotPublished):
                return ready, some[place:]
            answered.chunks = chunks
            ready.append((answered, message_from_answer(reference_to(record, payload, chunks), sequence, self._wanted)))
        return ready, []

    @property
    def _chunk_bytes(self) -> int:
        return min(self._wanted.settings.chunk_bytes, self._broker.max_body_bytes())

    @property
    def _most_rows_bytes(self) -> int:
        """The largest answer that goes among the rows: it takes half of their room, so two find some in time."""
        return max(1, self._wanted.settings.max_chunks // 2) * self._chunk_bytes

    def _no_room(self, payload: bytes) -> NotPublished:
        expected = f"at most {self._most_rows_bytes:,} bytes: half of the room for rows"
        fix = "tap fewer layers, send shorter items, or make a stream with more room for rows (max_rows_bytes)"
        return NotPublished("too_large", f"{len(payload):,} bytes", expected=expected, fix=fix)

    def _refused(self, answered: _Answered, why: NotPublished) -> tuple[_Answered, Message]:
        """A record for which the broker never has room is refused with the numbers."""
        record = answered.content
        if not isinstance(record, Record):
            what = "the reason why a work item has no answer does not fit into a message"
            raise BrokerError(what, expected=why.expected, found=why.found, fix=why.fix)
        refused = Outcome(
            "refused",
            record.request_id,
            record.work_item_id,
            "result_too_large",
            "the answer is larger than what the broker carries",
            why.expected,
            why.found,
            why.fix,
        )
        answered = _Answered(answered.delivery, answered.held, refused)
        return answered, message_from_answer(refused, answered.delivery.sequence, self._wanted)

    def _settle(self, persisted: Sequence[_Answered]) -> None:
        """Only here is a work item acknowledged."""
        records = [answered for answered in persisted if isinstance(answered.content, Record)]
        others = [answered for answered in persisted if not isinstance(answered.content, Record)]
        self._broker.settle([_newest(answered) for answered in records], "ack")
        self._broker.settle([_newest(answered) for answered in others], "terminate")
        for answered in others:
            outcome = answered.content
            self._events(outcome.kind, request_id=outcome.request_id, code=outcome.code, found=outcome.found or outcome.what)
            self._metrics.refusals.labels(outcome.code).inc()
            self._metrics.items.labels(outcome.kind).inc()
        num_tokens = sum(answered.content.num_tokens for answered in records)
        self._metrics.items.labels("answered").inc(len(records))
        self._metrics.tokens.inc(num_tokens)
        self._held.release(answered.held for answered in persisted if answered.held is not None)
        with self._changed:
            self.last_persisted = time.monotonic()
            self.num_tokens += num_tokens
            self.num_records += len(records)
            self.num_outcomes += len(others)
            self._num_open -= len(persisted)
            self._changed.notify_all()


def _newest(answered: _Answered) -> Delivery:
    return answered.held.delivery if answered.held is not None else answered.delivery
