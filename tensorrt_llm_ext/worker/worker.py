"""Worker: takes work items from a stream, runs them through a session, and hands the answers over.

Three threads: the intake pulls within a bound of tokens; this one packs, submits, waits and proves; the handover
publishes and then acknowledges. Answers are handed over only after a canary behind their batch came back right.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tensorrt_llm_ext.errors import ExtractionError, Refusal, RunError, SessionClosed
from tensorrt_llm_ext.results import Failure, Record
from tensorrt_llm_ext.runtime import CanaryTicket, Session, Ticket
from tensorrt_llm_ext.worker.alone import note_run_alone
from tensorrt_llm_ext.worker.broker import Broker
from tensorrt_llm_ext.worker.door import admitted
from tensorrt_llm_ext.worker.events import Events
from tensorrt_llm_ext.worker.handover import Handover
from tensorrt_llm_ext.worker.held import Held, HeldItem, budget_of, tokens_to_hold
from tensorrt_llm_ext.worker.intake import Intake
from tensorrt_llm_ext.worker.messages import Outcome
from tensorrt_llm_ext.worker.metrics import Metrics
from tensorrt_llm_ext.worker.report import WorkReport

_IDLE_S = 0.02
_MAX_REOPENED = 3  # in a row, without one proven batch between


@dataclass(frozen=True)
class WorkerSettings:
    """How one worker works; None: as the engine and the machine suggest."""

    name: str | None = None
    max_tokens_in_flight: int | None = None  # taken from the broker and not settled
    batches_per_canary: int = 4  # a canary follows so many batches, or the batch after so many seconds
    canary_s: float = 5.0
    drain_s: float = 60.0  # for handing over what is computed, once the worker is asked to stop
    leave_when_idle_s: float | None = None  # end by itself when no work came for so long


class Worker:
    """One consumer of a stream. ``reopen`` opens the engine again after a batch failed; without it that ends the worker."""

    def __init__(
        self,
        session: Session,
        broker: Broker,
        *,
        settings: WorkerSettings = WorkerSettings(),
        reopen: Callable[[], Session] | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self.name = settings.name or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}".replace(".", "-")
        self.settings = settings
        self.metrics = metrics or Metrics()
        self.state = "not joined"
        self._session = session
        self._own_session: Session | None = None
        self._broker = broker
        self._reopen = reopen
        self._events = Events(worker=self.name, stream=broker.stream)
        self._in_flight: deque[tuple[list[HeldItem] | None, Ticket | CanaryTicket]] = deque()
        self._unproven: list[tuple[HeldItem, Record | Failure]] = []
        self._since_canary = 0
        self._unproven_since = 0.0  # when the first batch after the newest canary was submitted
        self._is_one_alone = False  # the newest batch is a suspect, of which nothing else may suffer
        self._num_reopened = 0
        self._fills: list[float] = []  # a sum and a number would do; a batch is seconds of work
        self._given_back = 0

    def run(self, stop: threading.Event | None = None) -> WorkReport:
        """Join the stream and work until ``stop`` is set; then drain: what runs is answered, what waits is given back.

        Raises NotAdmitted and CanaryError at the door; later CanaryError, RunError or BrokerError, after it has given
        everything back that was not answered.
        """
        stop, start = stop or threading.Event(), time.monotonic()
        self.wanted = admitted(self._session, self._broker, self.name)
        limits = self._session.contract.limits
        num_batches = self.settings.batches_per_canary + self._session.num_slots
        self.held = Held(self.settings.max_tokens_in_flight or tokens_to_hold(self.wanted, limits, num_batches))
        self._handover = Handover(self._broker, self.wanted, self.held, self.metrics, self._events)
        self._intake = Intake(self._broker, self.wanted, self.held, self._handover.refuse, self.name, self.facts)
        self.state = "working"
        self._joined = time.monotonic()
        self._events("joined", engine=self._session.contract.engine_fingerprint(), budget=budget_of(limits))
        self._handover.start()
        self._intake.start()
        try:
            while not stop.is_set() and not self._is_idle_too_long():
                if not self._turn():
                    self.held.wait(_IDLE_S)
            self._drain()
        except BaseException as error:
            self._events("stopped", error=type(error).__name__, reason=str(error))
            raise
        finally:
            self._leave()
        return self._report(time.monotonic() - start)

    def facts(self) -> dict:
        """What this worker says about itself under its key, and as its health."""
        return {
            "healthy": self.state == "working" and self._broker.is_connected(),
            "state": self.state,
            "connected": self._broker.is_connected(),
            "engine": self._session.contract.engine_fingerprint(),
            "convention": self._session.convention,
            "tokens": int(self.metrics.value("extract_tokens_total")),
            "held_tokens": self.held.num_tokens if self.state != "not joined" else 0,
        }

    def _turn(self) -> bool:
        """One step: fill the slots, land the oldest batch; False when there is nothing to do."""
        for part in (self._intake, self._handover):
            if part.error is not None:
                raise part.error
        self._measure()
        while len(self._in_flight) < self._session.num_slots and self._submit_next():
            pass
        if self._in_flight:
            self._land()
            return True
        if self._unproven:
            self._submit_canary()
            return True
        return False

    def _submit_next(self) -> bool:
        is_late = self._since_canary and time.monotonic() - self._unproven_since > self.settings.canary_s
        if is_late or self._since_canary >= self.settings.batches_per_canary:
            self._submit_canary()
            return True
        if self._is_one_alone and self._has_unsettled():
            return False
        limits = self._session.contract.limits
        batch = self.held.take_batch(limits, partly_filled=not self._in_flight)
        if not batch:
            return False
        self._is_one_alone = batch[0].runs_alone
        if self._is_one_alone:
            if self._has_unsettled():
                self.held.put_back(batch)
                return False
            if not self._may_run_alone(batch[0]):
                return True
        try:
            ticket = self._session.submit([held.item for held in batch])
        except Refusal as refusal:
            self._blame(batch, refusal.code, refusal)
            return True
        except RunError as error:
            self._recover(batch, error)
            return True
        self._in_flight.append((batch, ticket))
        self._unproven_since = self._unproven_since if self._since_canary else time.monotonic()
        self._since_canary += 1
        fill = sum(held.num_tokens for held in batch) / budget_of(limits)
        self._fills.append(fill)
        self.metrics.batch_fill.observe(fill)
        return True

    def _has_unsettled(self) -> bool:
        """Whether anything that ran would be lost with this process."""
        return bool(self._in_flight or self._unproven or self._handover.num_open)

    def _may_run_alone(self, held: HeldItem) -> bool:
        """Whether a suspect is to run, once more; else it is refused."""
        try:
            note_run_alone(self._broker, held, self.wanted.settings.max_alone)
        except Refusal as refusal:
            self._handover.put(held, Outcome.of_refusal(refusal, held.item.request_id, held.item.work_item_id))
            return False
        return True

    def _submit_canary(self) -> None:
        try:
            self._in_flight.append((None, self._session.submit_canaries()))
        except RunError as error:
            self._recover([], error)
        self._since_canary = 0

    def _land(self) -> None:
        """Wait for the oldest batch; a canary that passed proves all answers that landed before it."""
        batch, ticket = self._in_flight.popleft()
        start = time.monotonic()
        try:
            answers = ticket.wait()
        except RunError as error:
            self._recover(batch or [], error)
            return
        finally:
            self.metrics.doorbell_wait_s.observe(time.monotonic() - start)
        if batch is not None:
            by_id = {answer.request_id: answer for answer in answers}
            self._unproven += [(held, by_id[held.item.request_id]) for held in batch]
            return
        proven, self._unproven, self._num_reopened = self._unproven, [], 0
        for held, answer in proven:
            self._handover.put(held, Outcome.of_failure(answer) if isinstance(answer, Failure) else answer)

    def _recover(self, failed: list[HeldItem], error: RunError) -> None:
        """Open the engine again; everything that has no proven answer runs again, the batch that failed one by one."""
        others = [held for held, _ in self._unproven]
        others += [held for batch, _ in self._in_flight for held in batch or []]
        self._in_flight.clear()
        self._unproven, self._since_canary = [], 0
        self._num_reopened += 1
        self._events("engine_failed", error=type(error).__name__, reason=str(error), num_items=len(failed))
        self.held.put_back(others)
        self._blame(failed, "engine_failed", error, is_to_blame=not isinstance(error, SessionClosed))
        if self._reopen is None or self._num_reopened > _MAX_REOPENED:
            try:
                raise error
            finally:
                del error  # else the error and this frame keep each other, and a ticket with its slot
        self._session.close()
        self._session = self._own_session = self._reopen()
        self.metrics.reopened.inc()
        admitted(self._session, self._broker, self.name)

    def _blame(self, batch: list[HeldItem], code: str, error: ExtractionError, *, is_to_blame: bool = True) -> None:
        """An item that failed alone is answered with the reason; those of a larger batch run again, each alone."""
        if is_to_blame and len(batch) == 1:
            held = batch[0]
            said = (error.what, error.expected, error.found, error.fix)
            self._handover.put(held, Outcome("failed", held.item.request_id, held.item.work_item_id, code, *said))
            return
        for held in batch:
            held.runs_alone = held.runs_alone or is_to_blame
        self.held.put_back(batch)

    def _drain(self) -> None:
        """Answer what runs, give back what waits, and wait until the broker has all answers."""
        self.state = "draining"
        self._events("draining", held_tokens=self.held.num_tokens)
        self._intake.stop_pulling()
        self._return("draining", waiting_only=True)
        while self._in_flight or self._unproven:
            if self._in_flight:
                self._land()
            else:
                self._submit_canary()
            self._return("draining", waiting_only=True)  # what ``_recover`` has put back
        self._handover.finish(self.settings.drain_s)

    def _leave(self) -> None:
        """Give back whatever is still held and end the threads; works after an error, too."""
        self.state = "left"
        self._in_flight.clear()
        for part in (lambda: self._handover.finish(self.settings.drain_s), self._intake.close, lambda: self._return("left", waiting_only=False)):
            try:
                part()
            except ExtractionError as error:  # the broker is away: its deadlines give the items back
                self._events("not_given_back", reason=error.what)
        if self._own_session is not None:
            self._own_session.close()
        self._events("left", **{name: value for name, value in self._report(0).to_dict().items() if name not in ("name", "seconds")})

    def _return(self, reason: str, *, waiting_only: bool) -> None:
        deliveries = self.held.give_back(waiting_only=waiting_only)
        self._given_back += len(deliveries)
        self.metrics.given_back.labels(reason).inc(len(deliveries))
        self._broker.settle(deliveries, "give_back")

    def _is_idle_too_long(self) -> bool:
        limit = self.settings.leave_when_idle_s
        return limit is not None and not len(self.held) and time.monotonic() - self._intake.last_work > limit

    def _measure(self) -> None:
        self.metrics.waiting_tokens.set(self.held.waiting_tokens)
        self.metrics.tokens_in_flight.set(self.held.num_tokens)
        self.metrics.connected.set(self._broker.is_connected())

    def _report(self, seconds: float) -> WorkReport:
        handover, fills = self._handover, self._fills
        fill = sum(fills) / len(fills) if fills else None
        return WorkReport(
            self.name,
            handover.num_records,
            handover.num_outcomes,
            self._given_back,
            handover.num_tokens,
            len(fills),
            fill,
            seconds,
            handover.last_persisted - self._joined,
        )
