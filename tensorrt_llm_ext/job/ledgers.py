"""Ledgers: the two files beside a dataset that say of every row that is not in it why.

``refused.jsonl``: rows of the input that cannot be served. It follows from the input alone, so every run writes it anew
and publishes it by rename when it ends. ``failed.jsonl``: work items that ran, or were about to, and have no rows that
can be trusted. Its lines reach the disk before the commit that settles their window; lines beyond the last commit say
what became of a run that stopped, and the next run, which repeats those rows, drops them.

One JSON object a line, in the order of the rows: ``row`` (from 0), ``line`` (from 1, for text files), ``request_id``,
``code``, and the reason; where rows have a loss mask, a failed one's too, text of a 0 or 1 for each token.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from tensorrt_llm_ext.errors import StoreError
from tensorrt_llm_ext.inputs import AcceptedRow, RefusedRow
from tensorrt_llm_ext.store import disk_errors

REFUSED_NAME = "refused.jsonl"
FAILED_NAME = "failed.jsonl"


class RefusedLedger:
    """Writes ``refused.jsonl`` beside its place and puts it there when it is whole."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / REFUSED_NAME
        self._part = folder / f".part-{REFUSED_NAME}"
        self.counts: Counter[str] = Counter()
        with disk_errors(folder):
            self._file = open(self._part, "w", encoding="ascii")

    def write(self, rows: Sequence[RefusedRow]) -> None:
        """Add rows. Raises DiskFull or StoreError."""
        with disk_errors(self.path):
            for row in rows:
                described = {"row": row.number, "line": row.line, "request_id": row.request_id, **row.refusal.to_dict()}
                del described["error"]
                self._file.write(json.dumps(described) + "\n")
            self.counts.update(row.refusal.code for row in rows)

    def publish(self) -> None:
        """Bring the file to the disk and to its name."""
        with disk_errors(self.path):
            _sync(self._file)
            self._file.close()
            self._part.rename(self.path)

    def close(self) -> None:
        """Drop what was not published. Idempotent."""
        with suppress(OSError):  # a full disk: what it could not take is dropped
            self._file.close()
        self._part.unlink(missing_ok=True)


class FailedLedger:
    """Appends to ``failed.jsonl``; what an earlier run wrote beyond the last commit goes first."""

    def __init__(self, folder: Path, settled_rows: int) -> None:
        self.path = folder / FAILED_NAME
        self.counts: Counter[str] = Counter()
        self.rows: set[int] = set()  # numbers of the rows that were added
        part = folder / f".part-{FAILED_NAME}"
        with disk_errors(folder):
            with open(part, "w", encoding="ascii") as file:
                for line in _lines(self.path):
                    if line["row"] < settled_rows:
                        file.write(json.dumps(line) + "\n")
                _sync(file)
            part.rename(self.path)
            self._file = open(self.path, "a", encoding="ascii")

    def settled(self) -> Iterator[dict]:
        """The lines of earlier runs that stand, in row order."""
        return _lines(self.path)

    def write(self, failures: Sequence[tuple[AcceptedRow, str, str]]) -> None:
        """Add rows, each with a code and a reason, and bring them to the disk. Raises DiskFull or StoreError."""
        self.rows.update(row.number for row, _, _ in failures)
        self.counts.update(code for _, code, _ in failures)  # they have failed, even where no line can say so
        with disk_errors(self.path):
            for row, code, reason in sorted(failures, key=lambda failure: failure[0].number):
                described = {
                    "row": row.number,
                    "request_id": row.item.request_id,
                    "work_item_id": row.item.work_item_id,
                    "token_hash": row.item.token_hash,
                    "code": code,
                    "reason": reason,
                }
                if row.item.loss_mask is not None:
                    described["loss_mask"] = "".join(map(str, row.item.loss_mask.tolist()))
                self._file.write(json.dumps(described) + "\n")
            _sync(self._file)

    def close(self) -> None:
        """Let go of the file. Idempotent."""
        with suppress(OSError):  # a full disk: ``write`` has said so
            self._file.close()


def _lines(path: Path) -> Iterator[dict]:
    """Read a ledger's lines; the last may be torn by a run that was killed, and is then no line."""
    try:
        with open(path, encoding="ascii") as file:
            for line in file:
                if line.endswith("\n"):
                    yield json.loads(line)
    except FileNotFoundError:
        return
    except ValueError as error:
        raise StoreError(
            f"'{path}' is damaged",
            expected="one JSON object a line",
            found=error,
            fix="restore it, or write to another folder",
        ) from error


def _sync(file) -> None:
    file.flush()
    os.fsync(file.fileno())
