"""Pauses of the interpreter: what makes the thread that feeds the engine wait, and is put off while a run lasts."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_TURN_S = 2e-4  # of Python's time, where another thread waits for it; the default, 5 ms, is as long as a small model's batch

_YOUNG = 10_000  # new objects before the collector looks at them; the default, 700 or 2,000, is less than a window's rows

_CHANGING = threading.Lock()
_found: list[tuple[float, tuple[int, ...], bool]] = []
"""For each run under way, what the first of them found: the turn; the collector's thresholds; no object set aside."""


@contextmanager
def without_pauses() -> Iterator[None]:
    """Let the thread that feeds the engine have the interpreter soon after it asks for it.

    What lives already (half a million objects once torch is imported) is set aside from the garbage collector, which
    would go through all of it again after every sixty thousand rows, with no thread running meanwhile. What is garbage
    by then goes first: set aside, it would keep its memory, an engine's perhaps, for as long as the run lasts. Rows are in no
    cycle and die when they are stored: the collector looks for garbage among them less often.

    Several runs of one process may overlap: the last that ends leaves the interpreter as the first has found it.
    """
    with _CHANGING:
        found = sys.getswitchinterval(), gc.get_threshold(), gc.get_freeze_count() == 0
        _found.append(_found[0] if _found else found)
        turn, (young, *old), is_ours = _found[0]
        sys.setswitchinterval(min(turn, _TURN_S))
        gc.set_threshold(young and max(young, _YOUNG), *old)
        if is_ours and len(_found) == 1:
            gc.collect()
            gc.freeze()
    try:
        yield
    finally:
        with _CHANGING:
            turn, thresholds, is_ours = _found.pop()
            if not _found:
                sys.setswitchinterval(turn)
                gc.set_threshold(*thresholds)
                if is_ours:
                    gc.unfreeze()
