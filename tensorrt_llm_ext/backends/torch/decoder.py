"""One forward pass over a packed batch, with every buffer given: embedding, layers up to the highest tap, taps.

::

    x = embedding[input_ids]                                  # [M, hidden], the residual stream
    for layer in layers up to the highest tap:
        h = norm(x + delta);  qkv = h @ W;  a = attention(qkv);  delta = a @ W
        h = norm(x + delta);  g = h @ W;    s = swiglu(g);       delta = s @ W
        give out the taps of this layer                       # from x + delta

What a layer's products add to the stream is ``delta`` until the next norm adds it, in the pass that it makes anyway. Where
nothing after the highest layer's attention is asked for but last rows, only those are computed from there on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch

from tensorrt_llm_ext.backends.torch.values import HeadNorms, Heads, Layout, Linear, Norm, Rope, Rows
from tensorrt_llm_ext.backends.torch.workspace import Workspace
from tensorrt_llm_ext.taps import Tap


@dataclass(frozen=True)
class Layer:
    """The weights of one decoder layer. ``qkv`` and ``gate_up`` hold the layers that read the same rows, fused."""

    attention_norm: Norm
    qkv: Linear
    head_norms: HeadNorms | None
    o: Linear
    mlp_norm: Norm
    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class Decoder:
    """A decoder's weights on their device, up to the highest tap."""

    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[Layer, ...]
    final_norm: Norm
    heads: Heads
    rope: Rope


@dataclass(frozen=True)
class Batch:
    """A batch as the engine's tensors give it: int32 inputs, and an output for every tap."""

    input_ids: torch.Tensor  # [T]
    sequence_lengths: torch.Tensor  # [B]
    last_token_ids: torch.Tensor | None  # [B], 1-based; only with a `last` tap
    longest: int  # tokens of the longest sequence
    outputs: dict[Tap, torch.Tensor]


@dataclass(frozen=True)
class Stretch:
    """Layers between two taps: ``first`` to ``last``, from 1. Of one that ends in attention, the rest is computed for last
    rows only."""

    first: int
    last: int
    ends_in_attention: bool


Run = Callable[[ModuleType, Decoder, Workspace, Layout, Stretch], None]


def forward(operations: ModuleType, decoder: Decoder, space: Workspace, batch: Batch, run: Run | None = None) -> None:
    """Fill the batch's outputs. ``operations`` is the module ``plain`` or ``kernels``; ``run`` runs stretches: ``run_stretch``
    or another way to the same."""
    op, run = operations, run or run_stretch
    num_tokens, last = len(batch.input_ids), batch.last_token_ids
    space = space.of(num_tokens)
    where = op.layout(batch.sequence_lengths, batch.longest, num_tokens, len(space.x), space.places)
    op.embed(batch.input_ids, decoder.embedding, space.x)
    _give(op, decoder, space, batch, where, 0, last)
    for stretch in stretches(tuple(batch.outputs), len(decoder.layers)):
        run(op, decoder, space, where, stretch)
        if stretch.ends_in_attention:
            layer = decoder.layers[stretch.last - 1]
            space, last = _last_rows(op, space, last, layer), None
            _after_attention(op, layer, space)
        _give(op, decoder, space, batch, where, stretch.last, last)


def stretches(taps: tuple[Tap, ...], num_layers: int) -> tuple[Stretch, ...]:
    """Divide the layers at the taps."""
    ends = sorted({tap.layer for tap in taps} - {0})
    only_last = only_last_rows(taps, num_layers)
    return tuple(
        Stretch(before + 1, end, only_last and end == num_layers) for before, end in zip([0, *ends], ends, strict=False)
    )


def run_stretch(op: ModuleType, decoder: Decoder, space: Workspace, where: Layout, stretch: Stretch) -> None:
    """Compute the layers of a stretch. All that it reads and writes lies in ``space`` and in the decoder."""
    for number in range(stretch.first, stretch.last + 1):
        layer = decoder.layers[number - 1]
        h = space.rows("hidden", layer.qkv)
        op.add_norm(space.x, _delta(op, decoder, space, number - 1), layer.attention_norm, h)
        op.multiply(h, layer.qkv, space.qkv)
        is_end = number == stretch.last and stretch.ends_in_attention
        is_direct = not is_end and (layer.o.input_scale is not None or not layer.o.is_fp8)
        attended = space.rows("attended", layer.o) if is_direct else Rows(space.attended)
        op.attention(space.qkv, decoder.heads, decoder.rope, layer.head_norms, where, attended)
        if is_end:
            return
        if not is_direct:
            op.gather(space.attended, None, space.rows("attended", layer.o))
        _after_attention(op, layer, space)


def _after_attention(op: ModuleType, layer: Layer, space: Workspace) -> None:
    op.multiply_add(space.rows("attended", layer.o), layer.o, space.x, space.delta)
    h = space.rows("hidden", layer.gate_up)
    op.add_norm(space.x, None if op.adds_itself(layer.o) else space.delta, layer.mlp_norm, h)
    op.multiply(h, layer.gate_up, space.gate_up)
    h = space.rows("inner", layer.down)
    op.swiglu(space.gate_up, h)
    op.multiply_add(h, layer.down, space.x, space.delta)


def _delta(op: ModuleType, decoder: Decoder, space: Workspace, layer: int) -> torch.Tensor | None:
    """What is still to be added to the stream after ``layer``."""
    return None if layer == 0 or op.adds_itself(decoder.layers[layer - 1].down) else space.delta


def only_last_rows(taps: tuple[Tap, ...], num_layers: int) -> bool:
    """Say whether nothing but last rows is taken after the highest layer."""
    return all(tap.rows == "last" for tap in taps if tap.layer == num_layers)


def _last_rows(op: ModuleType, space: Workspace, last: torch.Tensor, layer: Layer) -> Workspace:
    """Leave the other rows behind: the workspace of the rest of the pass."""
    few = space.last_rows(len(last))
    op.gather(space.attended, last, few.rows("attended", layer.o))
    op.take(space.x, None, last, None, few.x[: len(last)])
    return few


def _give(
    op: ModuleType, decoder: Decoder, space: Workspace, batch: Batch, where: Layout, layer: int, last: torch.Tensor | None
) -> None:
    """Write the outputs of the taps after ``layer``."""
    delta = _delta(op, decoder, space, layer)
    for tap, out in batch.outputs.items():
        if tap.layer != layer:
            continue
        norm = decoder.final_norm if tap.norm == "post" else None
        if tap.rows == "mean":
            rows = space.float32_rows(where.num_tokens)
            op.take(space.x, delta, None, norm, rows)
            op.mean(rows, where, out)
        else:
            op.take(space.x, delta, last if tap.rows == "last" else None, norm, out)
