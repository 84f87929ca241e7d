"""``build``: from a checkpoint to an engine directory."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click

from tensorrt_llm_ext.cli import verb


@verb
@click.argument("recipe", required=False)
@click.option("--checkpoint", required=True, type=click.Path(path_type=Path), help="A Hugging Face folder or a GGUF file.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The engine directory to make.")
@click.option(
    "--card",
    "cards",
    multiple=True,
    default=["cpu"],
    help="A card of build_recipes/cards/, several with commas, or the path of a TOML file; repeatable.",
)
@click.option("--taps", help="For example 'final@last,layer:16@mean', or eagle3.  [default: the recipe's, or final@last]")
@click.option("--precision", help="float32, float16 …  [default: the recipe's, or the card's first]")
@click.option("--calibration", type=click.Path(path_type=Path), help="Text that fp8 is measured on.  [default: the demo's prompts]")
@click.option("--max-seq-len", type=click.IntRange(min=1), help="Tokens of the longest sequence.  [default: the recipe's]")
@click.option("--deterministic", is_flag=True, help="The same bytes in any batch; backend torch.  [default: the recipe's]")
def command(
    recipe: str | None,
    checkpoint: Path,
    out: Path,
    cards: tuple[str, ...],
    taps: str | None,
    precision: str | None,
    calibration: Path | None,
    max_seq_len: int | None,
    deterministic: bool,
    as_json: bool,
) -> None:
    """Build an engine from a checkpoint.

    RECIPE is a name of build_recipes/ or the path of a TOML file; without one, sound defaults for any checkpoint that
    is served. Options go before the recipe, the recipe before the card. The engine appears whole, or not at all.

    Several cards (--card l40s,rtx5090) get one engine: TensorRT-RTX compiles one plan for all their compute
    capabilities. Cards of different backends or hosts are built once for each.
    """
    from tensorrt_llm_ext.builder import build_engine
    from tensorrt_llm_ext.checks import describe
    from tensorrt_llm_ext.cli._terminal import steps_shown
    from tensorrt_llm_ext.cli.show import print_description

    with steps_shown() as progress:
        contract = build_engine(
            checkpoint,
            out,
            recipe=recipe,
            card=[name for text in cards for name in _names(text)],
            taps=taps,
            precision=precision,
            max_seq_len=max_seq_len,
            is_deterministic=deterministic or None,
            calibration=calibration,
            progress=progress,
        )
    description = describe(out)
    if as_json:
        click.echo(json.dumps({"engine": str(out), **dataclasses.asdict(description), "build": contract.build}))
        return
    print_description(description)
    peak = contract.build["peak_rss_bytes"] / 1e6
    click.echo(f"Built in {contract.build['seconds']:.1f} s with {peak:,.0f} MB at most: {out}")
    click.echo(f"Next: trtllm-extract run {out} --input prompts.jsonl --out vectors")


def _names(text: str) -> list[str]:
    """The cards of one option: names with commas, or a path, which may hold commas."""
    return [text] if text.endswith(".toml") else text.split(",")
