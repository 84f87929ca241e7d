"""``verify``: an engine's hidden states against transformers in float32."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tensorrt_llm_ext.cli import verb

if TYPE_CHECKING:
    from tensorrt_llm_ext.checks import Prompts, Verification


@verb
@click.argument("engine", type=click.Path(path_type=Path))
@click.option("--checkpoint", required=True, type=click.Path(path_type=Path), help="What the engine was built from.")
@click.option("--input", "input_path", help="A file of prompts, as for run.  [default: the demo's prompts]")
@click.option("--text-field", default="text", help="The field of the input that holds the prompt.")
@click.option("--limit", type=click.IntRange(min=1), help="Read so many rows of the input.  [default: all]")
@click.option("--threads", type=click.IntRange(min=1), help="Threads of a CPU backend.  [default: the library's choice]")
@click.option("--update-canaries", is_flag=True, help="If all is right, replace the engine's canaries by the reference's.")
def command(
    engine: Path,
    checkpoint: Path,
    input_path: str | None,
    text_field: str,
    limit: int | None,
    threads: int | None,
    update_canaries: bool,
    as_json: bool,
) -> None:
    """Compare an engine's hidden states with transformers in float32.

    Every tap, every prompt, every value; layer by layer, so that the model need not fit into memory. Needs the extra
    'verify' (torch and transformers).

    Exit code 1: the numbers lie beyond the stated tolerance.
    """
    from tensorrt_llm_ext import checks
    from tensorrt_llm_ext.checkpoint import open_checkpoint
    from tensorrt_llm_ext.cli._terminal import steps_shown
    from tensorrt_llm_ext.inputs import Fields
    from tensorrt_llm_ext.runtime import Session

    with open_checkpoint(checkpoint) as opened, Session.open(engine, num_threads=threads, prove=False) as session:
        contract = session.contract
        prompts = checks.read_prompts(input_path, Fields(text=text_field), contract, opened.tokenizer(), limit=limit)
        with steps_shown() as progress:
            result = checks.verify(session, opened, prompts.items, progress=lambda d, t: progress("reference layers", d, t))
            is_updated = update_canaries and result.has_passed
            if is_updated:
                checks.update_canaries(engine, contract, opened, progress=lambda d, t: progress("canary layers", d, t))
    if as_json:
        refused = [{"row": row.number, **row.refusal.to_dict()} for row in prompts.refused]
        click.echo(json.dumps({**result.to_dict(), "refused": refused, "canaries_updated": is_updated}, allow_nan=False))
        sys.exit(0 if result.has_passed else 1)
    _print(result, prompts)
    if is_updated:
        click.echo(f"The engine's canaries are now those of {result.source}.")
    result.raise_if_failed()
    rounding = ", or off it by rounding" if result.second_opinions else ""
    click.echo(f"Right: every row lies within the tolerance for {result.dtype}{rounding}.")


def _print(result: Verification, prompts: Prompts) -> None:
    from tensorrt_llm_ext.cli._terminal import print_table

    print_table(
        f"{result.num_prompts} prompts, {result.num_tokens:,} tokens of {prompts.source} against {result.source} float32",
        ["tap", "rows", "beyond", "largest difference", "limit there", "where: request, row, column", "expected", "found"]
        + ["mean cosine", "0.1 % below", "smallest cosine", "where: request, row"],
        [
            [
                tap.tap,
                f"{tap.num_rows:,}",
                f"{tap.num_rows_beyond:,}",
                f"{tap.largest.difference:.3g}",
                f"{tap.largest.limit:.3g}",
                f"{tap.largest.request_id}, {tap.largest.row}, {tap.largest.column}",
                f"{tap.largest.expected:.7g}",
                f"{tap.largest.found:.7g}",
                f"{tap.mean_cosine:.9f}",
                f"{tap.lowest_cosine:.9f}",
                f"{tap.smallest_cosine.cosine:.9f}",
                f"{tap.smallest_cosine.request_id}, {tap.smallest_cosine.row}",
            ]
            for tap in result.taps
        ],
    )
    for opinion in result.second_opinions:
        verdict = "float32's own rounding" if opinion.is_rounding else "wrong"
        click.echo(
            f"Row {opinion.row} of '{opinion.request_id}', {opinion.tap}, is {verdict}: from float64 it is "
            f"{opinion.from_float64:.3g} away, and {result.source} in float32 {opinion.reference_from_float64:.3g}."
        )
    tokens = result.next_tokens
    click.echo(
        f"Next token: the same for {tokens.num_prompts - tokens.num_different} of {tokens.num_prompts} prompts."
        if tokens
        else f"Next token: {result.next_tokens_note}."
    )
    if prompts.refused:
        click.echo(f"Not compared: {len(prompts.refused)} refused rows, the first: {prompts.refused[0].refusal.what}.")
