"""The decoder's layers. Everything but attention runs on packed rows ``[T, width]``: one row a token, no padding.

Attention alone needs whole sequences side by side: its rows are gathered to ``[B, S, width]`` and back. A padded slot
repeats its own sequence's last row; no real query sees it, because attention is causal and padding lies on the right.
"""

from __future__ import annotations

from dataclasses import dataclass

from tensorrt_llm_ext.checkpoint.architecture import Architecture
from tensorrt_llm_ext.graph import names
from tensorrt_llm_ext.graph.operators import Graph

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm"


def layer_prefix(layer: int) -> str:
    """How the checkpoint's names of one layer's weights begin; layers count from 0."""
    return f"model.layers.{layer}."


@dataclass(frozen=True)
class Layout:
    """Values that say where the batch's rows lie; shared by all layers."""

    position_ids: str  # [T]
    attention_rows: str  # [B, S]
    packed_slots: str  # [T]


@dataclass(frozen=True)
class RopeRows:
    """The rope tables' rows of the batch's tokens, ``[1, T, head_dim // 2]``; shared by all layers."""

    cos: str
    sin: str


def layout_inputs(g: Graph) -> Layout:
    return Layout(
        position_ids=g.input(names.POSITION_IDS, "int32", ("T",)),
        attention_rows=g.input(names.ATTENTION_ROWS, "int32", ("B", "S")),
        packed_slots=g.input(names.PACKED_SLOTS, "int32", ("T",)),
    )


def rope_rows(g: Graph, cos: str, sin: str, position_ids: str) -> RopeRows:
    """Look the tokens' positions up in the tables ``[max_seq_len, head_dim // 2]``."""
    return RopeRows(*(g.unsqueeze(g.gather(table, position_ids), 0) for table in (cos, sin)))


def decoder_layer(
    g: Graph, x: str, prefix: str, layout: Layout, rope: RopeRows, a: Architecture, rows: str | None = None
) -> str:
    """x + attention(norm(x)), then + mlp(norm(·)): the residual stream ``[T, hidden]`` after one layer.

    With ``rows``, only these packed rows of the result are computed, ``[B, hidden]``.
    """
    slots = layout.packed_slots if rows is None else g.gather(layout.packed_slots, rows)
    h = g.rms_norm(x, prefix + "input_layernorm", a.norm_eps)
    attended = attention(g, h, prefix + "self_attn.", layout.attention_rows, slots, rope, a)
    x = g.add(x if rows is None else g.gather(x, rows), attended)
    h = g.rms_norm(x, prefix + "post_attention_layernorm", a.norm_eps)
    return g.add(x, mlp(g, h, prefix + "mlp.", a))


def attention(g: Graph, x: str, prefix: str, attention_rows: str, slots: str, rope: RopeRows, a: Architecture) -> str:
    """Grouped-query attention of packed rows, of which those in ``slots`` come back."""
    num_heads = {"q_proj": a.num_heads, "k_proj": a.num_kv_heads, "v_proj": a.num_kv_heads}
    q, k, v = g.linears(x, {prefix + name: count * a.head_dim for name, count in num_heads.items()}, a.has_qkv_bias)
    if a.has_qk_norm:
        q = head_norm(g, q, prefix + "q_norm", a.num_heads, a)
        k = head_norm(g, k, prefix + "k_norm", a.num_kv_heads, a)
    q = rotate(g, q, rope, a.num_heads)
    k = rotate(g, k, rope, a.num_kv_heads)
    q, k, v = (g.gather(rows, attention_rows) for rows in (q, k, v))  # [B, S, heads * head_dim]
    o = g.causal_attention(q, k, v, num_heads=a.num_heads, num_kv_heads=a.num_kv_heads, scale=a.head_dim**-0.5)
    o = g.gather(g.reshape(o, -1, a.num_heads * a.head_dim), slots)  # [T, heads * head_dim]
    return g.linear(o, prefix + "o_proj", a.has_o_bias)


def head_norm(g: Graph, x: str, name: str, num_heads: int, a: Architecture) -> str:
    """Normalise each head of ``[T, num_heads * head_dim]`` on its own (Qwen3)."""
    heads = g.rms_norm(g.reshape(x, -1, num_heads, a.head_dim), name, a.norm_eps)
    return g.reshape(heads, -1, num_heads * a.head_dim)


def rotate(g: Graph, x: str, rope: RopeRows, num_heads: int) -> str:
    return g.squeeze(g.rotate(g.unsqueeze(x, 0), rope.cos, rope.sin, num_heads), 0)


def mlp(g: Graph, x: str, prefix: str, a: Architecture) -> str:
    """down(silu(gate(x)) * up(x))"""
    sizes = {prefix + name: a.intermediate_size for name in ("gate_proj", "up_proj")}
    gate, up = g.linears(x, sizes, a.has_mlp_bias)
    return g.linear(g.multiply(g.silu(gate), up), prefix + "down_proj", a.has_mlp_bias)


def final_norm(g: Graph, x: str, a: Architecture) -> str:
    return g.rms_norm(x, FINAL_NORM, a.norm_eps)
