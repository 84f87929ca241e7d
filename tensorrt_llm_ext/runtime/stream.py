"""The host stream: one worker thread that runs batches in order and rings the doorbell after each.

The same discipline as a CUDA stream, so that the CPU path and the GPU path are one path: work is ordered by when it
was enqueued, nobody synchronises it, and the host learns of progress through the doorbell alone.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from tensorrt_llm_ext.errors import BackendError, DeadlineExceeded, ExtractionError, SessionClosed


class HostStream:
    """Runs enqueued work first in, first out. The first error stops it for good: later work is not run. Thread-safe."""

    def __init__(self, on_stop: Callable[[], None]) -> None:
        self._on_stop = on_stop
        self._queue: queue.SimpleQueue = queue.SimpleQueue()  # its put may be called from a finalizer
        self._doorbell = threading.Condition()
        self._num_enqueued = 0
        self._num_rung = 0
        self._failed_value: int | None = None
        self._failure: ExtractionError | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve, name="host-stream", daemon=True)
        self._thread.start()

    def enqueue(self, work: Callable[[], None]) -> int:
        """Order ``work`` behind everything enqueued before; return the doorbell value that says it is done.

        Raises SessionClosed when the stream has stopped.
        """
        with self._doorbell:
            self._raise_if_stopped()
            self._num_enqueued += 1
            self._queue.put((self._num_enqueued, work))
            return self._num_enqueued

    def afterwards(self, give_back: Callable[[], None]) -> None:
        """Run ``give_back`` once everything enqueued so far is over, failed or not. Never blocks, never raises."""
        self._queue.put((None, give_back))

    def wait(self, value: int, timeout_s: float) -> None:
        """Return when the doorbell has reached ``value``.

        Raises DeadlineExceeded after ``timeout_s`` seconds (the work goes on, and may be waited for again), the error
        of the work itself, or SessionClosed when the stream was closed, or stopped before this work.
        """
        with self._doorbell:
            self._doorbell.wait_for(lambda: self._num_rung >= value or self._is_closed, timeout_s)
            if self._is_closed:
                self._raise_if_stopped()
            if self._num_rung < value:
                raise DeadlineExceeded(
                    f"batch {value} did not come back in {timeout_s:g} s",
                    expected=f"doorbell {value}",
                    found=f"doorbell {self._num_rung}",
                    fix="wait again, give a longer deadline, or build the engine with fewer tokens a batch",
                )
            if self._failed_value == value:
                raise self._failure
            if self._failed_value is not None and self._failed_value < value:
                self._raise_if_stopped()

    def raise_if_stopped(self) -> None:
        """Raise SessionClosed, with the reason, when no work can be enqueued any more."""
        with self._doorbell:
            self._raise_if_stopped()

    def close(self, timeout_s: float) -> bool:
        """Let the running batch end and drop the others; say whether the thread has ended. Idempotent."""
        with self._doorbell:
            self._is_closed = True
            self._doorbell.notify_all()
        self._queue.put((None, None))
        if threading.current_thread() is not self._thread:  # a finalizer may run anywhere, here too
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        while True:
            value, work = self._queue.get()
            if work is None:
                return
            if value is None:
                work()
            else:
                self._run(value, work)

    def _run(self, value: int, work: Callable[[], None]) -> None:
        error = None
        if self._failure is None and not self._is_closed:
            try:
                work()
            except ExtractionError as raised:
                error = raised
            except Exception as raised:
                error = BackendError(
                    f"batch {value} failed in a way the backend did not name",
                    expected="a batch that comes back, or a BackendError",
                    found=repr(raised),
                    fix="this is a defect of the backend: keep the input and report it",
                )
                error.__cause__ = raised
        with self._doorbell:
            if error is not None:
                self._failed_value, self._failure = value, error
            self._num_rung = value
            self._doorbell.notify_all()
        if error is not None:
            self._on_stop()

    def _raise_if_stopped(self) -> None:
        if self._failure is not None:
            raise SessionClosed(
                f"the session was closed because batch {self._failed_value} failed: {self._failure.what}",
                expected="an open session",
                found=self._failure.found,
                fix="open a new session and submit again what did not come back",
            ) from self._failure
        if self._is_closed:
            raise SessionClosed(
                "the session was closed",
                expected="an open session",
                found="a closed one",
                fix="wait for every ticket before closing the session, or open a new one",
            )
