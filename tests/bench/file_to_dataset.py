"""From a file of ids to a closed Lance dataset against the engine's own speed: one process, rounds in turn.

    python tests/bench/file_to_dataset.py ENGINE FOLDER [--rows 50000] [--length 128] [--rounds 3] [--format parquet|jsonl]

ENGINE was built with one-row taps (``trtllm-extract build … --taps final@last``); the sequences are random ids. The engine's own
speed is that of the same batches through the same session with nothing read and nothing stored. A run is the whole of it: the
file is opened, the dataset made, filled, committed and closed. Each has fixed seconds (until the first batch is back, and behind
the last); a million sequences are extrapolated as those plus the rest in proportion.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import time
from collections import Counter, deque
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import machine
from ids_files import FIELDS, write_ids

from tensorrt_llm_ext.inputs import open_input, token_policy, work_items
from tensorrt_llm_ext.job import Job, run_job, window_limits
from tensorrt_llm_ext.job.ahead import Ahead
from tensorrt_llm_ext.job.windows import windows
from tensorrt_llm_ext.job.writer import Writer
from tensorrt_llm_ext.runtime import Session, batches, session as session_module
from tensorrt_llm_ext.runtime.pipeline import Pipeline

MILLION = 1_000_000
_WAITS = "waiting for the reader", "waiting for the card", "waiting for the writer"


@dataclass
class Timed:
    """One pass over all sequences."""

    start: float
    landings: list[tuple[float, int]]  # of each batch: when it was back, and how many rows were back then
    end: float

    @property
    def num_rows(self) -> int:
        return self.landings[-1][1]

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def fixed_seconds(self) -> float:
        """Until the first batch is back, and behind the last."""
        return self.seconds - (self.landings[-1][0] - self.landings[0][0])

    def seconds_for(self, num_rows: int) -> float:
        (first, num_first), (last, num_last) = self.landings[0], self.landings[-1]
        return self.fixed_seconds + (last - first) * (num_rows - num_first) / (num_last - num_first)


def engine_alone(session: Session, groups: list) -> Timed:
    """Every batch through the session, as many in flight as it holds; the answers are dropped."""
    start = time.perf_counter()
    in_flight, landings, num_rows = deque(), [], 0
    for batch in [*groups, *[None] * session.num_slots]:
        if len(in_flight) == session.num_slots or (batch is None and in_flight):
            num_rows += len(in_flight.popleft().wait())
            landings.append((time.perf_counter(), num_rows))
        if batch is not None:
            in_flight.append(session.submit(batch))
    return Timed(start, landings, time.perf_counter())


def file_to_dataset(session: Session, job: Job) -> tuple[Timed, dict[str, float]]:
    """The whole run, and where its main thread's time went, in seconds."""
    shutil.rmtree(job.out, ignore_errors=True)
    landings: list[tuple[float, int]] = []
    start = time.perf_counter()
    with main_thread_watched() as spent:
        landed = lambda progress: landings.append((time.perf_counter(), progress.num_rows))  # noqa: E731
        report = run_job(job, session, None, on_progress=landed)
    end = time.perf_counter()
    if report.stored != report.read or report.stopped_by or report.shortfall:
        raise SystemExit(f"the run is not whole: {report.to_dict()}")
    spent["all else"] = end - start - sum(spent.values())
    return Timed(start, landings, end), dict(spent)


@contextmanager
def main_thread_watched():
    """Add up the seconds that the thread which feeds the engine spends waiting and working, by what for."""
    spent: Counter[str] = Counter(dict.fromkeys(_WAITS, 0.0))

    def timed(name, call):
        def wrapped(*args, **options):
            start = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                spent[name] += time.perf_counter() - start

        return wrapped

    def waited(self, _original=Ahead.__iter__):
        results = _original(self)
        while (result := timed("waiting for the reader", lambda: next(results, waited))()) is not waited:
            yield result

    @contextmanager
    def wait(self, flight, timeout_s, _original=Pipeline.wait):
        with ExitStack() as stack:
            yield timed("waiting for the card", stack.enter_context)(_original(self, flight, timeout_s))

    with ExitStack() as stack:
        patched = [(Ahead, "__iter__", waited), (Pipeline, "wait", wait)]
        for place, name, what in (
            (session_module, "records", "making records"),
            (session_module, "flattened", "packing and enqueueing"),
            (Pipeline, "pack", "packing and enqueueing"),
            (Pipeline, "enqueue", "packing and enqueueing"),
            (Writer, "put", "waiting for the writer"),
            (Writer, "commit", "waiting for the writer"),
        ):
            patched.append((place, name, timed(what, getattr(place, name))))
        for place, name, replacement in patched:
            stack.enter_context(mock.patch.object(place, name, replacement))
        yield spent


def grouped(source: Path, policy, contract) -> list:
    """The batches that the job forms of the file."""
    vocab_size = contract.architecture.vocab_size
    rows = work_items(open_input(str(source), FIELDS).pieces(), FIELDS, None, policy, vocab_size=vocab_size, source=source.name)
    limits = contract.limits
    return [
        batch
        for window in windows(rows, window_limits(limits))
        for batch in batches([row.item for row in window.accepted], limits)
    ]


def measured(session: Session, arguments: argparse.Namespace) -> dict:
    """Both in turn, ``arguments.rounds`` times."""
    contract, folder = session.contract, arguments.folder
    source = folder / f"ids.{arguments.format}"
    write_ids(source, arguments.rows, arguments.length, contract.architecture.vocab_size)
    policy = token_policy(FIELDS, None, contract.limits)
    groups = grouped(source, policy, contract)
    engine_alone(session, groups[:64])  # every shape has run
    rounds = []
    for number in range(arguments.rounds):
        job = Job(open_input(str(source), FIELDS), FIELDS, policy, folder / "dataset", window_limits(contract.limits))
        alone = engine_alone(session, groups) if number % 2 == 0 else None
        run, spent = file_to_dataset(session, job)
        rounds.append(_round(alone or engine_alone(session, groups), run, spent, arguments.length))
        print(f"round {number}: " + ", ".join(f"{name} {rounds[-1][name]:.4g}" for name in ("ratio", "ratio of a million")), flush=True)
    source.unlink()
    return {
        "rows": arguments.rows,
        "length": arguments.length,
        "format": arguments.format,
        "batches": len(groups),
        "slots": session.num_slots,
        "model": contract.model_name,
        "precision": contract.activation_dtype,
        "taps": [tap.spelling(contract.architecture.num_layers) for tap in contract.taps],
        "rounds": rounds,
        "median": {name: statistics.median(found[name] for found in rounds) for name in rounds[0]},
    }


def _round(alone: Timed, run: Timed, spent: dict[str, float], length: int) -> dict[str, float]:
    assert alone.num_rows == run.num_rows, "the two did not answer the same sequences"
    found = {
        "engine records/s": alone.num_rows / alone.seconds,
        "engine tokens/s": alone.num_rows * length / alone.seconds,
        "run records/s": run.num_rows / run.seconds,
        "run tokens/s": run.num_rows * length / run.seconds,
        "ratio": alone.seconds / run.seconds,
        "ratio of a million": alone.seconds_for(MILLION) / run.seconds_for(MILLION),
        "seconds for a million": run.seconds_for(MILLION),
        "fixed seconds of a run": run.fixed_seconds,
    }
    return found | {f"main thread: {name}": seconds / run.seconds for name, seconds in spent.items()}  # shares of the run


def main() -> None:
    parser = machine.arguments(__doc__)
    parser.add_argument("engine", type=Path, help="an engine directory")
    parser.add_argument("folder", type=Path, help="where the file and the dataset are written; the dataset stays")
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slots", type=int, default=session_module.NUM_SLOTS, help="batches in flight")
    parser.add_argument("--format", choices=["parquet", "jsonl"], default="parquet")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with Session.open(arguments.engine, num_slots=arguments.slots) as session:
        has_card = bool(session.contract.compute_capabilities)
        report = {"machine": machine.card(arguments.commit) if has_card else {"card": None, "commit": arguments.commit}}
        report |= measured(session, arguments)
    print(json.dumps(report["machine"]))
    print(f"{report['model']} {report['precision']}, {report['rows']:,} x {report['length']} ids from {report['format']}, medians:")
    for name, value in report["median"].items():
        print(f"  {name:40}{f'{value:.1%}' if name.startswith('main') else f'{value:,.4g}' if value < 1000 else f'{value:,.0f}':>14}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
