"""The standard streams of the command: whole, closed, or on a full disk."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import click


def open_standard_streams() -> None:
    """Make closed streams harmless, and a standard output that takes nothing an error with a text.

    The number of a closed stream would go to the next file that is opened, and what a library prints into that file.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number: this one
    if sys.stdout is not None and not isinstance(sys.stdout, _Output):
        sys.stdout = _Output(sys.stdout)


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a standard stream is a terminal; a closed one is not."""
    return stream is not None and stream.isatty()


class _Output:
    """Standard output; where it cannot be written to, click prints that on standard error and exits with 1."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_broken = False  # said once: Python flushes again at its end

    def write(self, text: str) -> int:
        with self._errors():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._errors():
            if not self._is_broken:
                self._stream.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno == errno.EPIPE:  # a reader that has enough; click ends quietly
                raise
            self._is_broken = True
            raise click.ClickException(
                "standard output cannot be written to, so what was to be said is lost\n"
                "  expected: a terminal, a pipe or a file that takes it\n"
                f"  found:    {error}\n"
                "  to do:    free some space or name another file; what the command has done stays done"
            ) from error
