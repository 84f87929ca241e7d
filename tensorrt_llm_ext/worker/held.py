"""Held: the work items a worker has taken from the broker and not settled yet, within a bound of tokens."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tensorrt_llm_ext.recipes.contract import Limits
from tensorrt_llm_ext.results import WorkItem
from tensorrt_llm_ext.worker.broker import Delivery
from tensorrt_llm_ext.worker.wanted import Wanted

FULL = 0.9
"""A batch of this share of the token budget need not wait for a better one."""

_BATCHES_TO_CHOOSE_FROM = 4
_STATES_BYTES = 1 << 30
_CHOICE = 2.0  # budgets that wait: more of them would not make the next batch better
_PADDING = 1.5  # slots a batch may take up over its budget: longer neighbours cost attention, gaps cost everything else


@dataclass(eq=False)
class HeldItem:
    """One work item and its newest delivery."""

    delivery: Delivery
    item: WorkItem
    runs_alone: bool = False  # it was in a batch that failed, or it comes again too often
    since: float = field(default_factory=time.monotonic)

    @property
    def num_tokens(self) -> int:
        return len(self.item.token_ids)


class Held:
    """Thread-safe. Items are added, taken as batches, put back when a batch failed, and released once settled."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._all: dict[int, HeldItem] = {}  # by sequence
        self._waiting: list[HeldItem] = []  # the oldest first
        self._num_tokens = 0
        self._changed = threading.Condition()

    def add(self, items: Iterable[HeldItem]) -> None:
        """Hold items; one that is held already only gets its newer delivery."""
        with self._changed:
            for held in items:
                known = self._all.get(held.delivery.sequence)
                if known is not None:
                    known.delivery = held.delivery
                    continue
                self._all[held.delivery.sequence] = held
                self._waiting.append(held)
                self._num_tokens += held.num_tokens
            self._changed.notify_all()

    def take_batch(self, limits: Limits, *, partly_filled: bool) -> list[HeldItem]:
        """Take the next batch; nothing when it would get better by waiting for items, unless ``partly_filled``."""
        with self._changed:
            batch = next_batch(self._waiting, limits)
            has_choice = sum(held.num_tokens for held in self._waiting) >= _CHOICE * budget_of(limits)
            if not batch or not (partly_filled or has_choice or is_full(batch, limits)):
                return []
            chosen = set(map(id, batch))
            self._waiting = [held for held in self._waiting if id(held) not in chosen]
            return batch

    def put_back(self, items: Sequence[HeldItem]) -> None:
        """Let items run again, before all others."""
        with self._changed:
            self._waiting[:0] = items
            self._changed.notify_all()

    def release(self, items: Iterable[HeldItem]) -> None:
        """Forget items that are settled."""
        with self._changed:
            for held in items:
                if self._all.pop(held.delivery.sequence, None) is not None:
                    self._num_tokens -= held.num_tokens
            self._changed.notify_all()

    def give_back(self, *, waiting_only: bool) -> list[Delivery]:
        """Forget the items that wait, or all, and return their deliveries for the broker."""
        with self._changed:
            items = list(self._waiting) if waiting_only else list(self._all.values())
            self._waiting = []
        self.release(items)
        return [held.delivery for held in items]

    def deliveries(self) -> list[Delivery]:
        """Everything that is held, for extending its deadline."""
        with self._changed:
            return [held.delivery for held in self._all.values()]

    def wait(self, timeout_s: float) -> None:
        """Wait for a change."""
        with self._changed:
            self._changed.wait(timeout_s)

    @property
    def free_tokens(self) -> int:
        return self.max_tokens - self._num_tokens

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    @property
    def waiting_tokens(self) -> int:
        with self._changed:
            return sum(held.num_tokens for held in self._waiting)

    def __len__(self) -> int:
        return len(self._all)


def budget_of(limits: Limits) -> int:
    """The tokens of a full batch."""
    return min(limits.max_num_tokens, limits.opt_num_tokens or limits.max_num_tokens)


def tokens_to_hold(wanted: Wanted, limits: Limits, num_batches: int) -> int:
    """Tokens enough for the batches that run or wait for a canary, for some to choose from, and for two long items.

    Of states no more than may wait in memory for the broker.
    """
    num_tokens = (num_batches + _BATCHES_TO_CHOOSE_FROM) * budget_of(limits)
    if wanted.has_states:
        num_tokens = max(2 * budget_of(limits), min(num_tokens, _STATES_BYTES // wanted.token_bytes))
    return num_tokens + 2 * wanted.policy.max_length


def next_batch(waiting: Sequence[HeldItem], limits: Limits) -> list[HeldItem]:
    """The oldest item, and those nearest to it in length that fit the engine's limits with it.

    Nearest first keeps padding low; going on to farther ones fills the gap that is left. An item that runs alone is a
    batch of its own, and a request id is in a batch once.
    """
    if not waiting:
        return []
    first = next((held for held in waiting if held.runs_alone), waiting[0])
    if first.runs_alone:
        return [first]
    budget = budget_of(limits)
    max_padded = min(limits.max_padded_tokens, int(_PADDING * budget))
    batch, request_ids = [first], {first.item.request_id}
    num_tokens = longest = first.num_tokens
    for held in sorted(waiting, key=lambda held: abs(held.num_tokens - first.num_tokens)):
        if len(batch) == limits.max_batch_size or num_tokens == budget:
            break
        length, size = max(longest, held.num_tokens), len(batch) + 1
        if num_tokens + held.num_tokens > budget or size * length > max_padded or held.item.request_id in request_ids:
            continue
        batch.append(held)
        request_ids.add(held.item.request_id)
        num_tokens, longest = num_tokens + held.num_tokens, length
    return batch


def is_full(batch: Sequence[HeldItem], limits: Limits) -> bool:
    """Whether a batch cannot get much better by waiting."""
    num_tokens = sum(held.num_tokens for held in batch)
    return num_tokens >= FULL * budget_of(limits) or len(batch) == limits.max_batch_size or batch[0].runs_alone
