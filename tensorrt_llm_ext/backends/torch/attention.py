"""Attention of packed sequences in Triton: rotation, QK-norm and causal grouped-query attention, no padding.

A program computes BM queries of one sequence and one head. It reads q, k and v from the fused rows of the QKV layer where
they lie; the two halves of a head are kept apart, since rope turns them against each other and their dot products add.
For short sequences keys are rotated on the way in (each is read once or twice); for long ones beforehand, in place.

What it saves against torch's own FlashAttention-2 kernel after a kernel that splits and rotates is measured by
tests/bench/torch_h200.py. Its tiles begin at a sequence's first token, so a result does not depend on the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tensorrt_llm_ext.backends.torch.values import HeadNorms, Heads, Layout, Rope

BM = 128  # queries of a program
_LOG2_E = 1.4426950408889634


def max_tiles(num_tokens: int, batch_size: int) -> int:
    """Bound the tiles of a batch: each sequence ends in at most one tile that is not full."""
    return num_tokens // BM + batch_size


def layout(lengths: torch.Tensor, num_tokens: int, is_long: bool, space: torch.Tensor) -> Layout:
    """See ``plain.layout``. ``space`` holds the starts, then the tiles."""
    batch_size = len(lengths)
    num_tiles = max_tiles(num_tokens, batch_size)
    starts = space[:batch_size]
    tiles = space[batch_size : batch_size + 3 * num_tiles].view(num_tiles, 3)
    _layout[(batch_size,)](lengths, starts, tiles, batch_size, num_tiles, BM=BM, BLOCK=1024, num_warps=4)
    return Layout(lengths, starts, num_tokens, is_long, tiles)


def attention(
    qkv: torch.Tensor, heads: Heads, rope: Rope, norms: HeadNorms | None, where: Layout, out: torch.Tensor
) -> None:
    """See ``plain.attention``."""
    num_tiles = len(where.tiles)
    half = heads.head_dim // 2
    q_norm, k_norm, eps = (rope.cos, rope.cos, 0.0) if norms is None else (norms.q, norms.k, norms.eps)
    shape = dict(HALF_DIM=half, HALF=max(16, triton.next_power_of_2(half)), HAS_NORM=norms is not None, BM=BM)
    sizes = (heads.num_heads, heads.num_kv_heads)
    if where.is_long:
        grid = (num_tiles, heads.num_heads + heads.num_kv_heads)
        _rotate_in_place[grid](
            qkv, where.tiles, rope.cos, rope.sin, q_norm, k_norm, eps, qkv.stride(0), *sizes, **shape, num_warps=8
        )
    _attention[(num_tiles, heads.num_heads)](
        qkv, out, where.tiles, rope.cos, rope.sin, q_norm, k_norm, eps, heads.head_dim**-0.5 * _LOG2_E,
        qkv.stride(0), out.stride(0), *sizes, **shape,
        BN=64 if where.is_long else 128, IS_ROTATED=where.is_long, num_warps=8, num_stages=3 if where.is_long else 1,
    )  # fmt: skip


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
def _turned(first, second, cos_table, sin_table, norm, positions, mask, eps,
            HALF_DIM: tl.constexpr, HALF: tl.constexpr, HAS_NORM: tl.constexpr):  # fmt: skip
    """Normalise and rotate the two halves of heads at ``positions``; both halves float32 ``[rows, HALF]``."""
    columns = tl.arange(0, HALF)
    if HAS_NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        size = tl.rsqrt(squares / (2 * HALF_DIM) + eps)[:, None]
        inside = columns < HALF_DIM
        first = first * size * tl.load(norm + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
        second = second * size * tl.load(norm + HALF_DIM + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    at = positions[:, None] * HALF_DIM + columns[None, :]
    cos = tl.load(cos_table + at, mask=mask, other=0.0)
    sin = tl.load(sin_table + at, mask=mask, other=0.0)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _rotate_in_place(qkv, tiles, cos, sin, q_norm, k_norm, eps, stride, num_heads, num_kv_heads,
                     HALF_DIM: tl.constexpr, HALF: tl.constexpr, HAS_NORM: tl.constexpr, BM: tl.constexpr):  # fmt: skip
    tile, head = tiles + 3 * tl.program_id(0), tl.program_id(1)
    length = tl.load(tile + 2)
    if length == 0:
        return
    positions = tl.load(tile + 1) + tl.arange(0, BM)
    columns = tl.arange(0, HALF)
    mask = (positions < length)[:, None] & (columns < HALF_DIM)[None, :]
    rows = (tl.load(tile) + positions).to(tl.int64) * stride
    place = qkv + rows[:, None] + head * 2 * HALF_DIM + columns[None, :]
    first = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(place + HALF_DIM, mask=mask, other=0.0).to(tl.float32)
    norm = q_norm
    if head >= num_heads:
        norm = k_norm
    first, second = _turned(first, second, cos, sin, norm, positions, mask, eps, HALF_DIM, HALF, HAS_NORM)
    tl.store(place, first.to(qkv.dtype.element_ty), mask=mask)
    tl.store(place + HALF_DIM, second.to(qkv.dtype.element_ty), mask=mask)


@triton.jit
def _halves(place, mask, cos, sin, norm, positions, eps,
            HALF_DIM: tl.constexpr, HALF: tl.constexpr, HAS_NORM: tl.constexpr, IS_ROTATED: tl.constexpr):  # fmt: skip
    """Load the two halves of rotated heads, in the type of the rows."""
    first = tl.load(place, mask=mask, other=0.0)
    second = tl.load(place + HALF_DIM, mask=mask, other=0.0)
    if not IS_ROTATED:
        dtype = first.dtype
        first, second = _turned(
            first.to(tl.float32), second.to(tl.float32), cos, sin, norm, positions, mask, eps, HALF_DIM, HALF, HAS_NORM
        )
        first, second = first.to(dtype), second.to(dtype)
    return first, second


@triton.jit
def _attention(
    qkv, out, tiles, cos, sin, q_norm, k_norm, eps, scale, stride, out_stride, num_heads, num_kv_heads,
    HALF_DIM: tl.constexpr, HALF: tl.constexpr, HAS_NORM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    IS_ROTATED: tl.constexpr,
):  # fmt: skip
    tile, head = tiles + 3 * tl.program_id(0), tl.program_id(1)
    length = tl.load(tile + 2)
    if length == 0:
        return
    start = tl.load(tile).to(tl.int64)
    first_query = tl.load(tile + 1)
    queries = first_query + tl.arange(0, BM)
    columns = tl.arange(0, HALF)
    inside = (columns < HALF_DIM)[None, :]
    q_mask = (queries < length)[:, None] & inside
    rows = (start + queries) * stride
    q_place = qkv + rows[:, None] + head * 2 * HALF_DIM + columns[None, :]
    q1, q2 = _halves(q_place, q_mask, cos, sin, q_norm, queries, eps, HALF_DIM, HALF, HAS_NORM, IS_ROTATED)

    kv_head = head // (num_heads // num_kv_heads)
    k_base = qkv + start * stride + (num_heads + kv_head) * 2 * HALF_DIM
    v_base = k_base + num_kv_heads * 2 * HALF_DIM
    highest = tl.full([BM], -1.0e30, tl.float32)
    total = tl.zeros([BM], tl.float32)
    o1 = tl.zeros([BM, HALF], tl.float32)
    o2 = tl.zeros([BM, HALF], tl.float32)
    for base in range(0, tl.minimum(first_query + BM, length), BN):
        keys = base + tl.arange(0, BN)
        kv_mask = (keys < length)[:, None] & inside
        at = keys.to(tl.int64)[:, None] * stride + columns[None, :]
        k1, k2 = _halves(k_base + at, kv_mask, cos, sin, k_norm, keys, eps, HALF_DIM, HALF, HAS_NORM, IS_ROTATED)
        scores = tl.dot(q1, tl.trans(k1), input_precision="ieee")
        scores = tl.dot(q2, tl.trans(k2), scores, input_precision="ieee") * scale
        scores = tl.where(keys[None, :] <= queries[:, None], scores, -1.0e30)
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrunk = tl.exp2(highest - higher)
        total = total * shrunk + tl.sum(weights, 1)
        v1 = tl.load(v_base + at, mask=kv_mask, other=0.0)
        v2 = tl.load(v_base + at + HALF_DIM, mask=kv_mask, other=0.0)
        weights = weights.to(v1.dtype)
        o1 = tl.dot(weights, v1, o1 * shrunk[:, None], input_precision="ieee")
        o2 = tl.dot(weights, v2, o2 * shrunk[:, None], input_precision="ieee")
        highest = higher
    out_place = out + ((start + queries) * out_stride)[:, None] + head * 2 * HALF_DIM + columns[None, :]
    tl.store(out_place, (o1 / total[:, None]).to(out.dtype.element_ty), mask=q_mask)
    tl.store(out_place + HALF_DIM, (o2 / total[:, None]).to(out.dtype.element_ty), mask=q_mask)
