"""Writer: takes answers off the compute's path, in a thread of its own, and commits a window when it is told to."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tensorrt_llm_ext.errors import ExtractionError, LineageError
from tensorrt_llm_ext.inputs import AcceptedRow
from tensorrt_llm_ext.job.ledgers import FailedLedger
from tensorrt_llm_ext.job.windows import Window
from tensorrt_llm_ext.results import Failure, Record, Records, WorkItem
from tensorrt_llm_ext.store import Store
from tensorrt_llm_ext.taps import Tap


@dataclass(frozen=True)
class _Answers:
    rows: Sequence[AcceptedRow]  # one batch
    answers: Sequence[Record | Failure]


@dataclass(frozen=True)
class _Commit:
    window: Window


class Writer:
    """Feeds the store from a bounded queue, and in the end has it flush what was committed.

    A context manager. An error of the store ends the writing; it comes out of the next ``put`` or ``commit``, and what
    was sent after it is dropped, so that the sender never waits for a writer that is gone.
    """

    def __init__(self, store: Store, failed: FailedLedger, depth: int) -> None:
        self._store = store
        self._taps = store.header.contract.taps
        self._failed = failed
        self._failures: list[tuple[AcceptedRow, str, str]] = []  # of the window that is not committed yet
        self._error: BaseException | None = None
        self._messages: queue.Queue[_Answers | _Commit | None] = queue.Queue(depth)
        self._thread = threading.Thread(target=self._write, name="write")
        self._thread.start()

    def put(self, rows: Sequence[AcceptedRow], answers: Sequence[Record | Failure]) -> None:
        """Hand over a batch's answers; waits while the queue is full. Raises the error that ended the writing."""
        self._send(_Answers(rows, answers))

    def commit(self, window: Window) -> None:
        """Have everything put so far committed: it is all of ``window``, and a canary behind it has passed."""
        self._send(_Commit(window))

    def finish(self) -> ExtractionError | None:
        """Wait until everything handed over is done; return the error that ended the writing. Idempotent."""
        if self._thread.is_alive():
            self._messages.put(None)
            self._thread.join()
        if self._error is not None and not isinstance(self._error, ExtractionError):
            raise self._error
        return self._error

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *error: object) -> None:
        if self._thread.is_alive():
            self._messages.put(None)
            self._thread.join()

    def _send(self, message: _Answers | _Commit) -> None:
        if self._error is not None:
            raise self._error
        self._messages.put(message)

    def _write(self) -> None:
        while (message := self._messages.get()) is not None:
            if self._error is not None:
                continue
            try:
                self._take(message) if isinstance(message, _Answers) else self._settle(message.window)
            except BaseException as error:  # handed to the sender, whatever it is
                self._error = error
        try:
            self._store.flush()
        except BaseException as error:
            self._error = self._error or error

    def _take(self, batch: _Answers) -> None:
        request_ids = [row.item.request_id for row in batch.rows]
        if isinstance(batch.answers, Records) and batch.answers.request_ids == request_ids:
            numbers, items = [row.number for row in batch.rows], [row.item for row in batch.rows]
            self._store.extend(numbers, items, batch.answers.with_taps(self._taps))
            return
        answers = {answer.request_id: answer for answer in batch.answers}
        if len(answers) != len(batch.answers) or answers.keys() != set(request_ids):
            raise LineageError(
                "the answers of a batch are not those of its requests",
                expected=f"{len(batch.rows)} answers: {sorted(request_ids)[:5]} …",
                found=f"{len(batch.answers)} answers: {sorted(answers)[:5]} …",
                fix="this is a defect of the runtime: keep the input and report it",
            )
        kept: list[tuple[int, WorkItem, Record]] = []
        for row in batch.rows:
            answer = answers[row.item.request_id]
            if isinstance(answer, Failure):
                self._failures.append((row, answer.code, answer.reason))
            else:
                kept.append((row.number, row.item, _with_taps(answer, self._taps)))
        if kept:
            self._store.extend(*zip(*kept, strict=True))

    def _settle(self, window: Window) -> None:
        failures, self._failures = self._failures, []
        if failures:
            self._failed.write(failures)  # before the commit: a settled row that is not stored must have its reason on disk
        self._store.commit(window.end)


def _with_taps(record: Record, taps: tuple[Tap, ...]) -> Record:
    """The record with the states of these taps, in their order; one that lacks a tap is left to the store to refuse."""
    by_tap = {state.tap: state for state in record.states}
    if len(by_tap) == len(taps) or not by_tap.keys() >= set(taps):
        return record
    return replace(record, states=tuple(by_tap[tap] for tap in taps))
