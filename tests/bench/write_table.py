"""Writes the CPU table of README.md: builds an engine of SmolLM2-135M, runs bench on the demo's prompts.

    .venv/bin/python tests/bench/write_table.py            # minutes, on a quiet machine; README.md changes in place

The table goes between the markers ``<!-- bench:cpu -->`` and ``<!-- /bench:cpu -->``. No number of it is typed by hand.
"""

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

import tiny  # noqa: E402  beside this folder

from tensorrt_llm_ext import checks  # noqa: E402
from tensorrt_llm_ext.builder import build_engine  # noqa: E402
from tensorrt_llm_ext.checkpoint import open_checkpoint  # noqa: E402
from tensorrt_llm_ext.inputs import Fields  # noqa: E402
from tensorrt_llm_ext.runtime import Session  # noqa: E402

README = ROOT / "README.md"


def measured(num_rounds: int = checks.NUM_ROUNDS) -> checks.BenchResult:
    """Build and bench: float32, final@last, every core."""
    path, num_threads = tiny.smollm2_gguf(), checks.usable_cores()
    with tempfile.TemporaryDirectory() as folder:
        build_engine(path, Path(folder) / "engine", recipe="smollm2-135m")
        with open_checkpoint(path) as checkpoint, Session.open(Path(folder) / "engine", num_threads=num_threads) as session:
            prompts = checks.read_prompts(None, Fields(), session.contract, checkpoint.tokenizer())
            return checks.bench(session, checkpoint, prompts.items, num_threads=num_threads, num_rounds=num_rounds)


def table(result: checks.BenchResult) -> str:
    """The result as Markdown: what was run, where, and how fast."""
    ours = result.timings[0].tokens_per_s
    rows = [
        f"| {timing.name} | {timing.dtype} | {timing.batching} | {timing.tokens_per_s:,.0f} "
        f"| {ours / timing.tokens_per_s:.2f} | {'' if timing.min_cosine is None else f'{timing.min_cosine:.6f}'} |"
        for timing in result.timings
    ]
    machine = result.machine
    return "\n".join(
        [
            f"{result.model}: {result.num_prompts} prompts of 1 to {result.longest} tokens, {result.num_tokens:,} in all; "
            f"{result.num_threads} threads of {machine['cpu']}; median of {result.num_rounds} interleaved rounds.",
            "",
            "| | type | batches | tokens/s | our speed over theirs | smallest cosine to transformers float32 |",
            "|---|---|---|---:|---:|---:|",
            *rows,
            "",
            *(f"{note}." for note in result.notes),
            f"onnxruntime {machine['onnxruntime']}, torch {machine['torch']}, transformers {machine['transformers']}, "
            f"Python {machine['python']}, {machine['system']}; commit {machine['commit']}.",
        ]
    )


def replaced(text: str, new: str, name: str = "cpu") -> str:
    """The text with ``new`` between the markers of ``name``. Exits when it does not have both, once each and in order."""
    begin, end = f"<!-- bench:{name} -->", f"<!-- /bench:{name} -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        sys.exit(f"expected one {begin} and, after it, one {end}")
    before, rest = text.split(begin)
    return f"{before}{begin}\n{new}\n{end}{rest.split(end)[1]}"


if __name__ == "__main__":
    replaced(README.read_text(encoding="utf-8"), "")  # before the minutes, not after
    README.write_text(replaced(README.read_text(encoding="utf-8"), table(measured())), encoding="utf-8")
