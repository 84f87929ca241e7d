"""Packing: which requests share a batch, and every index of that batch, computed here and nowhere else.

A batch is T packed tokens of B sequences, the longest S tokens long. Everything but attention runs on packed rows;
attention runs on the padded ``[B, S]`` view that ``attention_rows`` gathers and ``packed_slots`` gathers back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import ml_dtypes  # noqa: F401  registers bfloat16 as a NumPy type
import numpy as np

from tensorrt_llm_ext.graph import names
from tensorrt_llm_ext.recipes.contract import Convention, Limits, TensorSpec
from tensorrt_llm_ext.results.record import WorkItem

WINDOW_ITEMS = 1024
"""Items that are sorted by length together: enough for little padding, few enough that answers come in near order."""

ALIGNMENT = 256
"""Bytes between the starts of two tensors are a multiple of this: what CUDA's own allocator gives."""


@dataclass(frozen=True)
class BatchShape:
    """The three sizes of a batch: T packed tokens, B sequences, S tokens of the longest."""

    num_tokens: int
    batch_size: int
    longest: int

    def sizes(self, shape: tuple[int | str, ...]) -> tuple[int, ...]:
        """Replace the symbols T, B and S of a contract's shape."""
        symbols = {"T": self.num_tokens, "B": self.batch_size, "S": self.longest}
        return tuple(symbols[size] if isinstance(size, str) else size for size in shape)


@dataclass(frozen=True)
class PackedBatch:
    """A batch that lies in a slot: a view of every input, filled, and of every output, for the engine to fill."""

    shape: BatchShape
    offsets: np.ndarray  # int32 [B + 1]: sequence i is packed rows offsets[i] to offsets[i + 1]
    inputs: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray]


def windows(items: Iterable[WorkItem], num_items: int = WINDOW_ITEMS) -> Iterator[list[WorkItem]]:
    """Cut a stream of items into lists of ``num_items``, the last one shorter, without reading ahead."""
    stream = iter(items)
    while window := list(islice(stream, num_items)):
        yield window


def batches(items: Sequence[WorkItem], limits: Limits) -> list[list[WorkItem]]:
    """Divide one window into batches within ``limits``, every item in exactly one: a pure function of its order.

    Items are sorted by length, equal lengths in the order given, and a batch is closed when the next item would pass
    ``opt_num_tokens`` (where one is set), ``max_num_tokens``, ``max_batch_size`` or ``max_padded_tokens``. An item that
    alone passes one of them is alone in its batch; beyond a maximum, ``Session.submit`` refuses it with the numbers.
    """
    max_num_tokens = min(limits.max_num_tokens, limits.opt_num_tokens or limits.max_num_tokens)
    lengths = np.fromiter((len(item.token_ids) for item in items), dtype=np.int64, count=len(items))
    formed: list[list[WorkItem]] = []
    num_tokens = 0
    for index in np.argsort(lengths, kind="stable"):
        length = int(lengths[index])  # the longest so far: the order is ascending
        batch_size = len(formed[-1]) + 1 if formed else 1
        num_tokens += length
        if (
            not formed
            or num_tokens > max_num_tokens
            or batch_size > limits.max_batch_size
            or batch_size * length > limits.max_padded_tokens
        ):
            formed.append([])
            num_tokens = length
        formed[-1].append(items[index])
    return formed


def slot_bytes(tensors: Sequence[TensorSpec], limits: Limits) -> int:
    """Bytes that hold every input and output of the largest batch, wherever within ``limits`` it lies."""
    return sum(_aligned(_max_elements(tensor, limits) * np.dtype(tensor.dtype).itemsize) for tensor in tensors)


def pack(
    memory: np.ndarray,
    tensors: Sequence[TensorSpec],
    token_ids: np.ndarray,
    offsets: np.ndarray,
    convention: Convention,
) -> PackedBatch:
    """Write a batch into ``memory`` (uint8, of at least ``slot_bytes``): inputs back to back, then outputs.

    ``token_ids`` (int32 [T]) holds the sequences one after another, ``offsets`` (int32 [B + 1]) where each begins and
    the last ends. No sequence is empty; the session's door has checked that and the limits.
    """
    lengths = np.diff(offsets)
    batch_size, longest = len(lengths), int(lengths.max())
    shape = BatchShape(len(token_ids), batch_size, longest)
    inputs, outputs = _views(memory, tensors, shape)

    starts = offsets[:-1]
    sequence = np.repeat(np.arange(batch_size, dtype=np.int32), lengths)  # [T]
    positions = np.arange(shape.num_tokens, dtype=np.int32) - starts[sequence]
    fill = {
        names.INPUT_IDS: lambda out: np.copyto(out, token_ids),
        names.POSITION_IDS: lambda out: np.copyto(out, positions),
        names.PACKED_SLOTS: lambda out: np.add(sequence * np.int32(longest), positions, out=out),
        names.ATTENTION_ROWS: lambda out: _attention_rows(starts, lengths, out),
        names.LAST_TOKEN_IDS: lambda out: np.copyto(out, gather_ids(offsets, convention)),
        names.SEQUENCE_LENGTHS: lambda out: np.copyto(out, lengths),
    }
    for name, view in inputs.items():
        fill[name](view)
    return PackedBatch(shape, offsets, inputs, outputs)


KNOWN_INPUTS = (
    names.INPUT_IDS,
    names.POSITION_IDS,
    names.ATTENTION_ROWS,
    names.PACKED_SLOTS,
    names.LAST_TOKEN_IDS,
    names.SEQUENCE_LENGTHS,
)
"""What ``pack`` knows how to fill; an engine with another input cannot be served."""


def gather_ids(offsets: np.ndarray, convention: Convention) -> np.ndarray:
    """Say each sequence's last row as the engine reads it: ``prefix_sum`` is 1-based, ``index`` 0-based. int32 [B]."""
    return offsets[1:] if convention == "prefix_sum" else offsets[1:] - np.int32(1)


def _attention_rows(starts: np.ndarray, lengths: np.ndarray, out: np.ndarray) -> None:
    """Row of every padded slot; a slot past the end is its own sequence's last row, so that no NaN crosses requests."""
    within = np.arange(out.shape[1], dtype=np.int32)
    np.minimum(within[None, :], (lengths - 1)[:, None], out=out)
    np.add(out, starts[:, None], out=out)


def _views(
    memory: np.ndarray, tensors: Sequence[TensorSpec], shape: BatchShape
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    views: dict[str, dict[str, np.ndarray]] = {"input": {}, "output": {}}
    offset = 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.role):  # stable: inputs first, in the contract's order
        dtype, sizes = np.dtype(tensor.dtype), shape.sizes(tensor.shape)
        num_bytes = math.prod(sizes) * dtype.itemsize
        views[tensor.role][tensor.name] = memory[offset : offset + num_bytes].view(dtype).reshape(sizes)
        offset += _aligned(num_bytes)
    return views["input"], views["output"]


def _max_elements(tensor: TensorSpec, limits: Limits) -> int:
    bounds = {"T": limits.max_num_tokens, "B": limits.max_batch_size, "S": limits.max_seq_len}
    sizes = list(tensor.shape)
    elements = 1
    if "B" in sizes and "S" in sizes:  # bounded together, which no single dimension is
        sizes.remove("B")
        sizes.remove("S")
        elements = limits.max_padded_tokens
    return elements * math.prod(bounds[size] if isinstance(size, str) else size for size in sizes)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
