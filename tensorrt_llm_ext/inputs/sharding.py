"""Sharded runs: which part of an input a run reads, by a stable hash of the request id."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import xxhash

from tensorrt_llm_ext.errors import InputError, Refusal
from tensorrt_llm_ext.inputs.fields import request_id_of_row
from tensorrt_llm_ext.inputs.rows import Fields, Row


@dataclass(frozen=True)
class Sharding:
    """Part ``index`` of ``count``, from 0: the rows whose request id hashes to it. Row numbers stay those of the input.

    A row without a request id (one that will be refused) goes by its row number, so each row belongs to one part.
    """

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Sharding:
        """Read ``i/n``. Raises InputError."""
        match = re.fullmatch(r"(\d+)/(\d+)", text)
        if match is None or not 0 <= int(match[1]) < int(match[2]):
            raise InputError(
                "this is not a part of a run",
                expected="i/n, with i from 0 to n - 1: 0/4, 1/4, 2/4 and 3/4 are the four parts of one run",
                found=repr(text),
                fix="write for example --shard 0/4",
            )
        return cls(int(match[1]), int(match[2]))

    def rows(self, rows: Iterable[Row], fields: Fields) -> Iterator[Row]:
        """The rows of this part."""
        return (row for row in rows if part_of(_identity(row, fields), self.count) == self.index)

    def to_dict(self) -> dict:
        return {"index": self.index, "count": self.count}


def part_of(request_id: str, count: int) -> int:
    """The part that a request belongs to: XXH3-64 of its id in UTF-8, modulo the number of parts."""
    return xxhash.xxh3_64_intdigest(request_id.encode()) % count


def _identity(row: Row, fields: Fields) -> str:
    try:
        if isinstance(row.fields, Refusal):
            return str(row.number)
        return request_id_of_row(row, fields)
    except Refusal:
        return str(row.number)
