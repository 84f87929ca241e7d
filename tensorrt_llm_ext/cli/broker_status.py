"""``broker-status``: how far a stream of work is."""

from __future__ import annotations

import click

from tensorrt_llm_ext.cli import verb
from tensorrt_llm_ext.cli._broker import broker_options, opened_broker, print_facts


@verb
@broker_options
def command(as_json: bool, **access: object) -> None:
    """Show how far a stream of work is: what waits, is in work, is stored, refused or failed, and who is at work.

    stored + refused + failed + open = submitted.
    """
    from tensorrt_llm_ext.worker import status_of

    with opened_broker("status", **access) as broker:
        status = status_of(broker)
    facts = status.to_dict()
    if not as_json:
        facts["workers"] = ", ".join(_described(name, worker) for name, worker in status.workers.items()) or "none"
    print_facts(facts, as_json)
    if not as_json:
        parts = status.stored, status.refused, status.failed, status.open
        equation = f"{' + '.join(f'{part:,}' for part in parts)} = {sum(parts):,}"
        click.echo(f"stored + refused + failed + open = submitted: {equation}")


def _described(name: str, worker: dict) -> str:
    """A worker in a few words: how far it is, or why it was not admitted."""
    if "state" in worker:
        return f"{name} {worker['state']}, {worker['tokens']:,} tokens"
    if worker.get("admitted", True):
        return f"{name} joining"
    return f"{name} not admitted: other {', '.join(difference['field'] for difference in worker['differences'])}"
