"""``bench``: tokens per second beside transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tensorrt_llm_ext.cli import verb

if TYPE_CHECKING:
    from tensorrt_llm_ext.checks import BenchResult


@verb
@click.argument("engine", type=click.Path(path_type=Path))
@click.option("--checkpoint", required=True, type=click.Path(path_type=Path), help="What the engine was built from.")
@click.option("--input", "input_path", help="A file of prompts, as for run.  [default: the demo's prompts]")
@click.option("--text-field", default="text", help="The field of the input that holds the prompt.")
@click.option("--limit", type=click.IntRange(min=1), help="Read so many rows of the input.  [default: all]")
@click.option("--rounds", type=click.IntRange(min=1), help="Rounds of every contender; the median counts.  [default: 3]")
@click.option("--threads", type=click.IntRange(min=1), help="Threads of every contender.  [default: one a core]")
def command(
    engine: Path,
    checkpoint: Path,
    input_path: str | None,
    text_field: str,
    limit: int | None,
    rounds: int | None,
    threads: int | None,
    as_json: bool,
) -> None:
    """Time an engine beside transformers: same prompts, same threads or card, one run.

    transformers runs where the engine runs, padded in the order given and sorted by length, in float32 and, where the CPU
    has it, in bfloat16; on a card compiled, too. An engine of backend torch is timed beside its matrix products alone.
    Needs the extra 'verify' (torch and transformers), and memory for the whole model.
    """
    from tensorrt_llm_ext import checks
    from tensorrt_llm_ext.checkpoint import open_checkpoint
    from tensorrt_llm_ext.cli._terminal import steps_shown
    from tensorrt_llm_ext.inputs import Fields
    from tensorrt_llm_ext.runtime import Session

    threads = threads or checks.usable_cores()
    with open_checkpoint(checkpoint) as opened, Session.open(engine, num_threads=threads) as session:
        fields = Fields(text=text_field)
        prompts = checks.read_prompts(input_path, fields, session.contract, opened.tokenizer(), limit=limit)
        with steps_shown() as progress:
            result = checks.bench(
                session,
                opened,
                prompts.items,
                num_threads=threads,
                num_rounds=rounds or checks.NUM_ROUNDS,
                on_round=progress,
            )
    if as_json:
        refused = [{"row": row.number, **row.refusal.to_dict()} for row in prompts.refused]
        click.echo(json.dumps({**result.to_dict(), "source": prompts.source, "refused": refused}))
    else:
        _print(result)


def _print(result: BenchResult) -> None:
    from tensorrt_llm_ext.checks.bench import PRODUCTS_ALONE
    from tensorrt_llm_ext.cli._terminal import print_table

    print_table(
        f"{result.model}: {result.num_prompts} prompts, {result.num_tokens:,} tokens, {result.num_threads} threads, "
        f"median of {result.num_rounds} rounds",
        ["", "type", "batches", "tokens/s", "prompts/s", "smallest cosine"],
        [
            [
                timing.name,
                timing.dtype,
                timing.batching,
                f"{timing.tokens_per_s:,.0f}",
                f"{timing.prompts_per_s:,.1f}",
                "-" if timing.min_cosine is None else f"{timing.min_cosine:.6f}",
            ]
            for timing in result.timings
        ],
    )
    for name, ratio in result.ratios.items():
        if name == PRODUCTS_ALONE:
            click.echo(f"{ratio:.3f} of the speed of its products alone")
            continue
        dtype, order = name.split("_", 1)
        click.echo(f"{ratio:.2f} times transformers {dtype}, {order.replace('_', ' ')}")
    for note in result.notes:
        click.echo(note)
    click.echo(", ".join(f"{name} {value}" for name, value in result.machine.items()))
