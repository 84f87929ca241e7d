"""Fence: lets only the newest holder of a lease change a dataset, however long an older one was paused.

A lease by itself cannot do that: its holder may be paused right after it looked, and go on when another has taken over.
So the number that each lease brings, higher than every one before, is checked where the data lies: in a file beside the
dataset, under that file's lock, and the lock is held until the change is done.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tensorrt_llm_ext.errors import LeaseLost, StoreError
from tensorrt_llm_ext.store.disk import disk_errors

_POLL_S = 0.05
_DIGITS = 20


class Fence:
    """One lease's right to what lies beside ``path``. ``token`` is the lease's number."""

    def __init__(self, path: Path, token: int, *, patience_s: float = 60.0) -> None:
        self.path = Path(path)
        self.token = token
        self._patience_s = patience_s

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock, having checked that no newer lease was here; older ones are kept out from now on.

        Raises LeaseLost when a newer one was, StoreError when another process holds the lock for too long or the file
        is damaged.
        """
        with disk_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._lock(descriptor)
            self._check(descriptor)
            yield
        finally:
            os.close(descriptor)

    def _lock(self, descriptor: int) -> None:
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    raise StoreError(
                        f"another writer is in the middle of a commit and holds '{self.path}'",
                        expected=f"the lock within {self._patience_s:g} s",
                        found=error,
                        fix="if that process is paused, let it go on or stop it",
                    ) from error
            time.sleep(_POLL_S)

    def _check(self, descriptor: int) -> None:
        text = os.pread(descriptor, 2 * _DIGITS, 0).decode("ascii", "replace").strip()
        if text and not text.isdigit():
            raise StoreError(
                f"'{self.path}' is damaged",
                expected="the number of the newest lease",
                found=repr(text),
                fix="restore it: without it two writers could write",
            )
        newest = int(text or 0)
        if newest > self.token:
            raise LeaseLost(
                f"another writer has taken over what '{self.path}' guards",
                expected=f"no lease newer than {self.token}",
                found=f"lease {newest}",
                fix="nothing: what this writer had not committed is delivered to the other",
            )
        if newest < self.token:
            with disk_errors(self.path):
                os.pwrite(descriptor, f"{self.token:0{_DIGITS}d}\n".encode(), 0)  # one block: whole, or not there
                os.fsync(descriptor)
