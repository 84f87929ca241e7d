"""Ahead: an iterator that runs in a thread of its own, a bounded number of results before its reader."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

_POLL_S = 0.1
_LAST_RESULT_S = 2.0


class Ahead(Generic[T]):
    """Reads ``source`` in a thread, at most ``depth`` results ahead; its error comes out where its results would.

    Iterating ends with the source, or soon after ``stop`` is set, even while the source waits for a pipe. A context
    manager; leaving waits for the result the thread is making, but not long for one that may never come.
    """

    def __init__(self, source: Iterator[T], depth: int, stop: threading.Event) -> None:
        self._source = source
        self._stop = stop
        self._ready: queue.Queue[tuple[str, object]] = queue.Queue(depth)
        self._is_closed = threading.Event()
        # daemon: a thread that waits for a pipe must not hold back the end of the process
        self._thread = threading.Thread(target=self._read, name="read ahead", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        while not self._stop.is_set():
            try:
                kind, value = self._ready.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            if kind == "error":
                raise value
            if kind == "end":
                return
            yield value

    def __enter__(self) -> Ahead[T]:
        return self

    def __exit__(self, *error: object) -> None:
        self._is_closed.set()
        self._thread.join(_LAST_RESULT_S)

    def _read(self) -> None:
        try:
            for result in self._source:
                if not self._put(("result", result)):
                    return
            self._put(("end", None))
        except BaseException as error:  # handed to the reader, whatever it is
            self._put(("error", error))

    def _put(self, message: tuple[str, object]) -> bool:
        while not self._is_closed.is_set():
            try:
                self._ready.put(message, timeout=_POLL_S)
                return True
            except queue.Full:
                continue
        return False
