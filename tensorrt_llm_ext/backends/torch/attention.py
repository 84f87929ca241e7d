"""Attention of packed sequences in Triton: rotation, QK-norm and causal grouped-query attention, no padding.

A sequence that fits one tile is computed by ``_short``: a program takes several heads one after another, loads the next
while it computes, and rotates queries and keys as they come. A longer one has its keys rotated in place beforehand, since
each is read by many tiles, and is computed by ``_long``, one tile of queries a program. Which of the two depends
on the sequence alone, and tiles begin at its first token, so a result does not depend on the batch.

The two halves of a head are kept apart: rope turns them against each other, and their dot products add.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tensorrt_llm_ext.backends.torch.values import HeadNorms, Heads, Layout, Rope

BM = 128  # queries of a tile
_MAX_HEADS = 16  # of a program: enough to keep loads in flight, few enough to fill the card
_LOG2_E = 1.4426950408889634


def layout(lengths: torch.Tensor, num_tokens: int, space: torch.Tensor) -> Layout:
    """See ``plain.layout``. ``space`` holds the starts, then the tiles."""
    batch_size = len(lengths)
    num_tiles = num_tokens // BM + batch_size  # at most: each sequence ends in at most one tile that is not full
    starts = space[:batch_size]
    tiles = space[batch_size : batch_size + 3 * num_tiles].view(num_tiles, 3)
    _layout[(batch_size,)](lengths, starts, tiles, batch_size, num_tiles, BM=BM, BLOCK=1024, num_warps=4)
    return Layout(lengths, starts, num_tokens, tiles)


def attention(
    qkv: torch.Tensor, heads: Heads, rope: Rope, norms: HeadNorms | None, where: Layout, out: torch.Tensor
) -> None:
    """See ``plain.attention``."""
    num_tiles, half = len(where.tiles), heads.head_dim // 2
    q_norm, k_norm, eps = (rope.cos, rope.cos, 0.0) if norms is None else (norms.q, norms.k, norms.eps)
    tables, sizes = (where.tiles, rope.cos, rope.sin), (heads.num_heads, heads.num_kv_heads)
    scale = heads.head_dim**-0.5 * _LOG2_E
    shape = dict(HALF_DIM=half, HALF=max(16, triton.next_power_of_2(half)), HAS_NORM=norms is not None, BM=BM)
    at_once = _largest_divisor(heads.num_heads)
    _short[(num_tiles, heads.num_heads // at_once)](
        qkv, out, *tables, q_norm, k_norm, eps, scale, qkv.stride(0), out.stride(0), *sizes, **shape,
        AT_ONCE=at_once, STAGES=2, num_warps=8,
    )  # fmt: skip
    if where.num_tokens <= BM or len(rope.cos) <= BM:
        return  # no sequence is longer than a tile
    at_once = _largest_divisor(heads.num_kv_heads)
    _rotate_keys[(num_tiles, heads.num_kv_heads // at_once)](
        qkv, *tables, k_norm, eps, qkv.stride(0), heads.num_heads, **shape, AT_ONCE=at_once, num_warps=8
    )
    at_once = _largest_divisor(heads.num_heads)
    _long[(num_tiles, heads.num_heads // at_once)](
        qkv, out, *tables, q_norm, eps, scale, qkv.stride(0), out.stride(0), *sizes, **shape,
        BN=64, AT_ONCE=at_once, num_warps=8, num_stages=3,
    )  # fmt: skip


def _largest_divisor(num_heads: int) -> int:
    return next(count for count in range(_MAX_HEADS, 0, -1) if num_heads % count == 0)


@triton.jit(do_not_specialize=["batch_size", "num_tiles"])
def _layout(lengths, starts, tiles, batch_size, num_tiles, BM: tl.constexpr, BLOCK: tl.constexpr):
    """Program b finds where sequence b and its tiles begin, and writes them; the last also ends the list."""
    index = tl.program_id(0)
    start = 0
    first_tile = 0
    for base in range(0, index, BLOCK):
        others = base + tl.arange(0, BLOCK)
        before = tl.load(lengths + others, mask=others < index, other=0)
        start += tl.sum(before)
        first_tile += tl.sum((before + BM - 1) // BM)
    length = tl.load(lengths + index)
    own_tiles = (length + BM - 1) // BM
    tl.store(starts + index, start)
    for tile in range(own_tiles):
        # The last queries of a sequence see the most keys: they go first.
        place = tiles + 3 * (first_tile + own_tiles - 1 - tile)
        tl.store(place, start)
        tl.store(place + 1, tile * BM)
        tl.store(place + 2, length)
    if index == batch_size - 1:
        for tile in range(first_tile + own_tiles, num_tiles):
            tl.store(tiles + 3 * tile + 2, 0)


@triton.jit
def _turned(first, second, cos, sin, norm, eps, HALF_DIM: tl.constexpr, HALF: tl.constexpr, HAS_NORM: tl.constexpr):
    """Normalise and rotate the two halves ``[rows, HALF]`` of heads; the result has their type."""
    dtype = first.dtype
    first, second = first.to(tl.float32), second.to(tl.float32)
    cos, sin = cos.to(tl.float32), sin.to(tl.float32)
    if HAS_NORM:
        columns = tl.arange(0, HALF)
        inside = columns < HALF_DIM
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        size = tl.rsqrt(squares / (2 * HALF_DIM) + eps)[:, None]
        first = first * size * tl.load(norm + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
        second = second * size * tl.load(norm + HALF_DIM + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    return (first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype)


@triton.jit
def _short(
    qkv, out, tiles, cos_table, sin_table, q_norm, k_norm, eps, scale, stride, out_stride, num_heads, num_kv_heads,
    HALF_DIM: tl.constexpr, HALF: tl.constexpr, HAS_NORM: tl.constexpr, BM: tl.constexpr, AT_ONCE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    tile = tiles + 3 * tl.program_id(0)
    length = tl.load(tile + 2)
    if (length == 0) | (length > BM):
        return
    start = tl.load(tile).to(tl.int64)
    positions = tl.arange(0, BM)
    columns = tl.arange(0, HALF)
    mask = (positions < length)[:, None] & (columns < HALF_DIM)[None, :]
    at = positions[:, None] * HALF_DIM + columns[None, :]
    cos = tl.load(cos_table + at, mask=mask, other=0.0)
    sin = tl.load(sin_table + at, mask=mask, other=0.0)
    is_seen = positions[None, :] <= positions[:, None]
    rows = qkv + (start + positions)[:, None] * stride + columns[None, :]
    out_rows = out + (start + positions)[:, None] * out_stride + columns[None, :]
    first_head = tl.program_id(1) * AT_ONCE
    for head in tl.range(first_head, first_head + AT_ONCE, num_stages=STAGES):
        q = rows + head * 2 * HALF_DIM
        k = rows + (num_heads + head // (num_heads // num_kv_heads)) * 2 * HALF_DIM
        v = k + num_kv_heads * 2 * HALF_DIM
        q1 = tl.load(q, mask=mask, other=0.0)
        q2 = tl.load(q + HALF_DIM, mask=mask, other=0.0)
        k1 = tl.load(k, mask=mask, other=0.0)
        k2 = tl.load(k + HALF_DIM, mask=mask, other=0.0)
        v1 = tl.load(v, mask=mask, other=0.0)
        v2 = tl.load(v + HALF_DIM, mask=mask, other=0.0)
        k1, k2 = _turned(k1, k2, cos, sin, k_norm, eps, HALF_DIM, HALF, HAS_NORM)
        q1, q2 = _turned(q1, q2, cos, sin, q_norm, eps, HALF_DIM, HALF, HAS_NORM)
        scores = tl.dot(q1, tl.trans(k1), input_precision="ieee")
        scores = tl.dot(q2, tl.trans(k2), scores, input_precision="ieee") * scale
        scores = tl.where(is_seen, scores, -1.0e30)
        weights = tl.exp2(scores - tl.max(scores, 1)[:, None])
        total = tl.sum(weights, 1)[:, None]
        weights = weights.to(v1.dtype)
        o1 = tl.dot(weights, v1, input_precision="ieee") / total
        o2 = tl.dot(weights, v2, input_precision="ieee") / total
        o = out_rows + head * 2 * HALF_DIM
        tl.store(o, o1.to(out.dtype.element_ty), mask=mask)
        tl.store(o + HALF_DIM, o2.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _rotate_keys(
    qkv, tiles, cos_table, sin_table, k_norm, eps, stride, num_heads,
    HALF_DIM: tl.constexpr, HALF: tl.constexpr, HAS_NORM: tl.constexpr, BM: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    tile = tiles + 3 * tl.program_id(0)
    length = tl.load(tile + 2)
    if length <= BM:
        return
    positions = tl.load(tile + 1) + tl.arange(0, BM)
    columns = tl.arange(0, HALF)
    mask = (positions < length)[:, None] & (columns < HALF_DIM)[None, :]
    at = positions[:, None] * HALF_DIM + columns[None, :]
    cos = tl.load(cos_table + at, mask=mask, other=0.0)
    sin = tl.load(sin_table + at, mask=mask, other=0.0)
    rows = qkv + (tl.load(tile) + positions).to(tl.int64)[:, None] * stride + columns[None, :]
    first_head = num_heads + tl.program_id(1) * AT_ONCE
    for head in range(first_head, first_head + AT_ONCE):
        k = rows + head * 2 * HALF_DIM
        k1 = tl.load(k, mask=mask, other=0.0)
        k2 = tl.load(k + HALF_DIM, mask=mask, other=0.0)
        k1, k2 = _turned(k1, k2, cos, sin, k_norm, eps, HALF_DIM, HALF, HAS_NORM)
        tl.store(k, k1, mask=mask)
        tl.store(k + HALF_DIM, k2, mask=mask)


@triton.jit
def _long(
    qkv, out, tiles, cos_table, sin_table, q_norm, eps, scale, stride, out_stride, num_heads, num_kv_heads,
    HALF_DIM: tl.constexpr, HALF: tl.constexpr, HAS_NORM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    tile = tiles + 3 * tl.program_id(0)
    length = tl.load(tile + 2)
    if length <= BM:
        return
    start = tl.load(tile).to(tl.int64)
    first_query = tl.load(tile + 1)
    queries = first_query + tl.arange(0, BM)
    columns = tl.arange(0, HALF)
    inside = (columns < HALF_DIM)[None, :]
    mask = (queries < length)[:, None] & inside
    at = queries[:, None] * HALF_DIM + columns[None, :]
    first_head = tl.program_id(1) * AT_ONCE
    for head in range(first_head, first_head + AT_ONCE):
        cos = tl.load(cos_table + at, mask=mask, other=0.0)
        sin = tl.load(sin_table + at, mask=mask, other=0.0)
        q = qkv + (start + queries)[:, None] * stride + head * 2 * HALF_DIM + columns[None, :]
        q1 = tl.load(q, mask=mask, other=0.0)
        q2 = tl.load(q + HALF_DIM, mask=mask, other=0.0)
        q1, q2 = _turned(q1, q2, cos, sin, q_norm, eps, HALF_DIM, HALF, HAS_NORM)
        k_base = qkv + start * stride + (num_heads + head // (num_heads // num_kv_heads)) * 2 * HALF_DIM
        v_base = k_base + num_kv_heads * 2 * HALF_DIM
        highest = tl.full([BM], -1.0e30, tl.float32)
        total = tl.zeros([BM], tl.float32)
        o1 = tl.zeros([BM, HALF], tl.float32)
        o2 = tl.zeros([BM, HALF], tl.float32)
        for base in range(0, tl.minimum(first_query + BM, length), BN):
            keys = base + tl.arange(0, BN)
            kv_mask = (keys < length)[:, None] & inside
            kv = keys.to(tl.int64)[:, None] * stride + columns[None, :]
            k1 = tl.load(k_base + kv, mask=kv_mask, other=0.0)
            k2 = tl.load(k_base + kv + HALF_DIM, mask=kv_mask, other=0.0)
            scores = tl.dot(q1, tl.trans(k1), input_precision="ieee")
            scores = tl.dot(q2, tl.trans(k2), scores, input_precision="ieee") * scale
            scores = tl.where(keys[None, :] <= queries[:, None], scores, -1.0e30)
            higher = tl.maximum(highest, tl.max(scores, 1))
            weights = tl.exp2(scores - higher[:, None])
            shrunk = tl.exp2(highest - higher)
            total = total * shrunk + tl.sum(weights, 1)
            v1 = tl.load(v_base + kv, mask=kv_mask, other=0.0)
            v2 = tl.load(v_base + kv + HALF_DIM, mask=kv_mask, other=0.0)
            weights = weights.to(v1.dtype)
            o1 = tl.dot(weights, v1, o1 * shrunk[:, None], input_precision="ieee")
            o2 = tl.dot(weights, v2, o2 * shrunk[:, None], input_precision="ieee")
            highest = higher
        o = out + ((start + queries) * out_stride)[:, None] + head * 2 * HALF_DIM + columns[None, :]
        tl.store(o, (o1 / total[:, None]).to(out.dtype.element_ty), mask=mask)
        tl.store(o + HALF_DIM, (o2 / total[:, None]).to(out.dtype.element_ty), mask=mask)
