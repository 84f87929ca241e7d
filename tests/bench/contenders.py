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
        row = {"name": self.name, "ms": round(self.milliseconds, 2), "tokens_per_s": round(self.tokens_per_s)}
        row["rounds_ms"] = [round(milliseconds, 2) for milliseconds in self.times]
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


def sm_clock() -> int | None:
    """The card's SM clock in MHz; None without a card."""
    if DEVICE.type == "cpu":
        return None
    query = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0])
