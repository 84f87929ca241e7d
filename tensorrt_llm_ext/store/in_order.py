"""InOrder: works that run side by side, and what follows each, one at a time in the order in which they were put."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class _Task:
    work: Callable[[], Any] | None
    then: Callable[[Future], None] | None  # None: the end


class InOrder:
    """Runs works on ``num_threads`` threads and what follows them on one, which nobody's interrupt reaches. ``close`` in the end.

    ``guard`` is entered around each of what follows, and must let no error out: the others would wait for ever.
    """

    def __init__(self, num_threads: int, guard: Callable[[], AbstractContextManager[None]]) -> None:
        self._tasks: queue.Queue[_Task | None] = queue.Queue()  # None: a work has ended
        # the guard is the thread's alone: it may hold whoever holds this, and large buffers with him, who is to go when he is closed
        self._thread = threading.Thread(target=self._run, args=(num_threads, guard), name="in order", daemon=True)
        self._thread.start()

    def put(self, then: Callable[[Future], None], work: Callable[[], Any] | None = None) -> None:
        """Have ``work`` done, and ``then(future)`` of its result or error once all that was put before has followed."""
        self._tasks.put(_Task(work, then))

    def wait(self) -> None:
        """Wait until all that was put is done."""
        is_done = threading.Event()
        self.put(lambda _: is_done.set())
        is_done.wait()

    def close(self) -> None:
        """Wait until all that was put is done, and end the threads."""
        self._tasks.put(_Task(None, None))
        self._thread.join()

    def _run(self, num_threads: int, guard: Callable[[], AbstractContextManager[None]]) -> None:
        waiting: deque[tuple[Future, Callable[[Future], None] | None]] = deque()
        with ThreadPoolExecutor(num_threads) as pool:
            while True:
                if (task := self._tasks.get()) is not None:
                    waiting.append((self._started(pool, task.work), task.then))
                while waiting and waiting[0][0].done():
                    future, then = waiting.popleft()
                    if then is None:
                        return
                    with guard():
                        then(future)

    def _started(self, pool: ThreadPoolExecutor, work: Callable[[], Any] | None) -> Future:
        future: Future = Future()
        if work is None:
            future.set_result(None)
            return future
        try:
            future = pool.submit(work)
        except Exception as error:  # no thread can be started, say
            future.set_exception(error)
        future.add_done_callback(lambda _: self._tasks.put(None))
        return future
