"""One forward pass over a packed batch, with every buffer given: embedding, layers up to the highest tap, taps.

::

    x = embedding[token_ids]                                  # [M, hidden], the residual stream: layer 0
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

from tensorrt_llm_ext.backends.torch.values import Batch, HeadNorms, Heads, Layout, Linear, Norm, Rope, Rows
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
class Stretch:
    """Layers ``first`` to ``last``, up to a tap; layer 0 is the embedding."""

    first: int
    last: int
    ends_in_last_rows: bool = False  # of the last layer nothing is asked for but last rows


Run = Callable[[ModuleType, Decoder, Workspace, Layout, Stretch], None]


def forward(operations: ModuleType, decoder: Decoder, space: Workspace, batch: Batch, run: Run | None = None) -> None:
    """Fill the batch's outputs. ``operations`` is the module ``plain`` or ``kernels``; ``run`` runs stretches: ``run_stretch``
    or another way to the same."""
    op, run = operations, run or run_stretch
    space = space.of(len(batch.input_ids))
    where = op.layout(batch, len(space.x), space.places)
    for stretch in stretches(tuple(batch.outputs), len(decoder.layers)):
        run(op, decoder, space, where, stretch)
        if stretch.ends_in_last_rows:
            _give(op, decoder, space.last_rows(len(where.last)), batch, where, stretch.last, None)
        else:
            _give(op, decoder, space, batch, where, stretch.last, where.last)


def stretches(taps: tuple[Tap, ...], num_layers: int) -> tuple[Stretch, ...]:
    """Divide the embedding and the layers at the taps, of which one is after the highest."""
    ends = sorted({tap.layer for tap in taps})
    firsts = [0, *(end + 1 for end in ends)]
    is_last = only_last_rows(taps, num_layers)
    return tuple(Stretch(first, end, is_last and end == num_layers) for first, end in zip(firsts, ends, strict=False))


def run_stretch(op: ModuleType, decoder: Decoder, space: Workspace, where: Layout, stretch: Stretch) -> None:
    """Compute the layers of a stretch. All that it reads and writes lies in ``space`` and in the decoder."""
    for number in range(stretch.first, stretch.last + 1):
        if number == 0:
            op.embed(where.token_ids, decoder.embedding, space.x)
        elif number == stretch.last and stretch.ends_in_last_rows:
            _last_layer(op, decoder, space, where)
        else:
            _layer(op, decoder, space, where, number)


def run_products(op: ModuleType, decoder: Decoder, space: Workspace) -> None:
    """Multiply every row of ``space``, whatever it holds, by every weight of the layers: what bounds a pass over so many rows."""
    for layer in decoder.layers:
        op.multiply(space.rows("hidden", layer.qkv), layer.qkv, space.qkv)
        op.multiply(space.rows("attended", layer.o), layer.o, space.delta)
        op.multiply(space.rows("hidden", layer.gate_up), layer.gate_up, space.gate_up)
        op.multiply(space.rows("inner", layer.down), layer.down, space.delta)


def with_table(op: ModuleType, decoder: Decoder, space: Workspace) -> Decoder:
    """Compute the first layer's queries, keys and values of every token of the vocabulary, as a pass would."""
    layer, tokens = decoder.layers[0], torch.arange(len(decoder.embedding), dtype=torch.int32, device=space.x.device)
    table, h = space.qkv.new_empty(len(tokens), decoder.heads.fused_size), space.rows("hidden", layer.qkv)
    for some, rows in zip(tokens.split(len(space.x)), table.split(len(space.x)), strict=True):
        op.embed(some, decoder.embedding, space.x[: len(some)])
        op.add_norm(space.x, None, layer.attention_norm, h)
        op.multiply(h, layer.qkv, space.qkv)
        rows.copy_(space.qkv[: len(some)])
    return replace(decoder, qkv_of_token=table)


def _layer(op: ModuleType, decoder: Decoder, space: Workspace, where: Layout, number: int) -> None:
    layer = decoder.layers[number - 1]
    if number == 1 and decoder.qkv_of_token is not None:
        op.embed(where.token_ids, decoder.qkv_of_token, space.qkv)
    else:
        h = space.rows("hidden", layer.qkv)
        op.add_norm(space.x, _delta(op, decoder, space, number - 1), layer.attention_norm, h)
        op.multiply(h, layer.qkv, space.qkv)
    op.attention(space.qkv, decoder.heads, decoder.rope, layer.head_norms, where, _attended(space, layer))
    _after_attention(op, layer, space)


def _last_layer(op: ModuleType, decoder: Decoder, space: Workspace, where: Layout) -> None:
    """Compute the highest layer for last rows alone."""
    layer, heads, few = decoder.layers[-1], decoder.heads, space.last_rows(len(where.last))
    q, kv = layer.queries(heads), layer.keys_and_values(heads)
    queries, keys_and_values = few.narrow(heads.q_size), space.narrow(2 * heads.kv_size)
    h = space.rows("hidden", kv)
    op.add_norm(space.x, _delta(op, decoder, space, len(decoder.layers) - 1), layer.attention_norm, h)
    op.multiply(h, kv, keys_and_values)
    op.take(space.x, None, where.last, None, few.x[: len(where.last)])
    h = few.rows("hidden", q)
    op.add_norm(few.x, None, layer.attention_norm, h)
    op.multiply(h, q, queries)
    op.last_attention(queries, keys_and_values, heads, decoder.rope, layer.head_norms, where, _attended(few, layer))
    _after_attention(op, layer, few)


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
