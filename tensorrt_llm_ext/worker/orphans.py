"""Orphans: rows of an open work item to which nobody has published a reference. They go, else they would fill the room for
rows, and every worker would wait for it for ever.

Nobody can know that a worker has ended: a slow one may still publish its reference. So each side writes first and looks then:

* the partition's writer writes down that an item's chunks up to a sequence are **asked** about, and looks for a reference;
  only where none waits it writes down that they are **removed**, and removes them;
* a worker publishes its reference, and looks; when one of its chunks was asked about it does not acknowledge the work item,
  but puts the rows again, behind all that was asked about.

Whatever their order, one of the two sees the other. So the rows of an item that was acknowledged stay until they are
committed; and a reference whose rows were removed is passed over, because its item will be answered again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from tensorrt_llm_ext.worker.broker import Broker


@dataclass(frozen=True)
class _Doubt:
    """Up to and with which sequence the chunks of a work item were asked about, and removed; both only ever rise."""

    asked: int = 0
    removed: int = 0


def were_asked_about(broker: Broker, item: int, chunks: Sequence[int]) -> bool:
    """Whether an item may not be acknowledged for a reference to these chunks. To be asked once the broker has it."""
    return min(chunks) <= _doubt(broker, item)[0].asked


def were_removed(broker: Broker, item: int, chunks: Sequence[int]) -> bool:
    """Whether chunks that are gone were orphans. To be asked after they were not found."""
    return min(chunks) <= _doubt(broker, item)[0].removed


class Orphans:
    """Those of one partition: rows of open work items without a reference for ``after_s`` seconds.

    No work item gets a wrong answer when they are not orphans at all; their worker only has to put them again.
    """

    def __init__(self, broker: Broker, partition: int, after_s: float) -> None:
        self._broker = broker
        self._partition = partition
        self._after_s = after_s
        self._seen: dict[int, tuple[float, int]] = {}  # by item: since when, and the newest chunk of any then

    def remove(self, items: Sequence[int], newest_chunk: int, keep_lease: Callable[[], None]) -> int:
        """Remove those that are old enough of the open items that have rows now; returns of how many items."""
        now = time.monotonic()
        self._seen = {item: self._seen.get(item, (now, newest_chunk)) for item in items}
        old = [item for item, (since, _) in self._seen.items() if now - since >= self._after_s]
        num_items = 0
        for item in sorted(set(old) - self._broker.items_referred_to(self._partition, old)):
            keep_lease()
            num_items += self._remove(item, through=self._seen.pop(item)[1])
        return num_items

    def _remove(self, item: int, through: int) -> bool:
        """Ask, look, and remove; whether they were removed."""
        if not self._write(item, asked=through):
            return False
        if self._broker.items_referred_to(self._partition, [item]):
            return False
        if not self._write(item, removed=through):
            return False
        self._broker.remove_rows(self._partition, [item], through=through)
        return True

    def _write(self, item: int, **through: int) -> bool:
        """Let a number rise; False when another writer has changed it meanwhile."""
        doubt, revision = _doubt(self._broker, item)
        risen = {name: max(number, through.get(name, 0)) for name, number in asdict(doubt).items()}
        return self._broker.put("facts", _key(item), json.dumps(risen).encode(), revision=revision) is not None


def _doubt(broker: Broker, item: int) -> tuple[_Doubt, int]:
    """What is written down about an item's rows, and its revision, 0 where nothing is."""
    entry = broker.get("facts", _key(item))
    return (_Doubt(**json.loads(entry.value)), entry.revision) if entry else (_Doubt(), 0)


def _key(item: int) -> str:
    return f"orphans.{item}"
