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
    print_facts(status.to_dict(), as_json)
    if not as_json:
        parts = status.stored, status.refused, status.failed, status.open
        equation = f"{' + '.join(f'{part:,}' for part in parts)} = {sum(parts):,}"
        click.echo(f"stored + refused + failed + open = submitted: {equation}")
