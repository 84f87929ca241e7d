"""``trtllm-extract patch``: mark our outputs in an installed TensorRT-LLM, and take the marks out again."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tensorrt_llm_ext.cli import verb

if TYPE_CHECKING:
    from model_patches import FileStatus, Site

NOTICE = (
    "Engines built while it is applied have the outputs final_post_all and final_post_last. Upstream's own Python "
    "GenerationSession rejects engines with unknown outputs, and a runtime that binds only the outputs it knows cannot "
    "run them: build these engines for extraction, and revert the patch before building others."
)
_WORDS = {
    "unpatched": "not patched",
    "patched": "patched",
    "changed": "patched, then changed",
    "foreign": "patched by someone else",
    "not_understood": "not understood",
    "absent": "not in this version",
}


@verb
@click.argument("action", type=click.Choice(["status", "apply", "revert"]))
@click.option(
    "--site", type=click.Path(path_type=Path), help="The site-packages that holds tensorrt_llm; else this Python's own."
)
def command(action: str, site: Path | None, as_json: bool) -> None:
    """Mark the hidden states as outputs in an installed TensorRT-LLM, before its engines are built.

    STATUS shows what would change and changes nothing. APPLY inserts five lines into the decoder's definition; REVERT
    takes them out, byte for byte. Files that are not understood, or that someone else patched, are left alone.
    """
    import model_patches

    found = model_patches.find_site(site)
    statuses = getattr(model_patches, action)(found)
    if as_json:
        click.echo(json.dumps(_as_dict(found, statuses)))
        return
    click.echo(f"TensorRT-LLM {found.version} in {found.folder}")
    for status in statuses:
        _print(found, status, with_lines=action != "revert")
    if action != "revert":
        click.echo(NOTICE)


def _print(site: Site, status: FileStatus, *, with_lines: bool) -> None:
    where = site.shown(status.path) if status.path else status.target.files[0]
    click.echo(f"{where}, {status.target.class_name}.forward: {_WORDS[status.state]}")
    if status.reason is not None:
        click.echo(f"  left alone: {status.reason}".replace("\n", "\n  "))
        return
    if not with_lines:
        return
    verb_of_lines = "would be inserted" if status.state == "unpatched" else "inserted"
    click.echo(f"  {len(status.lines)} lines {verb_of_lines}, numbered as in the patched file:")
    texts = textwrap.dedent("\n".join(line.text for line in status.lines)).splitlines()
    for line, text in zip(status.lines, texts, strict=True):
        click.echo(f"  +{line.number:5}  {text}")


def _as_dict(site: Site, statuses: list[FileStatus]) -> dict:
    return {
        "site": str(site.folder),
        "version": str(site.version),
        "files": [
            {
                "class": status.target.class_name,
                "path": str(status.path) if status.path else None,
                "state": status.state,
                "lines": [{"line": line.number, "text": line.text} for line in status.lines],
                "reason": status.reason.to_dict() if status.reason else None,
            }
            for status in statuses
        ],
        "notice": NOTICE,
    }
