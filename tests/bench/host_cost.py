"""What a record costs the host: CPU of every thread from a file of ids to a closed Lance dataset, engine time left out.

    python tests/bench/host_cost.py [--rows 50000] [--length 128] [--rounds 3] [--tokens-per-s 2e6] [--json FILE]

The engine is a stand-in (``instant_engine.py``): hidden size 576, ``final@last``. Counted is CPU time, user and system, of each
thread by its name, so other work on the machine matters little. With ``--tokens-per-s`` the stand-in takes the time of a card
of that speed, and the share of the time that it had nothing to do is printed; that figure wants a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import threading
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

from ids_files import FIELDS, write_ids
from instant_engine import ENGINE, SMOLLM2, write_instant_engine

from tensorrt_llm_ext.inputs import open_input, token_policy
from tensorrt_llm_ext.job import Job, run_job, window_limits
from tensorrt_llm_ext.recipes import read_contract
from tensorrt_llm_ext.runtime import Session


@contextmanager
def cpu_by_thread():
    """Yield a counter of CPU seconds: of this thread (``main``), of each Python thread that ends meanwhile by its name, and of
    all others (``native``: Arrow's, Lance's, the stream's worker) once the block is left."""
    found: Counter[str] = Counter()
    run = threading.Thread.run

    def counted(thread: threading.Thread) -> None:
        try:
            run(thread)
        finally:
            found[thread.name.partition("-")[0]] += time.thread_time()

    main, process = time.thread_time(), time.process_time()
    threading.Thread.run = counted
    try:
        yield found
    finally:
        threading.Thread.run = run
        found["main"] += time.thread_time() - main
        found["native"] += time.process_time() - process - found.total()


def measured(engine: Path, source: Path, out: Path) -> dict[str, float]:
    """One run: microseconds of CPU a record by thread, and the run's own figures."""
    shutil.rmtree(out, ignore_errors=True)
    policy = token_policy(FIELDS, None, read_contract(engine).limits)
    with Session.open(engine, tokenisation=policy.tokenisation()) as session:
        job = Job(open_input(str(source), FIELDS), FIELDS, policy, out, window_limits(session.contract.limits))
        ENGINE.reset()
        with cpu_by_thread() as cpu:
            report = run_job(job, session, None)
    if report.stored != report.read or report.stopped_by or report.shortfall:
        raise SystemExit(f"the run is not whole: {report.to_dict()}")
    figures = {name: seconds / report.stored * 1e6 for name, seconds in sorted(cpu.items())}
    figures["all"] = cpu.total() / report.stored * 1e6
    figures["wall"] = report.seconds / report.stored * 1e6
    figures["engine waited"] = ENGINE.idle_s / (ENGINE.idle_s + ENGINE.busy_s)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens-per-s", type=float, help="make the stand-in as slow as a card of this speed")
    parser.add_argument("--json", help="write the medians to this file")
    arguments = parser.parse_args()
    ENGINE.tokens_per_s = arguments.tokens_per_s
    report = {}
    with tempfile.TemporaryDirectory() as folder:
        engine = write_instant_engine(Path(folder) / "engine")
        for kind in ("jsonl", "parquet"):
            source = Path(folder) / f"ids.{kind}"
            write_ids(source, arguments.rows, arguments.length, SMOLLM2.vocab_size)
            rounds = [measured(engine, source, Path(folder) / "out") for _ in range(arguments.rounds)]
            report[kind] = {name: round(statistics.median(r[name] for r in rounds), 3) for name in rounds[0]}
            print(kind, "us a record:", ", ".join(f"{name} {value:g}" for name, value in report[kind].items()), flush=True)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({**vars(arguments), **report}, indent=1))


if __name__ == "__main__":
    main()
