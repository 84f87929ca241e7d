"""``audit``: what anyone's dump of hidden states really holds."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tensorrt_llm_ext.cli import verb

if TYPE_CHECKING:
    from tensorrt_llm_ext.checks.audit import Audit


@verb
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--checkpoint", "checkpoint_path", required=True, type=click.Path(path_type=Path), help="The model it is of.")
@click.option("--input", "source", help="The prompts it was made from: tells which sequences are missing or swapped.")
@click.option("--text-field", metavar="NAME", help="Field of the input that holds the prompt as text.")
@click.option("--messages-field", metavar="NAME", help="Field of the input that holds chat messages.")
@click.option("--ids-field", metavar="NAME", help="Field of the input that holds token ids.")
@click.option("--id-field", metavar="NAME", help="Field of the input that names its rows in the dump.  [default: the row number]")
@click.option("--layers", metavar="LIST", help="Layers of the auxiliary slots: the state after so many, as 2,16,29.  [default: eagle3]")
@click.option("--sample", "num_sampled", type=click.IntRange(min=1), default=16, help="Sequences to recompute.")
def command(path: Path, checkpoint_path: Path, source: str | None, as_json: bool, **options: object) -> None:
    """Say what each stored slot of the dump at PATH really is.

    Known are our own states, speculators (v1, v2), SpecForge, ModelOpt, TensorRT-LLM's data_*.pt and vLLM's *.safetensors.
    A sample is recomputed layer by layer in float32: which layer a slot holds, before or after the final norm, whether its
    rows are those of its own tokens, normalised, padded, finite. Files that are not whole, sequences that are there twice or
    not at all, and token ids of another row are looked for everywhere. Pickles are never executed.

    Exit code 1: the dump is not what its format promises.
    """
    from tensorrt_llm_ext.checkpoint import open_checkpoint
    from tensorrt_llm_ext.checks.audit import arrow_reference, audit
    from tensorrt_llm_ext.checks.dumps import open_dump

    dump = open_dump(path)
    fields = {name: options.pop(name) for name in ("text_field", "messages_field", "ids_field", "id_field")}
    with open_checkpoint(checkpoint_path) as checkpoint:
        reference = None
        if source is not None:
            reference = _reference(source, fields, checkpoint)
        elif dump.arrow is not None:
            reference = arrow_reference(dump.arrow)
        found = audit(dump, checkpoint, reference=reference, **options)
    if as_json:
        click.echo(json.dumps({"path": str(path), "is_right": not found.faults, **dataclasses.asdict(found)}))
    else:
        _print(found)
    sys.exit(1 if found.faults else 0)


def _reference(source: str, fields: dict, checkpoint):
    """The token ids of the input's rows, by request id."""
    from tensorrt_llm_ext.inputs import AcceptedRow, Fields, TokenPolicy, open_input, work_items

    named = Fields(fields["text_field"], fields["messages_field"], fields["ids_field"], fields["id_field"])
    prompt = "text" if named.text else "messages" if named.messages else "ids"
    special = {"text": "tokenizer", "messages": "none", "ids": "given"}[prompt]
    policy = TokenPolicy(prompt, special, None, False, None, None, checkpoint.architecture.max_positions, "refuse")
    opened = open_input(source, named)
    rows = work_items(
        opened.rows(),
        named,
        checkpoint.tokenizer(),
        policy,
        vocab_size=checkpoint.architecture.vocab_size,
        source=opened.name,
    )
    return {row.item.request_id: row.item.token_ids for row in rows if isinstance(row, AcceptedRow)}


def _print(found: Audit) -> None:
    click.echo(f"{found.format}: {found.num_sequences:,} sequences, {len(found.sampled)} recomputed")
    for slot in found.slots:
        sign = "is" if slot.found == slot.promised else f"should be {slot.promised}; it IS"
        click.echo(
            f"  {slot.slot} {sign} {slot.found} (distance {slot.distance:.2g}; next {slot.runner_up}, {slot.runner_up_distance:.2g})"
        )
    for note in found.notes:
        click.echo(f"  note: {note}")
    for fault in found.faults:
        click.echo(f"  FAULT {fault.code}: {fault.where}\n    expected: {fault.expected}\n    found:    {fault.found}")
    click.echo("The dump is not what its format promises." if found.faults else "The dump is what its format promises.")
