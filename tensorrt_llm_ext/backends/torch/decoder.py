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

from dataclasses import dataclass
from types import ModuleType

import torch

from tensorrt_llm_ext.backends.torch.values import HeadNorms, Heads, Layout, Linear, Norm, Rope
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
    outputs: dict[Tap, torch.Tensor]


def forward(operations: ModuleType, decoder: Decoder, space: Workspace, batch: Batch) -> None:
    """Fill the batch's outputs. ``operations`` is the module ``plain`` or ``kernels``."""
    op, taps = operations, tuple(batch.outputs)
    num_tokens = len(batch.input_ids)
    space = space.of(num_tokens)
    where = op.layout(batch.sequence_lengths, num_tokens, space.places)
    x, delta, last = space.x, None, batch.last_token_ids
    op.embed(batch.input_ids, decoder.embedding, x)
    _give(op, decoder, space, batch, where, 0, x, delta, last)
    for number, layer in enumerate(decoder.layers, 1):
        h = space.rows("hidden", layer.qkv)
        op.add_norm(x, delta, layer.attention_norm, h)
        op.multiply(h, layer.qkv, space.qkv)
        op.attention(space.qkv, decoder.heads, decoder.rope, layer.head_norms, where, space.attended)
        if number == len(decoder.layers) and only_last_rows(taps, number):
            x, space, last = _last_rows(op, x, space, last, layer)
        elif layer.o.is_fp8:
            op.gather(space.attended, None, space.rows("attended", layer.o))
        delta = op.multiply_add(space.rows("attended", layer.o), layer.o, x, space.delta)
        h = space.rows("hidden", layer.gate_up)
        op.add_norm(x, delta, layer.mlp_norm, h)
        op.multiply(h, layer.gate_up, space.gate_up)
        h = space.rows("inner", layer.down)
        op.swiglu(space.gate_up, h)
        delta = op.multiply_add(h, layer.down, x, space.delta)
        _give(op, decoder, space, batch, where, number, x, delta, last)


def only_last_rows(taps: tuple[Tap, ...], num_layers: int) -> bool:
    """Say whether nothing but last rows is taken after the highest layer."""
    return all(tap.rows == "last" for tap in taps if tap.layer == num_layers)


def _last_rows(
    op: ModuleType, x: torch.Tensor, space: Workspace, last: torch.Tensor, layer: Layer
) -> tuple[torch.Tensor, Workspace, None]:
    """Leave the other rows behind: the stream, the workspace and the row numbers of the rest of the pass."""
    few = space.last_rows(len(last))
    op.gather(space.attended, last, few.rows("attended", layer.o))
    op.take(x, None, last, None, few.x[: len(last)])
    return few.x, few, None


def _give(
    op: ModuleType,
    decoder: Decoder,
    space: Workspace,
    batch: Batch,
    where: Layout,
    layer: int,
    x: torch.Tensor,
    delta: torch.Tensor | None,
    last: torch.Tensor | None,
) -> None:
    """Write the outputs of the taps after ``layer``."""
    for tap, out in batch.outputs.items():
        if tap.layer != layer:
            continue
        norm = decoder.final_norm if tap.norm == "post" else None
        if tap.rows == "mean":
            rows = space.float32_rows(where.num_tokens)
            op.take(x, delta, None, norm, rows)
            op.mean(rows, where, out)
        else:
            op.take(x, delta, last if tap.rows == "last" else None, norm, out)
