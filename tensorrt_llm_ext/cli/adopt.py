"""``trtllm-extract adopt``: take an engine of upstream's trtllm-build into service."""

from __future__ import annotations

import json
import re
from pathlib import Path

import click

from tensorrt_llm_ext.cli import verb
from tensorrt_llm_ext.taps import DEFAULT_TAPS


def _capability(context: click.Context, parameter: click.Parameter, value: str) -> str:
    if not re.fullmatch(r"\d+\.\d", value):
        raise click.BadParameter(f"{value!r} is not a compute capability, for example 9.0")
    return value


@verb
@click.argument("engine", type=click.Path(path_type=Path))
@click.option(
    "--checkpoint", required=True, type=click.Path(path_type=Path), help="The checkpoint upstream's was converted from."
)
@click.option(
    "--compute-capability",
    required=True,
    callback=_capability,
    help="Of the card it was built on: 8.9, 9.0, 10.0, 12.0 …",
)
@click.option("--taps", default=DEFAULT_TAPS, help="final@last, final@all, or both with a comma.")
@click.option("--max-seq-len", type=int, help="Serve sequences up to this many tokens; else the engine's own limit.")
@click.option("--platform", default="linux-x86_64", help="Of the machine it was built on.")
def command(
    engine: Path,
    checkpoint: Path,
    compute_capability: str,
    taps: str,
    max_seq_len: int | None,
    platform: str,
    as_json: bool,
) -> None:
    """Write our contract beside an ENGINE that trtllm-build made with the patch applied.

    Refuses engines with a cache, speculative inputs, managed weights, several ranks, or without the patch's outputs.
    An engine cannot be read without its GPU: what is checked only when it is opened is printed.
    """
    from tensorrt_llm_ext.builder.adopt import adopt_engine
    from tensorrt_llm_ext.cli._terminal import steps_shown

    with steps_shown() as progress:
        adoption = adopt_engine(
            engine,
            checkpoint,
            compute_capability=compute_capability,
            taps=taps,
            max_seq_len=max_seq_len,
            platform=platform,
            progress=progress,
        )
    told = {"checked": adoption.checked, "at_load": adoption.at_load, "warnings": adoption.warnings}
    if as_json:
        fingerprint = adoption.contract.engine_fingerprint()
        click.echo(json.dumps({"engine": str(engine), "fingerprint": fingerprint, **told}))
        return
    click.echo(f"adopted {engine}: {adoption.contract.model_name}, {adoption.contract.builder_version}")
    titles = {"checked": "checked here", "at_load": "checked only when it is opened", "warnings": "to know"}
    for name, lines in told.items():
        if lines:
            click.echo(f"{titles[name]}:")
        for line in lines:
            click.echo(f"  {line}")
