"""Handover: a thread that publishes answers and settles a work item only once the broker has persisted its answer."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tensorrt_llm_ext.results import Record
from tensorrt_llm_ext.worker.broker import Broker, Delivery, Message, NotPublished
from tensorrt_llm_ext.worker.events import Events
from tensorrt_llm_ext.worker.held import Held, HeldItem
from tensorrt_llm_ext.worker.messages import Outcome, message_from_answer
from tensorrt_llm_ext.worker.metrics import Metrics
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

    def _next(self) -> list[tuple[_Answered, Message]] | None:
        """The next answers, encoded, a bounded number and size of them."""
        some, num_bytes = [], 0
        answered = self._answers.get()
        while answered is not None:
            message = message_from_answer(answered.content, answered.delivery.sequence, self._wanted)
            some.append((answered, message))
            num_bytes += len(message.body)
            if len(some) == _MESSAGES_AT_ONCE or num_bytes > _BYTES_AT_ONCE or self._answers.empty():
                return some
            answered = self._answers.get()
        if some:
            self._answers.put(None)
        return some or None

    def _persist(self, some: list[tuple[_Answered, Message]]) -> None:
        """Publish until the broker has all of them; what is too large becomes a refusal, a full stream is waited for."""
        pause_s = _FIRST_PAUSE_S
        while some and not self._is_given_up.is_set():
            outcomes = self._broker.publish([message for _, message in some])
            persisted = [pair[0] for pair, outcome in zip(some, outcomes, strict=True) if not isinstance(outcome, NotPublished)]
            self._settle(persisted)
            full = [pair for pair, out in zip(some, outcomes, strict=True) if isinstance(out, NotPublished) and out.code == "full"]
            large = [(pair[0], out) for pair, out in zip(some, outcomes, strict=True) if _is_too_large(out)]
            some = full + [self._without_rows(answered, outcome) for answered, outcome in large]
            if full:
                self._events("back_pressure", num_answers=len(full), pause_s=pause_s)
                self._metrics.backpressure_s.inc(pause_s)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _without_rows(self, answered: _Answered, outcome: NotPublished) -> tuple[_Answered, Message]:
        """A record that no message can carry is refused with the numbers."""
        record = answered.content
        refused = Outcome(
            "refused",
            record.request_id,
            getattr(record, "work_item_id", None),
            "result_too_large",
            "the record is larger than the stream's messages",
            f"at most {self._wanted.settings.max_message_bytes:,} bytes",
            outcome.found,
            "tap fewer layers or rows, or make a stream with a larger max_message_bytes",
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


def _is_too_large(outcome: object) -> bool:
    return isinstance(outcome, NotPublished) and outcome.code != "full"


def _newest(answered: _Answered) -> Delivery:
    return answered.held.delivery if answered.held is not None else answered.delivery
