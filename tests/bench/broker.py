"""Tokens/s through a broker against ``run`` on the same file, and batch fill, with SmolLM2 and a real nats-server.

    .venv/bin/python tests/bench/broker.py [--items 2000] [--rounds 3]      # minutes, on a quiet machine

Both sides use one engine, one process and all threads; rounds alternate. Counted are the tokens over the seconds between
joining and the last answer persisted (broker; a store writer runs beside it) and the job's own computing seconds (run).
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "worker")]

import tiny  # noqa: E402
from nats_server import NatsServer  # noqa: E402

from tensorrt_llm_ext.builder import build_engine  # noqa: E402

COMMAND = [sys.executable, "-m", "tensorrt_llm_ext.cli"]
IDLE_S = 3.0


def write_prompts(path: Path, num_items: int) -> None:
    """Log-normal lengths, about 60 tokens in the mean."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(3.8, 0.8, num_items), 1, 1024).astype(int)
    rows = ({"id": f"r{n}", "ids": rng.integers(3, 49000, size=length).tolist()} for n, length in enumerate(lengths))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def said(*words: object) -> dict:
    """What a verb prints with ``--json``."""
    done = subprocess.run([*COMMAND, *map(str, words), "--json"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr[-2000:])
    return json.loads(done.stdout)


def by_run(engine: Path, prompts: Path, out: Path) -> float:
    report = said("run", engine, "--input", prompts, "--ids-field", "ids", "--id-field", "id", "--out", out)
    return report["tokens_per_s"]


def by_broker(engine: Path, prompts: Path, out: Path, url: str, stream: str) -> tuple[float, float]:
    access = ["--broker", url, "--stream", stream]
    said("submit", prompts, "--engine", engine, "--ids-field", "ids", "--id-field", "id", *access)
    store = subprocess.Popen([*COMMAND, "store", "--out", str(out), *access], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        report = said("work", engine, "--leave-when-idle", IDLE_S, *access)
        deadline = time.monotonic() + 120
        while not said("broker-status", *access)["done"]:
            if time.monotonic() > deadline:
                raise SystemExit("the store did not keep up")
    finally:
        store.terminate()
        store.wait(60)
    return report["num_tokens"] / report["busy_seconds"], report["batch_fill"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--items", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_prompts(folder / "prompts.jsonl", options.items)
        build_engine(tiny.smollm2_gguf(), folder / "engine", recipe="smollm2-135m")
        server = NatsServer(folder).start()
        ratios, fills = [], []
        try:
            for number in range(options.rounds):
                direct = by_run(folder / "engine", folder / "prompts.jsonl", folder / f"run-{number}")
                through, fill = by_broker(
                    folder / "engine", folder / "prompts.jsonl", folder / f"broker-{number}", server.url, f"s{number}"
                )
                ratios.append(through / direct)
                fills.append(fill)
                print(f"run {direct:,.0f} tokens/s, broker {through:,.0f} tokens/s, ratio {ratios[-1]:.3f}, fill {fill:.3f}")
        finally:
            server.stop()
        print(json.dumps({"ratio": statistics.median(ratios), "ratios": ratios, "batch_fill": statistics.median(fills)}))


if __name__ == "__main__":
    main()
