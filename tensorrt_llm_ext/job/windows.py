"""Windows: the stretches of input rows that are sorted by length together and committed together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tensorrt_llm_ext.errors import InputError
from tensorrt_llm_ext.inputs import AcceptedRow, RefusedRow
from tensorrt_llm_ext.recipes.contract import Limits

_MAX_ROWS = 4096
_BATCHES_PER_WINDOW = 16  # enough for little padding; a run that dies repeats at most this and what was in flight


@dataclass(frozen=True)
class WindowLimits:
    """A window ends before the row that would pass either. Part of a dataset's identity: batches depend on it."""

    max_rows: int
    max_tokens: int

    def __post_init__(self) -> None:
        if self.max_rows < 1 or self.max_tokens < 1:
            raise InputError(
                "a window must hold a row",
                expected="at least 1 row and 1 token",
                found=f"{self.max_rows} rows, {self.max_tokens} tokens",
                fix="leave the window's limits out, or say larger ones",
            )

    def to_dict(self) -> dict:
        return dataclasses.asdict(self)


def window_limits(limits: Limits) -> WindowLimits:
    """The limits for an engine: sixteen full batches, and no more rows than memory easily holds."""
    return WindowLimits(max_rows=_MAX_ROWS, max_tokens=_BATCHES_PER_WINDOW * limits.max_num_tokens)


@dataclass
class Window:
    """Input rows ``start`` to ``end`` (exclusive), and what became of each."""

    start: int
    end: int
    accepted: list[AcceptedRow] = field(default_factory=list)
    refused: list[RefusedRow] = field(default_factory=list)
    num_tokens: int = 0
    fraction: float | None = None  # of the input that lies behind, once this window does

    @property
    def num_rows(self) -> int:
        return len(self.accepted) + len(self.refused)


def windows(rows: Iterable[AcceptedRow | RefusedRow], limits: WindowLimits) -> Iterator[Window]:
    """Cut rows into windows: a pure function of the rows, so that every run over the same input has the same batches.

    Cutting may begin at the border of any window and gives the same windows from there. A row longer than
    ``max_tokens`` is a window of its own.
    """
    window: Window | None = None
    for row in rows:
        num_tokens = len(row.item.token_ids) if isinstance(row, AcceptedRow) else 0
        is_full = window is not None and (
            row.number - window.start >= limits.max_rows
            or (num_tokens and window.num_tokens and window.num_tokens + num_tokens > limits.max_tokens)
        )
        if is_full:
            yield window
        if window is None or is_full:
            window = Window(row.number, row.number)
        (window.accepted if isinstance(row, AcceptedRow) else window.refused).append(row)
        window.end, window.num_tokens, window.fraction = row.number + 1, window.num_tokens + num_tokens, row.fraction
    if window is not None:
        yield window
