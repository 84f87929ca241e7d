"""How a verb that runs for long is asked to stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import click


@contextmanager
def stop_on_signals(answer: str | None = None) -> Iterator[threading.Event]:
    """SIGTERM or the first Ctrl-C asks to stop, and ``answer`` is said; the second Ctrl-C is Python's own."""
    stop = threading.Event()

    def ask(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stop.set()
        if answer is not None:
            click.echo(answer, err=True)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
