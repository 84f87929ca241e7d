"""Contenders: what is timed, how, and in which rounds. Everything of one sitting is timed in every round, one after another.

Ratios are made within a sitting: its contenders ran at the same clock and temperature.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch_models import DEVICE

ROUNDS, RUNS = 3, 5
SLOW_MS = 500.0  # from here on a call is long enough that two of them a round say as much
SHORT_MS, AT_ONCE = 1.0, 16  # below: as many calls between two events
WAIT_CYCLES = 10_000_000  # of the card, 5 ms or more: its host has queued that many calls by then


@dataclass
class Contender:
    """Something that takes ``num_tokens`` a call; ``measure`` gives the milliseconds of one. ``times``: one a round.

    ``against`` names those of the same sitting that its speed is divided by.
    """

    name: str
    num_tokens: int
    measure: Callable[[], float]
    flops: float | None = None
    against: tuple[str, ...] = ()
    times: list[float] = field(default_factory=list)

    @property
    def milliseconds(self) -> float:
        return statistics.median(self.times)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.milliseconds * 1e3

    def row(self) -> dict:
        row = {"name": self.name, "ms": _rounded(self.milliseconds), "tokens_per_s": round(self.tokens_per_s)}
        row["rounds_ms"] = [_rounded(milliseconds) for milliseconds in self.times]
        return row if self.flops is None else {**row, "tflops": round(self.flops / self.milliseconds / 1e9, 1)}


def sitting(name: str, contenders: list[Contender], num_rounds: int = ROUNDS) -> dict:
    """Time every contender in every round; the report of the sitting: rows, ratios, the SM clock after each."""
    clocks = []
    for _ in range(num_rounds):
        for contender in contenders:
            contender.times.append(contender.measure())
            clocks.append(sm_clock())
    of = {contender.name: contender for contender in contenders}
    ratios = {
        f"{contender.name} / {other}": round(contender.tokens_per_s / of[other].tokens_per_s, 4)
        for contender in contenders
        for other in contender.against
        if other in of
    }
    return {"name": name, "rows": [c.row() for c in contenders], "ratios": ratios, "clocks_mhz": clocks}


def on_device(call: Callable[[], object]) -> Callable[[], float]:
    """Time ``call`` by the card's own events: the median of several, after one that is not counted."""

    def measure() -> float:
        first = _elapsed(call, 1)[0]
        return statistics.median(_elapsed(call, RUNS if first < SLOW_MS else 2))

    return measure


def on_busy_device(call: Callable[[], object]) -> Callable[[], float]:
    """Time ``call`` by the card's own events, queued behind other work as in a pass: what its launch takes on the host is not
    counted, unless ``call`` waits for the card."""

    def queued(num_calls: int) -> float:
        if DEVICE.type == "cuda":
            torch.cuda._sleep(WAIT_CYCLES)
        return _elapsed(lambda: [call() for _ in range(num_calls)], 1)[0] / num_calls

    def measure() -> float:
        num_calls = AT_ONCE if queued(1) < SHORT_MS else 1
        return statistics.median(queued(num_calls) for _ in range(RUNS))

    return measure


def on_host(call: Callable[[], object], num_calls: int = 1) -> Callable[[], float]:
    """Time ``call``, which ends when its results are on the host and makes ``num_calls`` calls of its kind."""

    def measure() -> float:
        started = time.perf_counter()
        call()
        return (time.perf_counter() - started) / num_calls * 1e3

    return measure


def _elapsed(call: Callable[[], object], num_calls: int) -> list[float]:
    if DEVICE.type == "cpu":
        return [on_host(call)() for _ in range(num_calls)]
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(num_calls)]
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


def _rounded(milliseconds: float) -> float:
    """Five digits, of a call of microseconds too."""
    return float(f"{milliseconds:.5g}")


def sm_clock() -> int | None:
    """The card's SM clock in MHz; None without a card."""
    if DEVICE.type == "cpu":
        return None
    query = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0])
