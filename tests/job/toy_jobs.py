"""Jobs over toy engines: small inputs, small windows, and everything that is in an output folder."""

from __future__ import annotations

import json
from pathlib import Path

import lance
import numpy as np
import pyarrow.parquet as pq
import safetensors.numpy
from toy_engines import HIDDEN_SIZE, NAN_TOKEN, VOCAB_SIZE

from fakes import byte_tokenizer
from tensorrt_llm_ext.inputs import Fields, open_input, token_policy
from tensorrt_llm_ext.job import Job, Report, WindowLimits, run_job
from tensorrt_llm_ext.recipes.contract import Limits
from tensorrt_llm_ext.runtime import Session

FIELDS = Fields(ids="ids", request_id="id")
LIMITS = Limits(max_num_tokens=32, max_batch_size=5, max_seq_len=32, max_padded_tokens=40)  # a few batches a window
WINDOWS = WindowLimits(max_rows=8, max_tokens=60)
BAD_ROWS = {7: "not json", 19: json.dumps({"id": "r19"}), 33: json.dumps({"id": "r33", "ids": [VOCAB_SIZE]})}
NAN_ROW = 26
SHARD_BYTES = 90 * (HIDDEN_SIZE * 4 + 5)  # 90 tokens of one tap: one or two windows


def write_input(path: Path, num_rows: int = 50, seed: int = 3, bad_rows: dict[int, str] = BAD_ROWS) -> Path:
    """Write rows of 1 to 20 token ids each, with ids ``r0``, ``r1`` …"""
    rng = np.random.default_rng(seed)
    lines = []
    for row in range(num_rows):
        ids = rng.integers(0, NAN_TOKEN, size=rng.integers(1, 21)).tolist()
        if row == NAN_ROW:
            ids[-1] = NAN_TOKEN
        lines.append(bad_rows.get(row) or json.dumps({"id": f"r{row}", "ids": ids}))
    path.write_text("".join(line + "\n" for line in lines))
    return path


def make_job(session: Session, prompts: Path, out: Path, fields: Fields = FIELDS, tokenizer=None, **options) -> Job:
    """A job for an open session; options of the token policy and of the job."""
    if session.contract.taps[0].rows == "all" and "taps" not in options:
        options = {"loss_mask": "ones", "shard_bytes": SHARD_BYTES, **options}
    of_tokens = {name: options.pop(name) for name in ("max_length", "too_long", "loss_mask") if name in options}
    policy = token_policy(fields, tokenizer or byte_tokenizer(), session.contract.limits, **of_tokens)
    return Job(open_input(str(prompts), fields), fields, **{"policy": policy, "windows": WINDOWS, "out": out, **options})


def run(engine, prompts, out, *, wrap=lambda session: session, stop=None, progress=None, **options) -> Report:
    """Open the engine and run a job; ``wrap`` may put something between the job and the session."""
    with Session.open(engine, num_threads=1) as session:
        job = make_job(session, prompts, out, **options)
        return run_job(job, wrap(session), byte_tokenizer(), stop=stop, on_progress=progress)


def table_of(out: Path):
    return lance.dataset(str(out / "vectors.lance")).to_table()


def ledger_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def contents_of(out: Path) -> tuple:
    """All that a reader finds: the rows, in order, byte for byte, and both ledgers."""
    ledgers = ledger_of(out / "refused.jsonl"), ledger_of(out / "failed.jsonl")
    if (out / "states").exists():
        files = sorted(path for path in (out / "states").rglob("*") if path.is_file())
        return [(path.relative_to(out), path.read_bytes()) for path in files], *ledgers
    return table_of(out).to_pylist(), *ledgers


def rows_of_states(out: Path) -> dict[int, tuple[dict, np.ndarray, np.ndarray]]:
    """By input row: its entry in the index, its token ids, its rows of the first tap."""
    found = {}
    for entry in pq.read_table(out / "states" / "index").to_pylist():
        shard = safetensors.numpy.load_file(out / "states" / entry["shard"])
        place = slice(entry["first_row"], entry["first_row"] + entry["num_rows"])
        assert entry["row"] not in found, "a row is there twice"
        found[entry["row"]] = entry, shard["token_ids"][place], shard[entry["taps"].split(",")[0]][place]
    return found
