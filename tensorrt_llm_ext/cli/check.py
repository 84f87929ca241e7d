"""``check``: whether datasets are still what was written."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import click

from tensorrt_llm_ext.cli import verb


@verb
@click.argument("datasets", nargs=-1, required=True, type=click.Path(path_type=Path))
def command(datasets: tuple[Path, ...], as_json: bool) -> None:
    """Hash everything in DATASETS again and account for every row.

    A dataset is an output folder of run, or a partition of store. Every file is hashed and every request's tokens and rows;
    a row of the input of a run that is neither stored nor refused nor failed is found. Several folders are checked one by
    one; states of a sharded run (--shard), or of a stream, also together.

    Exit code 1: something is damaged, missing, there twice, or not finished.
    """
    from rich.filesize import decimal

    from tensorrt_llm_ext.checks.whole import check_dataset
    from tensorrt_llm_ext.store import STATES_NAME, open_states

    found = [check_dataset(path) for path in datasets]
    is_right = not any(whole.damages for whole in found)
    states = [path for path, whole in zip(datasets, found, strict=True) if whole.dataset.name == STATES_NAME]
    if is_right and len(states) > 1:
        open_states(*states)
    if as_json:
        described = [{**dataclasses.asdict(whole), "dataset": str(whole.dataset)} for whole in found]
        click.echo(json.dumps({"is_whole": is_right, "datasets": described}))
    else:
        for whole in found:
            click.echo(f"{whole.dataset}: {whole.num_rows:,} requests, {decimal(whole.num_bytes)}, every hash computed again")
            for damage in whole.damages:
                click.echo(f"  DAMAGED {damage.place}\n    expected: {damage.expected}\n    found:    {damage.found}")
        click.echo("Everything is as it was written." if is_right else "Not everything is as it was written.")
    sys.exit(0 if is_right else 1)
