"""Pauses of the interpreter: what makes the thread that feeds the engine wait, and is put off while a run lasts."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_TURN_S = 2e-4  # of Python's time, where another thread waits for it; the default, 5 ms, is as long as a small model's batch

_CHANGING = threading.Lock()
_found: list[tuple[float, bool]] = []  # for each run under way, what the first of them found: the turn; no object set aside


@contextmanager
def without_pauses() -> Iterator[None]:
    """Let the thread that feeds the engine have the interpreter soon after it asks for it.

    What lives already (half a million objects once torch is imported) is set aside from the garbage collector, which
    would go through all of it again after every sixty thousand rows, with no thread running meanwhile. What is garbage
    by then goes first: set aside, it would keep its memory, an engine's perhaps, for as long as the run lasts.

    Several runs of one process may overlap: the last that ends leaves the interpreter as the first has found it.
    """
    with _CHANGING:
        _found.append(_found[0] if _found else (sys.getswitchinterval(), gc.get_freeze_count() == 0))
        turn, is_ours = _found[0]
        sys.setswitchinterval(min(turn, _TURN_S))
        if is_ours and len(_found) == 1:
            gc.collect()
            gc.freeze()
    try:
        yield
    finally:
        with _CHANGING:
            turn, is_ours = _found.pop()
            if not _found:
                sys.setswitchinterval(turn)
                if is_ours:
                    gc.unfreeze()
