"""``show``: say in words what lies at a path."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tensorrt_llm_ext.cli import verb

if TYPE_CHECKING:
    from tensorrt_llm_ext.checks import Description


@verb
@click.argument("path", type=click.Path(path_type=Path))
def command(path: Path, as_json: bool) -> None:
    """Say in words what PATH is.

    Known are checkpoints (Hugging Face folders, GGUF files), recipes, cards, engines, contracts, record payloads and
    datasets. The content decides, not the name. Weights are never loaded, and no GPU is needed.

    Exit code 1: PATH is none of these.
    """
    from tensorrt_llm_ext.checks import describe

    description = describe(path)
    if as_json:
        click.echo(json.dumps({"path": str(path), **dataclasses.asdict(description)}))
    else:
        print_description(description)
    sys.exit(1 if description.kind == "unknown" else 0)


def print_description(description: Description) -> None:
    """Print the kind and title, then one fact a line; the items of a list one below the other."""
    click.echo(f"{description.kind}: {description.title}")
    width = max(map(len, description.facts), default=0)
    for name, fact in description.facts.items():
        first, *rest = map(str, fact) if isinstance(fact, list) else [str(fact)]
        click.echo(f"  {name.replace('_', ' '):<{width}}  {first}")
        for line in rest:
            click.echo(f"  {'':<{width}}  {line}")
