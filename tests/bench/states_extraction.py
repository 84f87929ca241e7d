"""Extraction with storage against extraction without: ``python tests/bench/states_extraction.py ENGINE FOLDER [ROWS] [ROUNDS]``.

ENGINE is built with taps eagle3 (``trtllm-extract build --checkpoint … --taps eagle3 --out ENGINE``); the prompts are the demo's,
repeated to ROWS. Both are whole runs of the job (windows, canaries, records with their hashes), in turn, each round; one keeps
its records in a StatesStore in FOLDER, the other drops them. Prints the ratio of their speeds and the median.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from itertools import cycle, islice
from pathlib import Path

from tensorrt_llm_ext.checkpoint import Tokenizer
from tensorrt_llm_ext.inputs import Fields, open_input, token_policy
from tensorrt_llm_ext.job import Job, run, run_job, window_limits
from tensorrt_llm_ext.job.job import header_of
from tensorrt_llm_ext.recipes import read_contract
from tensorrt_llm_ext.runtime import Session

FIELDS = Fields()
PROMPTS = Path(__file__).resolve().parents[2] / "demo" / "prompts.jsonl"


class NoStore:
    """Takes every record and keeps none."""

    def __init__(self, job, session):
        self.header = header_of(job, session)
        self.path = job.out
        self.settled_rows = self.settled_end = self.num_rows = self.num_bytes = 0

    def extend(self, rows, items, records):
        self.num_rows += len(records)

    def commit(self, window_end):
        self.settled_end = window_end

    def identities(self):
        return iter(())

    def expected_bytes(self, num_rows, num_tokens):
        return 0

    def flush(self):
        """Nothing to flush."""

    def seal(self):
        """Nothing to seal."""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        """Nothing to close."""


def speed(session, tokenizer, policy, prompts, out, *, is_stored):
    shutil.rmtree(out, ignore_errors=True)
    if not is_stored:
        out.mkdir(parents=True)  # a real store makes it
    job = Job(open_input(str(prompts), FIELDS), FIELDS, policy, out, window_limits(session.contract.limits))
    original = run.opened_store
    run.opened_store = original if is_stored else NoStore
    try:
        report = run_job(job, session, tokenizer)
    finally:
        run.opened_store = original
        shutil.rmtree(out)
    if report.shortfall or report.stopped_by or not report.stored:
        raise SystemExit(f"the run is not whole: {report}")
    return report.num_tokens / report.seconds


def main(engine, folder, num_rows="512", rounds="5"):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    texts = [json.loads(line)["text"] for line in PROMPTS.read_text().splitlines()]
    prompts = folder / "bench-prompts.jsonl"
    prompts.write_text("".join(json.dumps({"text": text}) + "\n" for text in islice(cycle(texts), int(num_rows))))
    ratios = []
    tokenizer = Tokenizer.load(Path(engine))
    policy = token_policy(FIELDS, tokenizer, read_contract(Path(engine)).limits, loss_mask="ones")
    with Session.open(engine, tokenisation=policy.tokenisation()) as session:
        for number in range(int(rounds)):
            order = (True, False) if number % 2 else (False, True)
            found = {kept: speed(session, tokenizer, policy, prompts, folder / "bench-out", is_stored=kept) for kept in order}
            ratios.append(found[True] / found[False])
            stored, dropped = (f"{found[kept]:,.0f} tokens/s" for kept in (True, False))
            print(f"round {number}: {stored} stored, {dropped} dropped, ratio {ratios[-1]:.3f}", flush=True)
    prompts.unlink()
    print(f"median ratio {statistics.median(ratios):.3f} of {len(ratios)} rounds")


if __name__ == "__main__":
    main(*sys.argv[1:])
