"""``probe``: what an engine is, which rows it reads, and whether it still gives the right numbers."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tensorrt_llm_ext.cli import verb

if TYPE_CHECKING:
    from tensorrt_llm_ext.runtime import CanaryDistance, ConventionEvidence


@verb
@click.argument("engine", type=click.Path(path_type=Path))
@click.option("--full", is_flag=True, help="Hash every file of the engine again.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads of a CPU backend.  [default: the library's choice]")
def command(engine: Path, full: bool, threads: int | None, as_json: bool) -> None:
    """Show an engine's contract, measure its gather convention, run its canaries.

    Exit code 1: the engine does not give the numbers its contract promises.
    """
    from tensorrt_llm_ext.checks import describe
    from tensorrt_llm_ext.cli.show import print_description
    from tensorrt_llm_ext.errors import CanaryError
    from tensorrt_llm_ext.recipes import read_contract
    from tensorrt_llm_ext.runtime import Session, check_files

    contract = read_contract(engine)
    check_files(engine, contract, is_full=full)
    with Session.open(engine, num_threads=threads, prove=False) as session:
        try:
            distances, wrong = session.check_canaries(), None
        except CanaryError as error:
            distances, wrong = [], error
        evidence = session.evidence
    description = describe(engine)
    if as_json:
        value = {
            "engine": str(engine),
            "title": description.title,
            "contract": dataclasses.replace(contract, canaries=()).to_dict(),
            "files_hashed": full,
            "convention": dataclasses.asdict(evidence),
            "canaries": [dataclasses.asdict(distance) for distance in distances],
            "canary_error": wrong and wrong.to_dict(),
        }
        click.echo(json.dumps(value))
        sys.exit(1 if wrong else 0)
    print_description(description)
    if full:
        click.echo(f"Every file has the hash it was published with ({len(contract.files)} files).")
    num_layers = contract.architecture.num_layers
    _print_evidence(evidence, num_layers)
    _print_canaries(distances, num_layers)
    if wrong is not None:
        raise wrong


def _print_evidence(evidence: ConventionEvidence, num_layers: int) -> None:
    from tensorrt_llm_ext.cli._terminal import print_table

    print_table(
        f"Gather convention: {evidence.convention}, measured in {evidence.num_runs} runs (moves are relative to each row)",
        ["tap", "convention", "values fed", "rows read", "noise", "smallest move of a token read", "largest of the others"],
        [
            [
                output.tap.spelling(num_layers),
                output.convention,
                " ".join(map(str, output.fed)) or "none",
                " ".join(map(str, output.rows_read)),
                f"{output.noise:.2g}",
                f"{output.smallest_change:.2g}",
                f"{output.largest_rest:.2g}",
            ]
            for output in evidence.outputs
        ],
    )


def _print_canaries(distances: list[CanaryDistance], num_layers: int) -> None:
    from tensorrt_llm_ext.cli._terminal import print_table

    if distances:
        print_table(
            f"Canaries: all right, by {distances[0].source}",
            ["canary", "tap", "distance", "tolerance"],
            [[str(d.canary), d.tap.spelling(num_layers), f"{d.distance:.2g}", f"{d.tolerance:.2g}"] for d in distances],
        )
