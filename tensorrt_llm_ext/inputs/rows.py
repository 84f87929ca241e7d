"""Rows of an input: which fields are read, which reader serves which file, and what becomes of a row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tensorrt_llm_ext.errors import InputError, Refusal
from tensorrt_llm_ext.results.record import WorkItem

if TYPE_CHECKING:
    from tensorrt_llm_ext.inputs.id_rows import IdRows

STANDARD_INPUT = "-"


@dataclass(frozen=True)
class Fields:
    """The names of the fields that hold the prompt and the request id.

    Exactly one of ``text`` (a string), ``messages`` (a list of chat messages) and ``ids`` (a list of token ids) is
    the prompt; ``text`` is meant when none is named. Without ``request_id`` the row number is the request id.
    ``loss_mask`` is a list of 0 and 1, one a token.
    """

    text: str | None = None
    messages: str | None = None
    ids: str | None = None
    request_id: str | None = None
    loss_mask: str | None = None

    def __post_init__(self) -> None:
        named = {kind: name for kind in ("text", "messages", "ids") if (name := getattr(self, kind)) is not None}
        if len(named) > 1:
            raise InputError(
                "more than one field is named as the prompt",
                expected="one of --text-field, --messages-field, --ids-field",
                found=", ".join(f"--{kind}-field {name}" for kind, name in named.items()),
                fix="name the one field that holds the prompt",
            )
        if not named:
            object.__setattr__(self, "text", "text")

    @property
    def prompt(self) -> str:
        """The name of the field that holds the prompt."""
        return self.text or self.messages or self.ids

    def names(self) -> list[str]:
        return [name for name in (self.prompt, self.request_id, self.loss_mask) if name is not None]


@dataclass(frozen=True)
class Row:
    """One row of an input: its fields, or the reason why it has none.

    ``number`` counts every row from 0, whatever becomes of it; ``line`` counts the lines of a text file from 1.
    ``fraction`` says how much of the input lies behind once this row is read, where that can be known.
    """

    number: int
    line: int | None
    fields: dict | Refusal
    fraction: float | None = None


@dataclass(frozen=True)
class AcceptedRow:
    """A row that became a work item."""

    number: int
    fraction: float | None
    item: WorkItem


@dataclass(frozen=True)
class RefusedRow:
    """A row that cannot be served, and why. ``request_id`` is None where the row does not say it."""

    number: int
    fraction: float | None
    line: int | None
    request_id: str | None
    refusal: Refusal


class Input(Protocol):
    """An input that can be read once, row by row, in constant memory."""

    name: str  # what a work item says about where it came from
    num_rows: int | None  # None where only reading to the end can tell

    def rows(self) -> Iterator[Row]:
        """Read every row in order. Raises InputError when the file breaks off in a way that hides later rows."""
        ...

    def pieces(self) -> Iterator[Row | IdRows]:
        """Read every row in order as ``rows`` does, those that are plain token ids many at a time."""
        ...


def open_input(path: str, fields: Fields, *, format: str | None = None) -> Input:
    """Open a file, a ``save_to_disk`` folder or standard input (``-``), and check that the fields can be there.

    ``format`` is one of ``FORMATS``; None takes it from the extension, and means JSONL on standard input. Raises
    InputError for a missing file, an unknown extension, a damaged file, a field that no row of a table can have.
    """
    from tensorrt_llm_ext.inputs.lines import LineInput
    from tensorrt_llm_ext.inputs.tables import ArrowFolderInput, ParquetInput

    format = format or _format_of(path)
    if path != STANDARD_INPUT and not Path(path).exists():
        raise InputError(
            f"the input '{path}' does not exist",
            expected="a file, a folder written by save_to_disk, or - for standard input",
            found="no such file or folder",
            fix="name an existing input with --input",
        )
    if format in ("jsonl", "text"):
        return LineInput(path, fields, is_json=format == "jsonl")
    if path == STANDARD_INPUT:
        raise InputError(
            f"standard input cannot be read as {format}",
            expected="jsonl or text",
            found=f"--format {format}",
            fix="write it to a file and name the file, or send JSONL",
        )
    return ParquetInput(path, fields) if format == "parquet" else ArrowFolderInput(path, fields)


FORMATS = ("jsonl", "text", "parquet", "arrow")
_EXTENSIONS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".jsonl.gz": "jsonl",
    ".ndjson.gz": "jsonl",
    ".txt": "text",
    ".txt.gz": "text",
    ".parquet": "parquet",
}


def _format_of(path: str) -> str:
    if path == STANDARD_INPUT:
        return "jsonl"
    if Path(path).is_dir():
        return "arrow"
    for extension, format in _EXTENSIONS.items():
        if path.lower().endswith(extension):
            return format
    raise InputError(
        f"the extension of '{path}' says nothing about its format",
        expected=f"one of {', '.join(_EXTENSIONS)}, a folder written by save_to_disk, or - for standard input",
        found=Path(path).name,
        fix=f"say what it is: --format {{{','.join(FORMATS)}}}",
    )
