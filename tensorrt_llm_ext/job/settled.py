"""Settled rows: on resume the input is read again from its first row and held against what the dataset says of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tensorrt_llm_ext.errors import ForeignDataset
from tensorrt_llm_ext.inputs import AcceptedRow, RefusedRow

_ROWS_A_STRETCH = 4096
_Row = AcceptedRow | RefusedRow
_Identity = tuple[str, str, bytes | None]  # request id, token hash, loss mask


@dataclass
class SettledStretch:
    """Input rows that earlier commits settled, and what became of them."""

    start: int
    end: int
    num_stored: int = 0
    num_tokens: int = 0  # of the rows that are stored
    refused: list[RefusedRow] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)
    fraction: float | None = None

    @property
    def num_rows(self) -> int:
        return self.num_stored + len(self.refused) + self.failed.total()


def divided(rows: Iterator[_Row], end: int) -> tuple[Iterator[_Row], Iterator[_Row]]:
    """The rows before number ``end``, and the others, which may be read once the first are."""
    held: list[_Row] = []

    def before() -> Iterator[_Row]:
        for row in rows:
            if row.number >= end:
                held.append(row)
                return
            yield row

    def after() -> Iterator[_Row]:
        yield from held
        yield from rows

    return before(), after()


def settled_stretches(
    rows: Iterable[AcceptedRow | RefusedRow], stored: Iterator[tuple[int, str, str, bytes | None]], failed: Iterator[dict]
) -> Iterator[SettledStretch]:
    """Hold each row against the dataset and against failed.jsonl: both have row number, request id, token hash and loss mask.

    All three are in row order and are read once, side by side. Raises ForeignDataset at the first row that is not what
    it was: another input, or the same id with other tokens or another mask.
    """
    next_stored, next_failed = next(stored, None), next(failed, None)
    stretch: SettledStretch | None = None
    for row in rows:
        if stretch is None or row.number - stretch.start >= _ROWS_A_STRETCH:
            if stretch is not None:
                yield stretch
            stretch = SettledStretch(row.number, row.number)
        known = None
        if next_stored is not None and next_stored[0] == row.number:
            known, next_stored = next_stored[1:], next(stored, None)
            stretch.num_stored += 1
            stretch.num_tokens += len(row.item.token_ids) if isinstance(row, AcceptedRow) else 0
        elif next_failed is not None and next_failed["row"] == row.number:
            mask = next_failed.get("loss_mask")
            known = next_failed["request_id"], next_failed["token_hash"], None if mask is None else bytes(map(int, mask))
            stretch.failed[next_failed["code"]] += 1
            next_failed = next(failed, None)
        if known != _identity(row):
            raise _other_row(row, known)
        if isinstance(row, RefusedRow):
            stretch.refused.append(row)
        stretch.end, stretch.fraction = row.number + 1, row.fraction
    if stretch is not None:
        yield stretch


def _identity(row: _Row) -> _Identity | None:
    return (row.item.request_id, row.item.token_hash, _mask_of(row)) if isinstance(row, AcceptedRow) else None


def _mask_of(row: _Row) -> bytes | None:
    has_mask = isinstance(row, AcceptedRow) and row.item.loss_mask is not None
    return row.item.loss_mask.tobytes() if has_mask else None


def _other_row(row: _Row, known: _Identity | None) -> ForeignDataset:
    identity = _identity(row)
    is_mask = known is not None and identity is not None and known[:2] == identity[:2]  # all else is the same
    pairs = zip(known[2] or (), identity[2] or (), strict=False) if is_mask else ()
    first = next((token for token, (theirs, ours) in enumerate(pairs) if theirs != ours), 0)

    def described(identity: _Identity | None) -> str:
        if identity is None:
            return "a refused row"
        mask = f" and, from its token {first} on, loss mask {_shown(identity[2], first)}" if is_mask else ""
        return f"request '{identity[0]}' with tokens {identity[1]}{mask}"

    found = described(identity) + (f" ({row.refusal.code})" if isinstance(row, RefusedRow) else "")
    return ForeignDataset(
        f"row {row.number} of the input is not the row that the dataset settled",
        expected=described(known),
        found=found,
        fix="resume with the input that began it (and the failed.jsonl beside the dataset), or write to another folder",
    )


def _shown(mask: bytes | None, first: int) -> str:
    return "none" if mask is None else "".join(map(str, mask[first : first + 64]))


def check_not_shorter(stretches: Iterator[SettledStretch], num_rows: int) -> Iterator[SettledStretch]:
    """Pass the stretches on; raise ForeignDataset when the input ends before ``num_rows``."""
    end = 0
    for stretch in stretches:
        end = stretch.end
        yield stretch
    if end < num_rows:
        raise ForeignDataset(
            "the input is shorter than the one that the dataset was made from",
            expected=f"at least {num_rows} rows",
            found=f"{end} rows",
            fix="resume with the input that began it, or write to another folder",
        )
