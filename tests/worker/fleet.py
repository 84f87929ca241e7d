"""A fleet: workers and a store writer as processes of the real command, killed at random and started again."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from tensorrt_llm_ext.store import STATES_NAME, open_states, open_vectors
from tensorrt_llm_ext.worker import Access, JetStreamBroker, status_of

COMMAND = [sys.executable, "-m", "tensorrt_llm_ext.cli"]


class Fleet:
    """``num_workers`` workers and a store writer. Its logs lie beside ``out``."""

    def __init__(self, engine: Path, url: str, stream: str, out: Path, num_workers: int, store_options: tuple[str, ...] = ()) -> None:
        self._access = ["--broker", url, "--stream", stream]
        self._out = out
        self._words = {f"worker-{n}": ["work", str(engine), "--threads", "1"] for n in range(num_workers)}
        self._words["store"] = ["store", "--out", str(out / "data"), *store_options]
        self.processes: dict[str, subprocess.Popen] = {}
        self.num_killed: Counter[str] = Counter()
        self.num_ended: Counter[str] = Counter()  # by itself, which nothing here asks for

    def start(self, name: str) -> None:
        with open(self._out / f"{name}.log", "a") as log:
            self.processes[name] = subprocess.Popen([*COMMAND, *self._words[name], *self._access], stdout=log, stderr=log)

    def start_all(self) -> None:
        for name in self._words:
            self.start(name)

    def restart_ended(self) -> None:
        for name, process in self.processes.items():
            if process.poll() is not None:
                self.num_ended[name] += 1
                self.start(name)

    def kill_one(self, rng: random.Random) -> None:
        name = rng.choice(sorted(self.processes))
        self.processes[name].kill()
        self.processes[name].wait()
        self.num_killed[name] += 1
        self.start(name)

    def stop(self) -> dict[str, int]:
        """SIGTERM to all; their exit codes."""
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        return {name: process.wait(120) for name, process in self.processes.items()}

    def kill(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


def run_chaos(
    engine, server, stream, out, *, num_workers, kill_every_s, calm_after, restart_after, timeout_s, seed=0, store_options=()
) -> dict:
    """Kill and restart until every work item is settled; kill and restart the broker once, after ``restart_after`` kills.

    ``calm_after``: kills after which nobody is killed any more, so that a small run ends; on a quick machine they come the
    sooner; None: to the end. Returns what happened.
    """
    rng, start = random.Random(seed), time.monotonic()
    fleet = Fleet(engine, server.url, stream, out, num_workers, store_options)
    fleet.start_all()
    next_kill, is_restarted = start + kill_every_s, False
    try:
        with JetStreamBroker.open(Access(server.url), stream, name="test") as broker:
            while not (status := status_of(broker)).is_done:
                assert time.monotonic() - start < timeout_s, status
                num_killed = fleet.num_killed.total()
                if not is_restarted and num_killed >= restart_after:
                    server.stop(kill=True)
                    server.start()
                    is_restarted = True
                share = 1 - status.open / status.submitted
                is_late = calm_after is not None and share > (num_killed + 1) / (calm_after + 1)
                if (calm_after is None or num_killed < calm_after) and (time.monotonic() > next_kill or is_late):
                    fleet.kill_one(rng)
                    next_kill = time.monotonic() + kill_every_s * rng.uniform(0.5, 1.5)
                fleet.restart_ended()
                time.sleep(0.2)
            exit_codes = fleet.stop()
            status = status_of(broker)
    finally:
        fleet.kill()
    return {
        "status": status,
        "killed": fleet.num_killed,
        "ended": fleet.num_ended,
        "broker_restarted": is_restarted,
        "exit_codes": exit_codes,
        "seconds": time.monotonic() - start,
    }


def settled(out: Path) -> tuple[list[tuple[int, str]], list[dict]]:
    """The rows (work item's sequence, request id) and the lines of the outcomes, of all partitions."""
    rows, lines = [], []
    for folder in sorted((out / "data").glob("part-*.refused.jsonl")):
        lines += [json.loads(line) for line in folder.read_text().splitlines()]
    for folder in sorted(path for path in (out / "data").glob("part-*") if path.is_dir()):
        if (folder / STATES_NAME).exists():
            rows += [(one.row + 1, one.request_id) for one in open_states(folder).sequences()]
            continue
        table = open_vectors(folder).dataset.to_table(columns=["row", "request_id"])
        rows += [(row + 1, name) for row, name in zip(*(column.to_pylist() for column in table.columns), strict=True)]
    return rows, lines
