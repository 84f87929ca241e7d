"""JSONL and plain text: one row a line, every line a row."""

from __future__ import annotations

import gzip
import io
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import BinaryIO

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.json as pj

from tensorrt_llm_ext.errors import InputError, Refusal
from tensorrt_llm_ext.inputs.id_rows import IdRows, columns_of_ids, one_by_one, together
from tensorrt_llm_ext.inputs.rows import STANDARD_INPUT, Fields, Row

MAX_LINE_BYTES = 64 << 20  # a line is held in memory as a whole; the longest contexts of today are below 8 MiB of text
_GROUP_LINES, _GROUP_BYTES = 512, 4 << 20  # lines of token ids that are read together
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SAME_TO_ALL = frozenset({str, int, bool, type(None)})  # types of values that every parser reads alike


class LineInput:
    """A JSONL or text file, gzipped when it ends in ``.gz``, or standard input.

    A line ends at ``\\n`` (a ``\\r`` before it belongs to the ending); the last may lack it. A text file has the one
    field that ``fields`` names as the text. Blank lines are rows too, and are refused: a row number is a line number
    less one, always.
    """

    def __init__(self, path: str, fields: Fields, *, is_json: bool) -> None:
        self.name = "stdin" if path == STANDARD_INPUT else Path(path).name
        self.num_rows = None
        self._path = path
        self._fields = fields
        self._is_json = is_json
        if not is_json and (fields.text is None or fields.request_id is not None):
            raise InputError(
                f"'{self.name}' is read as plain text, which has no fields",
                expected="one prompt a line; the request id is the row number",
                found=f"the fields {', '.join(fields.names())}",
                fix="leave the fields out, or give JSONL, Parquet or an Arrow folder",
            )
        # a pipe with a name (``<(zcat …)``) can be opened once and has no size
        self._has_size = path != STANDARD_INPUT and not Path(path).is_fifo()
        if self._has_size:
            _check_opens(path)

    def rows(self) -> Iterator[Row]:
        return one_by_one(self.pieces(), self._fields)

    def pieces(self) -> Iterator[Row | IdRows]:
        size = max(os.path.getsize(self._path), 1) if self._has_size else None
        # a gzipped file's position is the compressed one, which is what its size is measured in
        with _standard_input() if self._path == STANDARD_INPUT else open(self._path, "rb") as raw:
            file = gzip.GzipFile(fileobj=raw) if self._path.endswith(".gz") else raw
            try:
                yield from self._read(file, lambda: size and min(raw.tell() / size, 1.0))
            except (gzip.BadGzipFile, zlib.error) as error:
                raise InputError(
                    f"'{self._path}' is not a gzip file, or not as it was written",
                    expected="a gzip file whose checksum is that of its lines",
                    found=f"{type(error).__name__}: {error}",
                    fix="copy the file again and begin a new dataset: lines that were read before this showed may be wrong "
                    "(--resume refuses to go on behind one that was)",
                ) from error
            except (EOFError, OSError) as error:
                raise InputError(
                    f"'{self._path}' breaks off while it is read",
                    expected="a whole file" if file is raw else "a whole gzip file",
                    found=f"{type(error).__name__}: {error}",
                    fix="copy the file again; what is committed stays, and --resume goes on from there",
                ) from error

    def _read(self, file: BinaryIO, fraction: Callable[[], float | None]) -> Iterator[Row | IdRows]:
        if not self._is_json or self._fields.ids is None or self._fields.loss_mask is not None:
            for number, line in enumerate(_lines(file)):
                yield Row(number, number + 1, self._fields_of(line), fraction())
            return
        number, before = 0, 0.0
        for group in _groups(_lines(file)):
            after = fraction()
            fractions = [None] * len(group) if after is None else np.linspace(before, after, len(group) + 1)[1:].tolist()
            if (read := _read_by_arrow(group, self._fields, number, fractions)) is not None:
                yield read
            else:
                rows = (
                    Row(place, place + 1, self._fields_of(line), behind)
                    for place, (line, behind) in enumerate(zip(group, fractions, strict=True), number)
                )
                yield from together(rows, self._fields)
            number, before = number + len(group), after

    def _fields_of(self, line: bytes | Refusal) -> dict | Refusal:
        if isinstance(line, Refusal):
            return line
        if self._is_json and (value := _quickly_parsed(line)) is not None:
            return value
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            return Refusal(
                "not_utf8", "the line is not UTF-8", expected="UTF-8", found=error, fix="convert the file to UTF-8"
            )
        return _parsed(text) if self._is_json else {self._fields.text: text}


def _check_opens(path: str) -> None:
    try:
        open(path, "rb").close()
    except OSError as error:
        raise InputError(
            f"'{path}' cannot be opened", expected="a file of lines", found=error, fix="name a file that may be read"
        ) from error


def _standard_input() -> AbstractContextManager[BinaryIO]:
    """Standard input through a buffer of our own: at its exit Python takes the lock of ``sys.stdin``'s, which a thread
    that still waits for a line would hold, and aborts."""
    if sys.stdin is None:
        raise InputError(
            "standard input is closed",
            expected="a file or a pipe as standard input",
            found="none",
            fix="send the prompts through a pipe, or name a file with --input",
        )
    try:
        return open(sys.stdin.fileno(), "rb", closefd=False)
    except io.UnsupportedOperation:  # something else was put in its place
        return nullcontext(sys.stdin.buffer)


def _lines(file: BinaryIO) -> Iterator[bytes | Refusal]:
    """Every line without its ending; a line that is too long becomes a refusal and is passed over."""
    is_first = True
    while line := file.readline(MAX_LINE_BYTES + 1):
        if is_first:
            line, is_first = line.removeprefix(_BYTE_ORDER_MARK), False
        if len(line) <= MAX_LINE_BYTES or line.endswith(b"\n"):
            yield line.removesuffix(b"\n").removesuffix(b"\r")
            continue
        num_bytes = len(line)
        while not line.endswith(b"\n") and (line := file.readline(MAX_LINE_BYTES)):
            num_bytes += len(line)
        yield Refusal(
            "line_too_long",
            "the line is longer than a line may be",
            expected=f"at most {MAX_LINE_BYTES} bytes",
            found=f"{num_bytes} bytes",
            fix="split the row, or give its tokens in a Parquet file",
        )


def _groups(lines: Iterator[bytes | Refusal]) -> Iterator[list[bytes | Refusal]]:
    group: list[bytes | Refusal] = []
    num_bytes = 0
    for line in lines:
        group.append(line)
        num_bytes += len(line) if isinstance(line, bytes) else 0
        if len(group) == _GROUP_LINES or num_bytes >= _GROUP_BYTES:
            yield group
            group, num_bytes = [], 0
    if group:
        yield group


def _read_by_arrow(group: list[bytes | Refusal], fields: Fields, number: int, fractions: list[float | None]) -> IdRows | None:
    """The lines as rows of ids, read by Arrow while other threads hold the GIL; None where a line wants to be looked at by itself.

    Arrow is strict, and reads what the json module reads where every line is one object of these fields and no others. But it
    passes over a blank line, and takes two objects in a line for two rows.
    """
    if len(group) == 1 or not all(isinstance(line, bytes) and line[:1] == b"{" for line in group):
        return None
    first = _quickly_parsed(group[0])
    if first is None or {*first} != {*fields.names()}:
        return None
    types = {fields.ids: pa.list_(pa.int64())}
    if fields.request_id is not None:
        types[fields.request_id] = pa.string() if isinstance(first[fields.request_id], str) else pa.int64()
    parsing = pj.ParseOptions(pa.schema(types), unexpected_field_behavior="error")
    block = b"\n".join(group)
    try:
        table = pj.read_json(pa.BufferReader(block), pj.ReadOptions(use_threads=False, block_size=len(block) + 1), parsing)
    except pa.ArrowException:
        return None
    if len(table) != len(group):
        return None
    (batch,) = table.combine_chunks().to_batches()
    return columns_of_ids(batch, fields, number, number + 1, fractions)


def _quickly_parsed(line: bytes) -> dict | None:
    """The line's object, where orjson is sure to read what the json module reads; ``_parsed`` says what any other line is.

    orjson refuses what json takes: NaN, numbers that overflow, lone surrogates. It keeps the last of a key that stands twice, and
    makes a float of an integer beyond 64 bits. A key has a colon behind it: as many colons as keys, and none stands twice.
    """
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    is_sure = type(value) is dict and line.count(b":") == len(value) and all(map(_is_same_to_all, value.values()))
    return value if is_sure else None


def _is_same_to_all(value: object) -> bool:
    if type(value) is list:
        return _SAME_TO_ALL.issuperset(map(type, value))
    return type(value) in _SAME_TO_ALL or (type(value) is float and abs(value) < 2**63)


def _parsed(line: str) -> dict | Refusal:
    if not line.strip():
        return Refusal(
            "empty_row", "the line is blank", expected="a JSON object", found="nothing", fix="remove the line or fill it"
        )
    try:
        value = json.loads(line, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # ValueError: syntax, an integer of thousands of digits, a key twice
        return Refusal("not_json", "the line is not JSON", expected="a JSON object", found=error, fix="correct the line")
    if not isinstance(value, dict):
        return Refusal(
            "not_an_object",
            "the line is JSON, but not an object",
            expected='a JSON object, for example {"text": "…"}',
            found=f"a JSON {type(value).__name__}",
            fix="write one object a line",
        )
    return value


def _unique(pairs: list[tuple[str, object]]) -> dict:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} stands twice")
    return value
