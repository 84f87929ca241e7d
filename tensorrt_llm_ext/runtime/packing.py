"""Packing: which requests share a batch, and where its tensors lie; ``_runtime.pack`` computes every index of it.

A batch is T packed tokens of B sequences, the longest S tokens long. Everything but attention runs on packed rows;
attention runs on the padded ``[B, S]`` view that ``attention_rows`` gathers and ``packed_slots`` gathers back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import numpy as np

from tensorrt_llm_ext import _runtime
from tensorrt_llm_ext.recipes.contract import Limits, TensorSpec
from tensorrt_llm_ext.results.record import WorkItem

WINDOW_ITEMS = 1024
"""Items that are sorted by length together: enough for little padding, few enough that answers come in near order."""


def windows(items: Iterable[WorkItem], num_items: int = WINDOW_ITEMS) -> Iterator[list[WorkItem]]:
    """Cut a stream of items into lists of ``num_items``, the last one shorter, without reading ahead."""
    stream = iter(items)
    while window := list(islice(stream, num_items)):
        yield window


def batches_of_windows(items: Iterable[WorkItem], limits: Limits) -> Iterator[list[WorkItem]]:
    """The batches of a stream of items, window by window."""
    for window in windows(items):
        yield from batches(window, limits)


def batches(items: Sequence[WorkItem], limits: Limits) -> list[list[WorkItem]]:
    """Divide one window into batches within ``limits``, every item in exactly one: a pure function of its order.

    Items are sorted by length, equal lengths in the order given, and a batch is closed when the next item would pass
    ``opt_num_tokens`` (where one is set), ``max_num_tokens``, ``max_batch_size`` or ``max_padded_tokens``. An item that
    alone passes one of them is alone in its batch; beyond a maximum, ``Session.submit`` refuses it with the numbers.
    """
    max_num_tokens = min(limits.max_num_tokens, limits.opt_num_tokens or limits.max_num_tokens)
    max_batch_size, max_padded_tokens = limits.max_batch_size, limits.max_padded_tokens
    lengths = [len(item.token_ids) for item in items]
    formed: list[list[WorkItem]] = []
    batch: list[WorkItem] = []
    num_tokens = 0
    for index in np.argsort(lengths, kind="stable").tolist():
        length = lengths[index]  # the longest so far: the order is ascending
        batch_size = len(batch) + 1
        num_tokens += length
        if (
            not formed
            or num_tokens > max_num_tokens
            or batch_size > max_batch_size
            or batch_size * length > max_padded_tokens
        ):
            batch = []
            formed.append(batch)
            num_tokens = length
        batch.append(items[index])
    return formed


def layout_of(tensors: Sequence[TensorSpec], limits: Limits, vocab_size: int) -> _runtime.Layout:
    """Lay out an engine's tensors for ``_runtime.pack``. Raises PlanError for an input that it cannot fill."""
    return _runtime.Layout(
        [(tensor.name, tensor.role, tensor.dtype, tensor.shape) for tensor in tensors],
        vocab_size=vocab_size,
        max_num_tokens=limits.max_num_tokens,
        max_batch_size=limits.max_batch_size,
        max_seq_len=limits.max_seq_len,
        max_padded_tokens=limits.max_padded_tokens,
    )


def slot_bytes(tensors: Sequence[TensorSpec], limits: Limits) -> int:
    """Bytes that hold every input and output of the largest batch, wherever within ``limits`` it lies."""
    return layout_of(tensors, limits, vocab_size=1).slot_bytes  # which ids there are does not matter here


def index_arrays(
    inputs: Sequence[TensorSpec], token_ids: np.ndarray, offsets: np.ndarray, vocab_size: int
) -> dict[str, np.ndarray]:
    """Every input of one batch by name, read-only, in memory of its own: for callers without a session.

    ``token_ids`` (int32 [T]) holds the sequences one after another, ``offsets`` (int32 [B + 1]) where each begins and
    the last ends. Not for ``last_token_ids``, which needs an engine's convention.
    """
    longest = int(np.diff(offsets).max())
    limits = Limits(len(token_ids), len(offsets) - 1, longest, (len(offsets) - 1) * longest)
    layout = layout_of(inputs, limits, vocab_size)
    slot = _runtime.PinnedArena(layout.slot_bytes, num_slots=1).acquire(timeout_s=0)
    _runtime.pack(layout, token_ids, offsets, slot, convention="none", batch=0, digest=bytes(16))
    return {name: view.numpy() for name, view in slot.inputs().items()}
