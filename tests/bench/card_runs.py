"""Whole runs on a CUDA card beside the engine's own speed: a file of token ids to a closed dataset. One table, one JSON file.

    python tests/bench/card_runs.py FOLDER [--parts vectors states] [--json FILE]

Of the Llama-2-7B shape in FP8, with random weights. vectors: ``final@last`` to a Lance dataset in FOLDER. states: every token's
rows of the taps eagle3, dropped, to /dev/shm, to FOLDER, and what dd writes to either. The engine's own speed is one forward
pass after another over such a batch that lies on the card. For an engine of a checkpoint there is file_to_dataset.py.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import machine
import torch
from contenders import ROUNDS, Contender, on_device, sitting
from ids_files import FIELDS, write_ids
from our_contenders import pass_over
from random_sessions import random_session
from sequential import dd_speed
from torch_h200 import print_report
from torch_models import LLAMA_2_7B, contract_of, random_engine

sys.path.append(str(Path(__file__).resolve().parents[1]))

from fakes import byte_tokenizer  # noqa: E402
from states_extraction import NoStore  # noqa: E402

from tensorrt_llm_ext.checkpoint.architecture import Architecture  # noqa: E402
from tensorrt_llm_ext.inputs import open_input, token_policy  # noqa: E402
from tensorrt_llm_ext.job import Job, run, run_job, window_limits  # noqa: E402
from tensorrt_llm_ext.recipes.contract import Limits  # noqa: E402
from tensorrt_llm_ext.runtime import Session  # noqa: E402

LENGTH, STATES_LENGTH = 128, 512  # tokens a sequence
LIMITS = Limits(16384, 1024, 2048, 1 << 40)
MEMORY = Path("/dev/shm")


def main() -> None:
    arguments = _arguments()
    report = {"machine": machine.card(arguments.commit), "batch": {"num_tokens": 16384, "length": LENGTH, "long": 2048}}
    report |= {"sittings": [], "notes": []}
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        if "vectors" in arguments.parts:
            report["sittings"].append(vectors(Path(folder), arguments.rows))
        if "states" in arguments.parts:
            report["sittings"].append(states(Path(folder), arguments.state_rows, report["notes"]))
    print_report(report)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(report, file, indent=1)


def vectors(folder: Path, num_rows: int, a: Architecture = LLAMA_2_7B, limits: Limits = LIMITS) -> dict:
    """One long run: the card is timed before and after, as hot as the run left it."""
    name, session = "llama-2-7b fp8", _random_session(a, "final@last", limits)
    with session:
        prompts = folder / "vectors.jsonl"
        write_ids(prompts, num_rows, LENGTH, a.vocab_size)
        passes = [_passes(session, f"{name} passes, {when}", LENGTH) for when in ("before", "after")]
        ours = _run(session, f"{name} run to Lance", prompts, folder / "vectors", num_rows * LENGTH, [p.name for p in passes])
        return sitting("vectors", [passes[0], ours, passes[1]], num_rounds=1)


def states(
    folder: Path, num_rows: int, notes: list[str], a: Architecture = LLAMA_2_7B, limits: Limits = LIMITS, num_rounds: int = ROUNDS
) -> dict:
    """Every token's states in turn: computed, dropped, stored in memory and on disk, and what dd writes there."""
    name, session = "llama-2-7b fp8 eagle3", _random_session(a, "eagle3", limits)
    num_tokens = num_rows * STATES_LENGTH
    num_bytes = num_tokens * len(session.contract.taps) * a.hidden_size * 2  # bfloat16
    places = {"disk": folder}
    if shutil.disk_usage(MEMORY).free > 2 * num_bytes:
        places["memory"] = Path(tempfile.mkdtemp(dir=MEMORY))
    else:
        notes.append(f"states in {MEMORY} are left out: {2 * num_bytes / 1e9:.1f} GB are not free there")
    try:
        with session:
            prompts = folder / "states.jsonl"
            write_ids(prompts, num_rows, STATES_LENGTH, a.vocab_size)
            passes = _passes(session, f"{name} passes", STATES_LENGTH)
            contenders = [passes, _run(session, f"{name} run, dropped", prompts, folder / "out", num_tokens, [passes.name], is_stored=False)]
            for place, path in places.items():
                limit = Contender(f"dd to {place}", num_tokens, _dd(path, num_bytes))
                against = [passes.name, limit.name]
                contenders += [limit, _run(session, f"{name} run to {place}", prompts, path / "out", num_tokens, against)]
            found = sitting("states", contenders, num_rounds)
    finally:
        for path in set(places.values()) - {folder}:
            shutil.rmtree(path)
    for place in places:
        notes.append(_binding(found["ratios"], f"{name} run to {place}", {"the engine": passes.name, f"dd to {place}": f"dd to {place}"}))
    return found


def _binding(ratios: dict[str, float], ours: str, limits: dict[str, str]) -> str:
    """Say which limit is the lower one, and what share of it a run reaches."""
    share, what = max((ratios[f"{ours} / {limit}"], what) for what, limit in limits.items())
    return f"{ours}: {what} binds, and the run reaches {share:.3f} of it"


def _random_session(a: Architecture, taps: str, limits: Limits) -> Session:
    engine = random_engine(a, taps=taps, precision="fp8", limits=limits)
    return random_session(engine, contract_of(a, taps=taps, precision="fp8", limits=limits))


def _passes(session: Session, name: str, length: int) -> Contender:
    limits, engine = session.contract.limits, session._pipeline._engine
    num_tokens = min(limits.max_num_tokens, limits.opt_num_tokens or limits.max_num_tokens)
    lengths = [length] * min(num_tokens // length, limits.max_batch_size)
    with torch.inference_mode():
        call = pass_over(engine, lengths, session.contract.architecture.vocab_size)
    return Contender(name, sum(lengths), _in_inference(on_device(call)))


def _in_inference(measure: Callable[[], float]) -> Callable[[], float]:
    def measured() -> float:
        with torch.inference_mode():
            return measure()

    return measured


def _run(
    session: Session, name: str, prompts: Path, out: Path, num_tokens: int, against: list[str], *, is_stored: bool = True
) -> Contender:
    """A whole run of the job, from the file to the closed dataset, which is removed after the clock has stopped."""

    def measure() -> float:
        rows = session.contract.taps[0].rows
        policy = token_policy(FIELDS, byte_tokenizer(), session.contract.limits, loss_mask="ones" if rows == "all" else None)
        job = Job(open_input(str(prompts), FIELDS), FIELDS, policy, out, window_limits(session.contract.limits))
        original = run.opened_store
        if not is_stored:
            out.mkdir(parents=True)  # a real store makes it
            run.opened_store = NoStore
        started = time.perf_counter()
        try:
            report = run_job(job, session, byte_tokenizer())
            seconds = time.perf_counter() - started
        finally:
            run.opened_store = original
            shutil.rmtree(out, ignore_errors=True)
        if report.stopped_by or report.shortfall or report.failed or report.num_tokens != num_tokens:
            raise SystemExit(f"the run is not whole: {report}")
        return seconds * 1e3

    return Contender(name, num_tokens, measure, None, tuple(against))


def _dd(folder: Path, num_bytes: int) -> Callable[[], float]:
    return lambda: num_bytes / dd_speed(folder / "bench-dd", num_bytes) * 1e3


def _arguments() -> argparse.Namespace:
    parser = machine.arguments(__doc__)
    parser.add_argument("folder", type=Path, help="on the disk to measure")
    parser.add_argument("--parts", nargs="*", choices=("vectors", "states"), default=["vectors", "states"])
    parser.add_argument("--rows", type=int, default=50_000, help="sequences of 128 tokens for the vectors")
    parser.add_argument("--state-rows", type=int, default=384, help="sequences of 512 tokens for the states: 6.4 GB")
    return parser.parse_args()


if __name__ == "__main__":
    main()
