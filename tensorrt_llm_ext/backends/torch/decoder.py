"""One forward pass over a packed batch, with every buffer given: embedding, layers up to the highest tap, taps.

::

    x = embedding[input_ids]                                  # [M, hidden], the residual stream
    for layer in layers up to the highest tap:
        h = norm(x + delta);  qkv = h @ W;  a = attention(qkv);  delta = a @ W
        h = norm(x + delta);  g = h @ W;    s = swiglu(g);       delta = s @ W
        give out the taps of this layer                       # from x + delta

What a layer's products add to the stream is ``delta`` until the next norm adds it, in the pass that it makes anyway. Where
nothing but last rows is asked for after the highest layer, it computes keys and values of every row, and all else of last
rows alone. What the first layer multiplies depends on nothing but the token, so a table of every token's product may replace it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
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

    def queries(self, heads: Heads) -> Linear:
        """The part of ``qkv`` that makes queries."""
        return self.qkv.part(0, heads.q_size)

    def keys_and_values(self, heads: Heads) -> Linear:
        """The part of ``qkv`` that makes keys and values."""
        return self.qkv.part(heads.q_size, heads.fused_size)


@dataclass(frozen=True)
class Decoder:
    """A decoder's weights on their device, up to the highest tap."""

    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[Layer, ...]
    final_norm: Norm
    heads: Heads
    rope: Rope
    qkv_of_token: torch.Tensor | None = None  # [vocab, fused], of the first layer, before rotation; None: no table


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
    """Layers between two taps, of every row: ``first`` to ``last``, from 1."""

    first: int
    last: int


Run = Callable[[ModuleType, Decoder, Workspace, Layout, Stretch], None]


def forward(operations: ModuleType, decoder: Decoder, space: Workspace, batch: Batch, run: Run | None = None) -> None:
    """Fill the batch's outputs. ``operations`` is the module ``plain`` or ``kernels``; ``run`` runs stretches: ``run_stretch``
    or another way to the same."""
    op, run = operations, run or run_stretch
    num_tokens, last, num_layers = len(batch.input_ids), batch.last_token_ids, len(decoder.layers)
    space = space.of(num_tokens)
    where = op.layout(batch.sequence_lengths, batch.longest, num_tokens, len(space.x), space.places)
    op.embed(batch.input_ids, decoder.embedding, space.x)
    _give(op, decoder, space, batch, where, 0, last)
    if decoder.qkv_of_token is not None:
        op.embed(batch.input_ids, decoder.qkv_of_token, space.qkv)
    for stretch in stretches(tuple(batch.outputs), num_layers):
        run(op, decoder, space, where, stretch)
        _give(op, decoder, space, batch, where, stretch.last, last)
    if only_last_rows(tuple(batch.outputs), num_layers):
        few = _last_layer(op, decoder, space, where, last)
        _give(op, decoder, few, batch, where, num_layers, None)


def stretches(taps: tuple[Tap, ...], num_layers: int) -> tuple[Stretch, ...]:
    """Divide the layers at the taps; without the highest where only last rows are taken after it."""
    ends = {tap.layer for tap in taps} - {0}
    if only_last_rows(taps, num_layers):
        ends = (ends - {num_layers}) | ({num_layers - 1} - {0})
    ordered = sorted(ends)
    return tuple(Stretch(before + 1, end) for before, end in zip([0, *ordered], ordered, strict=False))


def run_stretch(op: ModuleType, decoder: Decoder, space: Workspace, where: Layout, stretch: Stretch) -> None:
    """Compute the layers of a stretch. All that it reads and writes lies in ``space`` and in the decoder."""
    for number in range(stretch.first, stretch.last + 1):
        layer = decoder.layers[number - 1]
        if number > 1 or decoder.qkv_of_token is None:
            h = space.rows("hidden", layer.qkv)
            op.add_norm(space.x, _delta(op, decoder, space, number - 1), layer.attention_norm, h)
            op.multiply(h, layer.qkv, space.qkv)
        op.attention(space.qkv, decoder.heads, decoder.rope, layer.head_norms, where, _attended(space, layer))
        _after_attention(op, layer, space)


def with_table(op: ModuleType, decoder: Decoder, space: Workspace) -> Decoder:
    """Compute the first layer's queries, keys and values of every token of the vocabulary, as a pass would."""
    layer, tokens = decoder.layers[0], torch.arange(len(decoder.embedding), dtype=torch.int32, device=space.x.device)
    table, h = space.qkv.new_empty(len(tokens), decoder.heads.fused_size), space.rows("hidden", layer.qkv)
    for some, rows in zip(tokens.split(len(space.x)), table.split(len(space.x)), strict=True):
        op.embed(some, decoder.embedding, space.x)
        op.add_norm(space.x, None, layer.attention_norm, h)
        op.multiply(h, layer.qkv, space.qkv)
        rows.copy_(space.qkv[: len(some)])
    return replace(decoder, qkv_of_token=table)


def _last_layer(op: ModuleType, decoder: Decoder, space: Workspace, where: Layout, last: torch.Tensor) -> Workspace:
    """Compute the highest layer for last rows alone; the workspace that they are in."""
    layer, heads, few = decoder.layers[-1], decoder.heads, space.last_rows(len(last))
    q, kv = layer.queries(heads), layer.keys_and_values(heads)
    queries, keys_and_values = few.narrow(heads.q_size), space.narrow(2 * heads.kv_size)
    h = space.rows("hidden", kv)
    op.add_norm(space.x, _delta(op, decoder, space, len(decoder.layers) - 1), layer.attention_norm, h)
    op.multiply(h, kv, keys_and_values)
    op.take(space.x, None, last, None, few.x[: len(last)])
    h = few.rows("hidden", q)
    op.add_norm(few.x, None, layer.attention_norm, h)
    op.multiply(h, q, queries)
    op.last_attention(queries, keys_and_values, last, heads, decoder.rope, layer.head_norms, where, _attended(few, layer))
    _after_attention(op, layer, few)
    return few


def _attended(space: Workspace, layer: Layer) -> Rows:
    """Where attention writes: what the next product reads, unless that has a scale a row, which takes all heads to find."""
    return space.rows("attended", layer.o) if _is_direct(layer) else Rows(space.attended)


def _is_direct(layer: Layer) -> bool:
    return layer.o.input_scale is not None or not layer.o.is_fp8


def _after_attention(op: ModuleType, layer: Layer, space: Workspace) -> None:
    if not _is_direct(layer):
        op.quantise(space.attended, space.rows("attended", layer.o))
    op.multiply_add(space.rows("attended", layer.o), layer.o, space.x, space.delta)
    h = space.rows("hidden", layer.gate_up)
    op.add_norm(space.x, None if op.adds_itself(layer.o) else space.delta, layer.mlp_norm, h)
    inner = space.rows("inner", layer.down)
    op.multiply_swiglu(h, layer.gate_up, space.gate_up, inner)
    op.multiply_add(inner, layer.down, space.x, space.delta)


def _delta(op: ModuleType, decoder: Decoder, space: Workspace, layer: int) -> torch.Tensor | None:
    """What is still to be added to the stream after ``layer``."""
    return None if layer == 0 or op.adds_itself(decoder.layers[layer - 1].down) else space.delta


def only_last_rows(taps: tuple[Tap, ...], num_layers: int) -> bool:
    """Say whether nothing but last rows is taken after the highest layer, which is one at all."""
    return num_layers > 0 and all(tap.rows == "last" for tap in taps if tap.layer == num_layers)


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
