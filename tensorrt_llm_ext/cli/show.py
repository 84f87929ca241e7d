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
    from tensorrt_llm_ext.checks import Description, EngineComparison


@verb
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--against", type=click.Path(path_type=Path), help="Another engine: list the fields in which the two differ, and why.")
def command(path: Path, against: Path | None, as_json: bool) -> None:
    """Say in words what PATH is.

    Known are checkpoints (Hugging Face folders, GGUF files), recipes, cards, engines, contracts, record payloads and
    datasets. The content decides, not the name. Weights are never loaded, and no GPU is needed.

    Exit code 1: PATH is none of these, or not the same engine as the one it is held against.
    """
    from tensorrt_llm_ext.checks import compare_engines, describe

    if against is not None:
        comparison = compare_engines(path, against)
        if as_json:
            click.echo(json.dumps({"path": str(path), "against": str(against), **dataclasses.asdict(comparison)}))
        else:
            _print_comparison(comparison)
        sys.exit(0 if comparison.is_same_engine else 1)
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


def _print_comparison(comparison: EngineComparison) -> None:
    from tensorrt_llm_ext.cli._terminal import print_table

    verdict = "The same engine" if comparison.is_same_engine else "Not the same engine"
    if not comparison.differences:
        click.echo(f"{verdict}: the contracts are equal.")
        return
    rows = [
        [difference.field, "yes" if difference.is_identity else "no", difference.here or "none", difference.there or "none"]
        for difference in comparison.differences
    ]
    print_table(f"{verdict}. The contracts differ in:", ["field", "decides the engine", "PATH", "--against"], rows)
    for reason in comparison.reasons:
        click.echo(f"Why: {reason}.")
