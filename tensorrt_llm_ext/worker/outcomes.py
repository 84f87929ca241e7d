"""Outcomes: the file beside a partition's dataset that says of every work item without a row why.

One JSON object a line: ``sequence`` of the work item, ``kind`` (``refused`` or ``failed``), ``request_id``,
``work_item_id``, ``code`` and the reason. A line is on the disk before its answer is acknowledged.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tensorrt_llm_ext.errors import StoreError
from tensorrt_llm_ext.store import disk_errors
from tensorrt_llm_ext.worker.messages import Outcome


class OutcomeLedger:
    """Open for adding lines; a last line that a killed writer has torn is dropped first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.counts: Counter[str] = Counter()  # lines by kind
        self.codes: Counter[str] = Counter()
        with disk_errors(path):
            self._file = open(path, "ab+")
            self._drop_torn_line()

    def sequences(self) -> Iterator[int]:
        """The work items that have a line; counts them by kind and code on the way."""
        self._file.seek(0)
        for number, line in enumerate(self._file, 1):
            try:
                value = json.loads(line)
                self._count(value["kind"], value["code"])
                yield value["sequence"]
            except (ValueError, KeyError, TypeError) as error:
                raise StoreError(
                    f"'{self.path}' is damaged at line {number}",
                    expected="one JSON object a line",
                    found=error,
                    fix="restore it: it says which work items are settled",
                ) from error

    def write(self, outcomes: Sequence[tuple[int, Outcome]]) -> None:
        """Add lines and bring them to the disk. Raises DiskFull or StoreError."""
        with disk_errors(self.path):
            lines = [json.dumps({"sequence": sequence, **vars(outcome)}) + "\n" for sequence, outcome in outcomes]
            self._file.write("".join(lines).encode("ascii"))
            self._file.flush()
            os.fsync(self._file.fileno())
        for _, outcome in outcomes:
            self._count(outcome.kind, outcome.code)

    def close(self) -> None:
        self._file.close()

    def _count(self, kind: str, code: str) -> None:
        self.counts[kind] += 1
        self.codes[code] += 1

    def _drop_torn_line(self) -> None:
        content_end = self._file.seek(0, os.SEEK_END)
        place = content_end
        while place:
            step = min(place, 1 << 16)
            self._file.seek(place - step)
            found = self._file.read(step).rfind(b"\n")
            if found >= 0:
                place = place - step + found + 1
                break
            place -= step
        if place != content_end:
            self._file.truncate(place)
