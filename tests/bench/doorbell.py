"""What the C++ runtime costs beside a CUDA card: one run, one table, one JSON file.

    python tests/bench/doorbell.py [--json FILE]

* Round trip: the host rings, one kernel runs, the host hears; beside launching the kernel and synchronising. The stream has
  stood at its wait for a random while, since a card's look at the number is not continuous.
* Host work of a batch of 128 x 128 tokens through the session's pipeline, with an engine that enqueues nothing and outputs
  that nobody hashes; and the NumPy packer that the C++ one replaced.
* Copies through slots, beside plain copies of pinned memory of the same size.
"""

from __future__ import annotations

import contextlib
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "backends")]

import machine  # noqa: E402  beside this file
from toy_engines import LAST, Toy, toy_contract  # noqa: E402  beside this folder

from tensorrt_llm_ext import _runtime  # noqa: E402
from tensorrt_llm_ext.recipes.contract import Limits  # noqa: E402
from tensorrt_llm_ext.runtime.pipeline import Pipeline  # noqa: E402
from tensorrt_llm_ext.runtime.unpacking import unpack  # noqa: E402

NUM_SEQUENCES, LENGTH = 128, 128
NUM_TOKENS = NUM_SEQUENCES * LENGTH
HIDDEN = 4096
DIGEST = bytes(16)
OFFSETS = np.arange(0, NUM_TOKENS + 1, LENGTH, dtype=np.int32)
PATIENCE_S = 60.0


def main() -> None:
    arguments = machine.arguments(__doc__).parse_args()
    report = {
        "machine": machine.card(arguments.commit),
        "round trip": round_trip(),
        "host work": host_work(),
        "copies": copies(),
    }
    print(table(report))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report, indent=1))


def round_trip(num_rounds: int = 2000) -> dict[str, float]:
    """Microseconds from the host's word to its answer, both ways of asking; the kernel is the same."""
    stream = _runtime.CudaStream(_runtime.Driver(), 4096)
    on_stream = torch.cuda.ExternalStream(stream.handle)
    value = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    doorbell, synchronise = [], []
    with torch.cuda.stream(on_stream), _let_go(stream):
        for _ in range(50):  # every kernel is loaded before the first armed wait
            value.add_(1)
            stream.ring().wait(PATIENCE_S)
        for _ in range(num_rounds):
            stream.arm(shape_has_run=True)
            value.add_(1)
            ticket = stream.ring()
            _spin(100 * random.random())
            started = time.perf_counter_ns()
            stream.release()
            ticket.wait(PATIENCE_S)
            doorbell.append((time.perf_counter_ns() - started) / 1e3)
            started = time.perf_counter_ns()
            value.add_(1)
            on_stream.synchronize()
            synchronise.append((time.perf_counter_ns() - started) / 1e3)
    stream.close(PATIENCE_S)
    doorbell_us, synchronise_us = statistics.median(doorbell), statistics.median(synchronise)
    tenths = statistics.quantiles(doorbell, n=10)
    return {
        "doorbell_us": round(doorbell_us, 2),
        "doorbell, fastest and slowest tenth_us": f"{tenths[0]:.1f} to {tenths[-1]:.1f}",
        "launch_and_synchronise_us": round(synchronise_us, 2),
        "ratio": round(doorbell_us / synchronise_us, 3),
    }


def _spin(microseconds: float) -> None:
    end = time.perf_counter_ns() + microseconds * 1e3
    while time.perf_counter_ns() < end:
        pass


class NoEngine:
    """Obeys the protocol and enqueues nothing: what is left is the runtime's own work."""

    def set_shape(self, name: str, shape: tuple[int, ...]) -> None:
        pass

    def set_address(self, name: str, address: int) -> None:
        pass

    def enqueue(self, stream: int) -> None:
        pass

    def close(self) -> None:
        pass


def host_work(num_batches: int = 500, cards: tuple[str, ...] = ("any",)) -> dict[str, float]:
    """Median microseconds of each step of a batch on the host; ``cards`` empty: a host stream."""
    contract = toy_contract(Toy(taps=(LAST,), limits=Limits(NUM_TOKENS, NUM_SEQUENCES, LENGTH, NUM_TOKENS)))
    pipeline = Pipeline(NoEngine(), replace(contract, compute_capabilities=cards), num_slots=2, deadline_s=PATIENCE_S)
    token_ids = np.random.default_rng(0).integers(0, contract.architecture.vocab_size, NUM_TOKENS).astype(np.int32)
    request_ids = tuple(f"request {i}" for i in range(NUM_SEQUENCES))
    steps: dict[str, list[float]] = {"pack": [], "bind, copies, doorbell": [], "hear and unpack": []}
    for _ in range(num_batches + 20):
        times = [time.perf_counter_ns()]
        flight = pipeline.pack(token_ids, OFFSETS, request_ids, "prefix_sum")
        times.append(time.perf_counter_ns())
        pipeline.enqueue(flight)
        times.append(time.perf_counter_ns())
        while not flight.ticket.is_done:
            time.sleep(50e-6)
        times.append(time.perf_counter_ns())
        with pipeline.wait(flight, None) as batch:
            rows = unpack(batch, contract)
        times.append(time.perf_counter_ns())
        del rows, batch
        for name, start in zip(steps, (0, 1, 3)):
            steps[name].append((times[start + 1] - times[start]) / 1e3)
    medians = {name: round(statistics.median(values[20:]), 1) for name, values in steps.items()}
    slot = pipeline._arena.acquire(1.0)
    options = {"convention": "prefix_sum", "batch": 0, "digest": DIGEST}
    packing = _median_us(lambda: _runtime.pack(pipeline._layout, token_ids, OFFSETS, slot, **options))
    del slot
    pipeline.close()
    return {
        **{f"{name}_us": value for name, value in medians.items()},
        "all_us": round(sum(medians.values()), 1),
        "packing alone_us": round(packing, 1),
        "packing alone in NumPy_us": round(_median_us(lambda: pack_in_numpy(token_ids, OFFSETS)), 1),
    }


def pack_in_numpy(token_ids: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, ...]:
    """The packer before this one: every index array of a batch, by NumPy."""
    lengths, starts = np.diff(offsets), offsets[:-1]
    longest = int(lengths.max())
    sequence = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    positions = np.arange(len(token_ids), dtype=np.int32) - starts[sequence]
    rows = np.minimum(np.arange(longest, dtype=np.int32)[None, :], (lengths - 1)[:, None]) + starts[:, None]
    return token_ids.copy(), positions, sequence * np.int32(longest) + positions, rows, offsets[1:].copy()


def copies(num_megabytes: int = 128, num_rounds: int = 9) -> dict[str, float]:
    """GB/s of one large batch's copy in and copy out, and of torch's copies of pinned memory of that size."""
    num_tokens = num_megabytes * (1 << 20) // 4
    tensors = [("input_ids", "input", "int32", ("T",)), ("rows", "output", "float32", ("T",))]
    limits = dict.fromkeys(["max_num_tokens", "max_seq_len", "max_padded_tokens"], num_tokens)
    layout = _runtime.Layout(tensors, vocab_size=1, max_batch_size=1, **limits)
    driver = _runtime.Driver()
    arena = _runtime.PinnedArena(layout.slot_bytes, 1, driver)
    stream = _runtime.CudaStream(driver, layout.slot_bytes)
    on_stream = torch.cuda.ExternalStream(stream.handle)
    token_ids, offsets = np.zeros(num_tokens, np.int32), np.array([0, num_tokens], np.int32)
    pinned, on_card = torch.empty(num_tokens, pin_memory=True), torch.empty(num_tokens, device="cuda")
    torch.cuda.synchronize()
    times: dict[str, list[float]] = {"in": [], "out": [], "plain in": [], "plain out": []}

    def timed(name: str, call) -> tuple:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(on_stream)
        call()
        end.record(on_stream)
        return name, start, end

    for _ in range(num_rounds):
        slot = arena.acquire(PATIENCE_S)
        _runtime.pack(layout, token_ids, offsets, slot, convention="none", batch=0, digest=DIGEST)
        events = [timed("in", lambda: stream.copy_in(slot))]
        stream.run(slot, lambda _: None)
        events.append(timed("out", lambda: stream.copy_out(slot)))
        ticket = stream.ring(slot)
        with torch.cuda.stream(on_stream):
            events.append(timed("plain in", lambda: on_card.copy_(pinned, non_blocking=True)))
            events.append(timed("plain out", lambda: pinned.copy_(on_card, non_blocking=True)))
        ticket.wait(PATIENCE_S)
        on_stream.synchronize()
        for name, start, end in events:
            times[name].append(start.elapsed_time(end))
        del slot, ticket
    del pinned, events, start, end  # torch records an event on every stream that used them: before the stream goes
    stream.close(PATIENCE_S)
    speed = {name: num_tokens * 4 / statistics.median(values) / 1e6 for name, values in times.items()}
    return {
        **{f"{name}_gb_per_s": round(value, 1) for name, value in speed.items()},
        "in_ratio": round(speed["in"] / speed["plain in"], 3),
        "out_ratio": round(speed["out"] / speed["plain out"], 3),
    }


def table(report: dict) -> str:
    """The report as Markdown."""
    rows = [
        f"| {part} | {name.replace('_', ' ')} | {json.dumps(value) if isinstance(value, (list, dict)) else value} |"
        for part, values in report.items()
        for name, value in values.items()
    ]
    return "\n".join(["| part | figure | value |", "|---|---|---:|", *rows])


@contextlib.contextmanager
def _let_go(stream: _runtime.Stream) -> Iterator[None]:
    """Release an armed stream after a while whatever happens: a deadlock becomes a slow run, and not a hang."""
    timer = threading.Timer(PATIENCE_S, stream.release)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _median_us(call, num_calls: int = 300) -> float:
    times = []
    for _ in range(num_calls):
        started = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - started) / 1e3)
    return statistics.median(times)


if __name__ == "__main__":
    main()
