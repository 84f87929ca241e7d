"""The options that say where a stream of work is and what opens it; secrets come from files and are never printed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from tensorrt_llm_ext.worker import JetStreamBroker

_FILE = click.Path(path_type=Path)
_OPTIONS = (
    click.option("--broker", "url", required=True, metavar="URL", help="NATS server: nats://host:port or tls://host:port."),
    click.option("--stream", required=True, metavar="NAME", help="Name of the stream of work."),
    click.option("--creds", type=_FILE, metavar="FILE", help="NATS credentials file."),
    click.option("--token-file", type=_FILE, metavar="FILE", help="File that holds the server's token."),
    click.option("--tls-ca", type=_FILE, metavar="FILE", help="Certificates that the server's is checked by."),
    click.option("--tls-cert", type=_FILE, metavar="FILE", help="This side's certificate."),
    click.option("--tls-key", type=_FILE, metavar="FILE", help="The key of this side's certificate."),
)


def broker_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options, in their order."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def opened_broker(name: str, *, url: str, stream: str, **access: Path | None) -> JetStreamBroker:
    """Connect as the options say; losing and finding the server again are events."""
    from tensorrt_llm_ext.worker import Access, JetStreamBroker
    from tensorrt_llm_ext.worker.events import Events

    return JetStreamBroker.open(Access(url, **access), stream, name=name, on_event=Events(client=name, stream=stream))


def print_facts(value: dict, as_json: bool) -> None:
    """Print a flat report: one JSON object, or one fact a line."""
    if as_json:
        click.echo(json.dumps(value))
        return
    width = max(map(len, value))
    for name, fact in value.items():
        is_number = isinstance(fact, int | float) and not isinstance(fact, bool)
        text = f"{fact:,}" if isinstance(fact, int) and is_number else f"{fact:.3f}" if is_number else json.dumps(fact, ensure_ascii=False)
        click.echo(f"{name.replace('_', ' '):<{width}}  {text.strip(chr(34))}")
