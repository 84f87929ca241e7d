"""Records: the records of a batch as columns; one of them is made when it is asked for.

A million records are a few lists and arrays for each batch instead of some objects for each: what reads them together (the
store) never makes them one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import overload

import numpy as np

from tensorrt_llm_ext.results.record import Origin, Record, State
from tensorrt_llm_ext.taps import Tap


@dataclass(frozen=True, eq=False)
class States:
    """One tap's row of each record."""

    tap: Tap
    rows: np.ndarray  # [records, hidden], read-only
    computed_dtype: str
    payload_hashes: list[str]  # row_hashes(rows)


@dataclass(frozen=True, eq=False)
class Records(Sequence[Record]):
    """The records of requests whose taps each give one row (``last``, ``mean``), all from one origin; at least one."""

    request_ids: list[str]
    work_item_ids: list[str]
    token_hashes: list[str]
    num_tokens: list[int]
    truncated_from: list[int | None]
    states: tuple[States, ...]
    origin: Origin

    @classmethod
    def of(cls, records: Sequence[Record]) -> Records:
        """The same records as columns; their taps, row shapes and origin must be the same."""
        states = tuple(
            States(
                first.tap,
                np.concatenate([record.states[place].rows for record in records]),
                first.computed_dtype,
                [record.states[place].payload_hash for record in records],
            )
            for place, first in enumerate(records[0].states)
        )
        return cls(
            [record.request_id for record in records],
            [record.work_item_id for record in records],
            [record.token_hash for record in records],
            [record.num_tokens for record in records],
            [record.truncated_from for record in records],
            states,
            records[0].origin,
        )

    def with_taps(self, taps: Sequence[Tap]) -> Records:
        """The same records with the states of these taps, in their order; as they are where they lack one."""
        by_tap = {states.tap: states for states in self.states}
        if len(by_tap) == len(taps) or not by_tap.keys() >= set(taps):
            return self
        return replace(self, states=tuple(by_tap[tap] for tap in taps))

    def __len__(self) -> int:
        return len(self.request_ids)

    @overload
    def __getitem__(self, place: int) -> Record: ...

    @overload
    def __getitem__(self, place: slice) -> list[Record]: ...

    def __getitem__(self, place: int | slice) -> Record | list[Record]:
        if isinstance(place, slice):
            return [self._record(index) for index in range(len(self))[place]]
        return self._record(range(len(self))[place])

    def __iter__(self) -> Iterator[Record]:
        return map(self._record, range(len(self)))

    def _record(self, place: int) -> Record:
        return Record(
            self.request_ids[place],
            self.work_item_ids[place],
            self.token_hashes[place],
            self.num_tokens[place],
            self.truncated_from[place],
            tuple(
                State(of.tap, of.rows[place : place + 1], of.computed_dtype, of.payload_hashes[place]) for of in self.states
            ),
            self.origin,
        )
