"""``export``: a dataset of states in the files that a trainer reads."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import click

from tensorrt_llm_ext.cli import verb


@verb
@click.argument("datasets", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--to",
    "format",
    required=True,
    type=click.Choice(["speculators-v2", "specforge", "modelopt", "parquet", "numpy", "hf-datasets"]),
    help="Who shall read it.",
)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="A new or empty folder.")
@click.option(
    "--checkpoint",
    "checkpoint_path",
    type=click.Path(path_type=Path),
    help="What the engine was built from: makes the state after the final norm from the one before it.",
)
def command(datasets: tuple[Path, ...], format: str, out: Path, checkpoint_path: Path | None, as_json: bool) -> None:
    """Write DATASETS, the output folder of a run with taps @all, in the files that a trainer reads.

    All parts of a sharded run may be named together; their sequences are written in the order of the input.
    speculators-v2 takes the last state before the final norm, specforge after it; modelopt takes either and is told which.
    export.json beside the files says which states they are.
    """
    from tensorrt_llm_ext.checkpoint import open_checkpoint
    from tensorrt_llm_ext.store import open_states
    from tensorrt_llm_ext.store.exports import export

    states = open_states(*datasets)
    with open_checkpoint(checkpoint_path) if checkpoint_path else nullcontext() as checkpoint:
        exported = export(states, out, format, checkpoint=checkpoint)
    if as_json:
        described = {
            "path": str(exported.path),
            "format": format,
            "sequences": exported.num_sequences,
            "tokens": exported.num_tokens,
            "left_out": list(exported.left_out),
        }
        click.echo(json.dumps(described))
        return
    click.echo(f"{exported.path}: {exported.num_sequences:,} sequences, {exported.num_tokens:,} tokens as {format}")
    if exported.left_out:
        click.echo(f"left out, for the format has no place for them: {', '.join(exported.left_out)}")
