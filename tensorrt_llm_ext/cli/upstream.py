"""``trtllm-extract upstream``: build an engine with upstream's trtllm-build, by a recipe for its version."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import click

from tensorrt_llm_ext.cli import verb


@verb
@click.argument("recipe")
@click.option(
    "--checkpoint", required=True, type=click.Path(path_type=Path), help="A checkpoint in TensorRT-LLM's own form."
)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The engine directory to make.")
@click.option(
    "--gemm-plugin", type=click.Choice(["disable", "fp8"]), help="Which of the recipe's builds; else the first."
)
@click.option(
    "--site", type=click.Path(path_type=Path), help="The site-packages of trtllm-build; else this Python's own."
)
@click.option("--print", "is_printed", is_flag=True, help="Print the command and run nothing.")
def command(
    recipe: str,
    checkpoint: Path,
    out: Path,
    gemm_plugin: str | None,
    site: Path | None,
    is_printed: bool,
    as_json: bool,
) -> None:
    """Build with trtllm-build by a RECIPE: a version of TensorRT-LLM (0.16), or the path of a TOML file.

    The patch must be applied, and the version installed be the recipe's. Then `trtllm-extract adopt` takes the engine
    into service.
    """
    from tensorrt_llm_ext.builder.upstream import command_from_recipe, load_upstream_recipe

    loaded = load_upstream_recipe(recipe)
    arguments = command_from_recipe(loaded, checkpoint=checkpoint, out=out, gemm_plugin=gemm_plugin)
    if not is_printed:
        from model_patches.build import run_build

        run_build(arguments, loaded.version, site)
    if as_json:
        click.echo(json.dumps({"command": arguments, "version": loaded.version, "is_run": not is_printed}))
    elif is_printed:
        click.echo(shlex.join(arguments))
    else:
        click.echo(
            f"built {out}; now: trtllm-extract adopt {shlex.quote(str(out))} --checkpoint … --compute-capability …"
        )
