"""Trials: which of several calls is the quickest on this card, found once and kept in the user's cache folder."""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from tensorrt_llm_ext.backends.torch.user_cache import cache_folder

_ROUNDS = 3
_SHORT_MS, _LONG_MS = 5.0, 80.0
_FINALISTS = 5


def quickest(calls: Sequence[Callable[[], None]]) -> int:
    """Time the calls in rounds, and return the place of the one that takes the least time on the card.

    All of them take turns at one clock first. What a call draws in power decides its clock only when it has run for a while: so the
    best run again, and the first one, each for long.
    """
    every = range(len(calls))
    short = _times(calls, every, _SHORT_MS)
    finalists = {0, *sorted(every, key=short.__getitem__)[:_FINALISTS]}
    if len(finalists) == 1:
        return 0
    long = _times(calls, finalists, _LONG_MS)
    return min(finalists, key=long.__getitem__)


def kept(what: str) -> object:
    """What the file holds of ``what`` for this card; None where it holds nothing."""
    return _read().get(_on_this_card(what))


def keep(what: str, found: list[int]) -> None:
    """Keep what a trial found. Where that cannot be written the next start tries again."""
    file = _file()
    hidden = file.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            hidden.write_text(json.dumps({**_read(), _on_this_card(what): found}, indent=1))
            hidden.replace(file)
        finally:
            hidden.unlink(missing_ok=True)


def _times(calls: Sequence[Callable[[], None]], places: Iterable[int], at_least_ms: float) -> dict[int, float]:
    rounds = [{place: _milliseconds(calls[place], at_least_ms) for place in places} for _ in range(_ROUNDS)]
    return {place: statistics.median(times[place] for times in rounds) for place in rounds[0]}


def _milliseconds(call: Callable[[], None], at_least_ms: float) -> float:
    """The time of one of as many calls as take ``at_least_ms`` together."""
    count = math.ceil(at_least_ms / _elapsed(call, 1))
    return _elapsed(call, count) / count


def _elapsed(call: Callable[[], None], count: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _read() -> dict[str, object]:
    try:
        found = json.loads(_file().read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _file() -> Path:
    return cache_folder() / "trials.json"


def _on_this_card(what: str) -> str:
    return f"{torch.cuda.get_device_name()}: {what}"
