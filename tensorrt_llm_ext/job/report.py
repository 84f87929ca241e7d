"""Report and progress: what became of every row, and how far a run is."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tensorrt_llm_ext.errors import ExtractionError, NoRoom
from tensorrt_llm_ext.store import Store


@dataclass(frozen=True)
class Progress:
    """How far a run is. Fractions and what follows from them are None where the input's size is not known."""

    num_rows: int  # that are behind: settled before, refused, or computed
    num_tokens: int  # computed in this run
    tokens_per_s: float
    fraction: float | None  # of the input
    seconds_left: float | None
    dataset_bytes: int
    expected_bytes: int | None  # of the whole dataset, as the rows so far suggest
    free_bytes: int


@dataclass
class Report:
    """What a run did. ``stored + already_stored + refused + failed = read``, or ``shortfall`` says by how much not.

    ``stored`` is counted by the dataset, ``refused`` and ``failed`` by the lines of their files, ``read`` by the
    numbers of the rows: none is computed from another.
    """

    dataset: Path
    failed_path: Path
    refused_path: Path | None = None  # once it is written
    read: int = 0
    stored: int = 0
    already_stored: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # by code
    failed: Counter[str] = field(default_factory=Counter)  # by code
    num_truncated: int = 0
    num_tokens: int = 0  # computed in this run
    seconds: float = 0.0
    computing_seconds: float = 0.0  # since the first window was taken: what lies before is reading what was settled
    dataset_bytes: int = 0
    stopped_by: ExtractionError | None = None
    is_interrupted: bool = False

    @property
    def shortfall(self) -> int:
        """Rows that were read and are nowhere; anything but 0 is a defect."""
        return self.read - self.stored - self.already_stored - self.refused.total() - self.failed.total()

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.computing_seconds if self.computing_seconds else 0.0

    def to_dict(self) -> dict:
        """The report as ``--json`` prints it."""
        return {
            "read": self.read,
            "stored": self.stored,
            "already_stored": self.already_stored,
            "refused": self.refused.total(),
            "refused_by_code": dict(sorted(self.refused.items())),
            "failed": self.failed.total(),
            "failed_by_code": dict(sorted(self.failed.items())),
            "shortfall": self.shortfall,
            "truncated": self.num_truncated,
            "tokens": self.num_tokens,
            "seconds": round(self.seconds, 3),
            "tokens_per_s": round(self.tokens_per_s, 1),
            "dataset": str(self.dataset),
            "dataset_bytes": self.dataset_bytes,
            "refused_file": None if self.refused_path is None else str(self.refused_path),
            "failed_file": str(self.failed_path),
            "interrupted": self.is_interrupted,
            "stopped_by": None if self.stopped_by is None else self.stopped_by.to_dict(),
        }


class Meter:
    """Measures a run: what is behind, and from its pace what is ahead."""

    def __init__(self, store: Store) -> None:
        self.num_rows = 0  # that are behind: the run counts them here
        self._store = store
        self._began = time.monotonic()
        self._began_computing: float | None = None
        self._first_fraction = 0.0  # that lay behind when computing began
        self._previous_fraction: float | None = 0.0  # behind before the stretch in hand
        self._fraction: float | None = 0.0  # behind after it
        self._num_accepted = self._num_accepted_tokens = 0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    @property
    def computing_seconds(self) -> float:
        return 0.0 if self._began_computing is None else time.monotonic() - self._began_computing

    def take(self, num_accepted: int, num_tokens: int, fraction: float | None) -> None:
        """Note a stretch of the input: how many of its rows, of how many tokens, are or will be stored, and how much of the
        input lies behind after it."""
        self._num_accepted += num_accepted
        self._num_accepted_tokens += num_tokens
        self._previous_fraction, self._fraction = self._fraction, fraction

    def begin_computing(self) -> bool:
        """Start the clock that time ahead is estimated with, once; say whether this was the time."""
        is_first = self._began_computing is None
        if is_first:
            self._began_computing = time.monotonic()
            self._first_fraction = self._fraction or 0.0
        return is_first

    def fraction_behind(self, share: float) -> float | None:
        """How much of the input lies behind when ``share`` of the stretch that was taken last is done."""
        if self._fraction is None:
            return None
        before = self._previous_fraction or 0.0
        return before + (self._fraction - before) * share

    def measured(self, report: Report, fraction: float | None) -> Progress:
        """How far the run is when ``fraction`` of the input lies behind."""
        seconds_left = None
        if fraction is not None and self._fraction:
            done = fraction - self._first_fraction
            seconds_left = self.computing_seconds * (1 - fraction) / done if done > 0 else None
        return Progress(
            num_rows=self.num_rows,
            num_tokens=report.num_tokens,
            tokens_per_s=report.num_tokens / self.computing_seconds if report.num_tokens else 0.0,
            fraction=fraction,
            seconds_left=seconds_left,
            dataset_bytes=self._store.num_bytes,
            expected_bytes=self.expected_bytes(),
            free_bytes=shutil.disk_usage(self._store.path).free,
        )

    def expected_bytes(self) -> int | None:
        """Bytes of the whole dataset, as the rows taken so far suggest; None where the input's size is not known."""
        if not self._fraction:
            return None
        return int(self._store.expected_bytes(self._num_accepted, self._num_accepted_tokens) / self._fraction)

    def check_room(self) -> None:
        """Raise NoRoom when the disk cannot hold what is still to come."""
        expected, free = self.expected_bytes(), shutil.disk_usage(self._store.path).free
        if expected is not None and expected - self._store.num_bytes > free:
            raise NoRoom(
                f"the dataset will not fit on the disk of '{self._store.path}'",
                expected=f"about {(expected - self._store.num_bytes) / 1e9:.3g} GB free, by the length of the first rows",
                found=f"{free / 1e9:.3g} GB free",
                fix="free space, write to another disk, split the run with --shard, or go on regardless with --force",
            )
