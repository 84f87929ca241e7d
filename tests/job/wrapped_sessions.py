"""A session with something between it and the job: an event log, a planted drift, a batch that fails, a wrong answer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tensorrt_llm_ext.errors import BackendError, CanaryError
from tensorrt_llm_ext.results import Failure, rows_hash


class Wrapped:
    """A real session, watched and changed.

    ``events`` collects submissions and landings; from batch ``drift_from`` on every value is off and canaries fail;
    batch ``failing_batch`` raises; from batch ``from_batch`` on the answers carry ``fault``.
    """

    def __init__(self, session, *, events=None, drift_from=None, failing_batch=None, fault=None, from_batch=0):
        self._session = session
        self.events = [] if events is None else events
        self.drift_from = drift_from
        self.failing_batch = failing_batch
        self.fault = fault
        self.from_batch = from_batch
        self.num_batches = 0

    def __getattr__(self, name):
        return getattr(self._session, name)

    def submit(self, items):
        number, self.num_batches = self.num_batches, self.num_batches + 1
        ids = tuple(item.request_id for item in items)
        self.events.append(("submit", ids))
        return _Ticket(self, self._session.submit(items), ids, number)

    def submit_canaries(self):
        self.events.append(("canaries", self.num_batches))
        return _CanaryTicket(self, self._session.submit_canaries(), self.num_batches)


@dataclass
class _Ticket:
    wrapped: Wrapped
    ticket: object
    ids: tuple[str, ...]
    number: int

    def wait(self):
        answers = self.ticket.wait()
        if self.number == self.wrapped.failing_batch:
            raise BackendError("the engine failed", expected="rows", found="an error", fix="look at the engine")
        self.wrapped.events.append(("landed", self.ids))
        if self.wrapped.drift_from is not None and self.number >= self.wrapped.drift_from:
            answers = [drifted(answer) for answer in answers]
        if self.number >= self.wrapped.from_batch:
            answers = {None: lambda all: all, **FAULTS}[self.wrapped.fault](answers)
        return answers


@dataclass
class _CanaryTicket:
    wrapped: Wrapped
    ticket: object
    num_batches_before: int

    def wait(self):
        distances = self.ticket.wait()
        self.wrapped.events.append(("landed", self.num_batches_before))
        drift_from = self.wrapped.drift_from
        if drift_from is not None and self.num_batches_before > drift_from:
            raise CanaryError("a canary is off", expected="1", found="2", fix="do not use this engine")
        return distances


def changed(answer, change):
    """A record whose rows are changed and whose hash says so: nothing but a canary can tell."""
    if isinstance(answer, Failure):
        return answer
    states = []
    for state in answer.states:
        rows = change(state.rows.copy())
        states.append(replace(state, rows=rows, payload_hash=rows_hash(rows)))
    return replace(answer, states=tuple(states))


def drifted(answer):
    return changed(answer, lambda rows: rows + np.float32(0.5))


def with_a_changed_bit(answer):
    if isinstance(answer, Failure):
        return answer
    rows = answer.states[0].rows.copy()
    rows.view(np.uint32)[0, 0] ^= 1
    return replace(answer, states=(replace(answer.states[0], rows=rows), *answer.states[1:]))


FAULTS = {
    "other request": lambda answers: [replace(answer, request_id="r999") for answer in answers],
    "missing answer": lambda answers: answers[1:],
    "answer twice": lambda answers: [*answers, answers[0]],
    "changed bit": lambda answers: [with_a_changed_bit(answer) for answer in answers],
}
