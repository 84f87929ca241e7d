"""Attention of packed sequences in Triton: rotation, QK-norm and causal grouped-query attention, no padding.

A sequence that fits one tile is computed by ``_short``, half a tile of queries of a head a program: the first half sees no
key of the second. A longer one has its keys rotated in place beforehand, since each is read by many programs, and is
computed by ``_long``. Which of the two depends on the sequence alone, and tiles begin at its first token, so a result does
not depend on the batch. What is launched depends on the computed rows, on the sequences rounded up and on whether one is
longer than a tile, so that few launches can be kept for every batch.

The two halves of a query or key are kept apart: rope turns them against each other, and their dot products add.

Where only last rows are asked for, ``_last`` computes a head of one query a program; so few need no matrix unit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tensorrt_llm_ext.backends.torch.sizes import TILE, grid_sequences, num_tiles
from tensorrt_llm_ext.backends.torch.values import Batch, HeadNorms, Heads, Layout, Rope, Rows

_MAX_HEADS = 16  # of a program that rotates keys
_REGISTERS = 168  # a thread's, of ``_short``: three programs fit a multiprocessor
_LOG2_E = 1.4426950408889634


def layout(batch: Batch, num_rows: int, places: torch.Tensor) -> Layout:
    """See ``plain.layout``. ``places`` holds all of it, the tiles of the sequences that are longer than one last."""
    num_tokens, count = len(batch.input_ids), grid_sequences(len(batch.sequence_lengths))
    most = num_tiles(num_rows, count) if batch.longest > TILE else 0
    sizes = [num_rows, count, count, count, 3 * most]
    token_ids, lengths, starts, last, tiles = places[: sum(sizes)].split(sizes)
    has_last = batch.last_token_ids is not None
    _layout[(count,)](
        batch.input_ids, batch.sequence_lengths, batch.last_token_ids if has_last else last, token_ids, lengths, starts, last, tiles,
        len(batch.sequence_lengths), num_tokens, num_rows, most, HAS_LAST=has_last, BM=TILE, BLOCK=1024, num_warps=4,
    )  # fmt: skip
    return Layout(token_ids, lengths, starts, last if has_last else None, num_tokens, tiles.view(most, 3))


def attention(
    qkv: torch.Tensor, heads: Heads, rope: Rope, norms: HeadNorms | None, where: Layout, out: Rows
) -> None:
    """See ``plain.attention``."""
    (q_norm, k_norm, eps), scale = _norms(norms, rope), heads.head_dim**-0.5 * _LOG2_E
    tables, sizes = (rope.cos, rope.sin), (heads.num_heads, heads.num_kv_heads)
    shape, is_fp8 = dict(**_shape(heads, norms), BM=TILE), dict(IS_FP8=out.scales is not None)
    given, values = _given(out), out.values
    # What is read together is run together: both halves of a head, then the heads of a sequence.
    _short[(2 * heads.num_heads, len(where.lengths))](
        qkv, *given, where.starts, where.lengths, *tables, q_norm, k_norm, eps, scale, qkv.stride(0), values.stride(0),
        *sizes, **shape, **is_fp8, num_warps=4, maxnreg=_REGISTERS,
    )  # fmt: skip
    if not len(where.tiles):
        return  # no sequence is longer than a tile
    at_once = _largest_divisor(heads.num_kv_heads)
    _rotate_keys[(len(where.tiles), heads.num_kv_heads // at_once)](
        qkv, where.tiles, *tables, k_norm, eps, qkv.stride(0), heads.num_heads, **shape, AT_ONCE=at_once, num_warps=8
    )
    _long[(heads.num_heads, 2 * len(where.tiles))](
        qkv, *given, where.tiles, *tables, q_norm, eps, scale, qkv.stride(0), values.stride(0), *sizes, **shape, **is_fp8,
        BN=64, STAGES=3, num_warps=4,
    )  # fmt: skip


def last_attention(
    queries: torch.Tensor,
    keys_and_values: torch.Tensor,
    heads: Heads,
    rope: Rope,
    norms: HeadNorms | None,
    where: Layout,
    out: Rows,
) -> None:
    """See ``plain.last_attention``."""
    (q_norm, k_norm, eps), scale = _norms(norms, rope), heads.head_dim**-0.5 * _LOG2_E
    _last[(heads.num_heads, len(where.last))](
        queries, keys_and_values, where.last, *_given(out), where.starts, where.lengths, rope.cos, rope.sin, q_norm, k_norm, eps,
        scale, queries.stride(0), keys_and_values.stride(0), out.values.stride(0), len(where.lengths), heads.num_heads,
        heads.num_kv_heads, **_shape(heads, norms), IS_FP8=out.scales is not None, BN=64, BLOCK=1024, num_warps=4,
    )  # fmt: skip


def _given(out: Rows) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Where rows are written: values, scales, and the fixed scale; the latter two are not read unless the rows are FP8."""
    return out.values, out.values if out.scales is None else out.scales, out.input_scale or 1.0


def _norms(norms: HeadNorms | None, rope: Rope) -> tuple[torch.Tensor, torch.Tensor, float]:
    """The norms of queries and keys; without any something in their place that is not read."""
    return (rope.cos, rope.cos, 0.0) if norms is None else (norms.q, norms.k, norms.eps)


def _shape(heads: Heads, norms: HeadNorms | None) -> dict[str, int]:
    half = heads.head_dim // 2
    return dict(HALF_DIM=half, HALF=max(16, triton.next_power_of_2(half)), HAS_NORM=norms is not None)


def _largest_divisor(num_heads: int) -> int:
    return next(count for count in range(_MAX_HEADS, 0, -1) if num_heads % count == 0)


@triton.jit(do_not_specialize=["batch_size", "num_tokens", "num_rows", "most_tiles"])
def _layout(
    input_ids, sequence_lengths, last_token_ids, token_ids, lengths, starts, last, tiles, batch_size, num_tokens, num_rows,
    most_tiles, HAS_LAST: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program b finds where sequence b and its tiles begin, and writes them and its tokens; the last sequence's also ends both."""
    index = tl.program_id(0)
    length = tl.load(sequence_lengths + index, mask=index < batch_size, other=0)
    tl.store(lengths + index, length)
    if HAS_LAST:
        tl.store(last + index, tl.load(last_token_ids + index, mask=index < batch_size, other=1))
    if index >= batch_size:
        return
    start = 0
    first_tile = 0
    for base in range(0, index, BLOCK):
        others = base + tl.arange(0, BLOCK)
        before = tl.load(sequence_lengths + others, mask=others < index, other=0)
        start += tl.sum(before)
        first_tile += tl.sum(_num_tiles(before, BM))
    own_tiles = _num_tiles(length, BM)
    tl.store(starts + index, start)
    for base in range(start, start + length, BLOCK):
        rows = base + tl.arange(0, BLOCK)
        tl.store(token_ids + rows, tl.load(input_ids + rows, mask=rows < start + length), mask=rows < start + length)
    for tile in range(own_tiles):
        # The last queries of a sequence see the most keys: they go first.
        place = tiles + 3 * (first_tile + own_tiles - 1 - tile)
        tl.store(place, start)
        tl.store(place + 1, tile * BM)
        tl.store(place + 2, length)
    if index == batch_size - 1:
        for base in range(num_tokens, num_rows, BLOCK):
            rows = base + tl.arange(0, BLOCK)
            tl.store(token_ids + rows, -1, mask=rows < num_rows)
        for tile in range(first_tile + own_tiles, most_tiles):
            tl.store(tiles + 3 * tile + 2, 0)


@triton.jit
def _num_tiles(length, BM: tl.constexpr):
    return tl.where(length > BM, (length + BM - 1) // BM, 0)


@triton.jit
def _read(place, mask, HALF_DIM: tl.constexpr):
    """Read the two halves ``[rows, HALF]`` of heads."""
    return tl.load(place, mask=mask, other=0.0), tl.load(place + HALF_DIM, mask=mask, other=0.0)


@triton.jit
def _read_rope(cos_table, sin_table, at, mask):
    cos, sin = tl.load(cos_table + at, mask=mask, other=0.0), tl.load(sin_table + at, mask=mask, other=0.0)
    return cos.to(tl.float32), sin.to(tl.float32)


@triton.jit
def _turned(first, second, cos, sin, norm, eps, HALF_DIM: tl.constexpr, HALF: tl.constexpr, HAS_NORM: tl.constexpr):
    """Normalise the two halves of heads and rotate them; the result has their type.

    The sums are reductions for the compiler's sake: through a plain ``+`` it would carry the layout of a product's input back to
    the loads, and take each of the four through shared memory, one after another.
    """
    dtype = first.dtype
    first, second = first.to(tl.float32), second.to(tl.float32)
    if HAS_NORM:
        columns = tl.arange(0, HALF)
        inside = columns < HALF_DIM
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        size = tl.rsqrt(squares / (2 * HALF_DIM) + eps)[:, None]
        first = first * size * tl.load(norm + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
        second = second * size * tl.load(norm + HALF_DIM + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    turned = tl.sum(tl.join(first * cos, -(second * sin)), 2), tl.sum(tl.join(second * cos, first * sin), 2)
    return turned[0].to(dtype), turned[1].to(dtype)


@triton.jit
def _scores(q1, q2, k1, k2):
    scores = tl.dot(q1, tl.trans(k1), input_precision="ieee")
    return tl.dot(q2, tl.trans(k2), scores, input_precision="ieee")


@triton.jit
def _write(mixed, total, out, scales, input_scale, rows, is_row, out_stride, head, HALF_DIM: tl.constexpr,
           HALF: tl.constexpr, IS_FP8: tl.constexpr):  # fmt: skip
    """Write a head's rows; in FP8 by the fixed scale, cut where they lie beyond it, but NaN where they are not finite."""
    columns = tl.arange(0, 2 * HALF)[None, :]
    mixed = mixed * (1.0 / (total * input_scale))[:, None]
    if IS_FP8:
        mixed += mixed * 0.0  # an infinite value becomes NaN; the cast cuts finite ones
        tl.store(scales + rows, tl.zeros_like(total) + input_scale, mask=is_row & (head == 0))
    place = out + rows[:, None] * out_stride + head * 2 * HALF_DIM + columns
    tl.store(place, mixed.to(out.dtype.element_ty), mask=is_row[:, None] & (columns < 2 * HALF_DIM))


@triton.jit
def _short(
    qkv, out, scales, input_scale, starts, lengths, cos_table, sin_table, q_norm, k_norm, eps, scale, stride, out_stride,
    num_heads, num_kv_heads, HALF_DIM: tl.constexpr, HALF: tl.constexpr, HAS_NORM: tl.constexpr, BM: tl.constexpr,
    IS_FP8: tl.constexpr,
):  # fmt: skip
    B: tl.constexpr = BM // 2
    sequence = tl.program_id(1)
    length = tl.load(lengths + sequence)
    start = tl.load(starts + sequence).to(tl.int64)
    first = tl.program_id(0) % 2 * B
    if (length > BM) | (length <= first):
        return
    head = tl.program_id(0) // 2
    own = tl.arange(0, B)
    half = tl.arange(0, HALF)[None, :]
    whole = tl.arange(0, 2 * HALF)[None, :]
    is_half, is_whole = half < HALF_DIM, whole < 2 * HALF_DIM
    row = tl.minimum(first + own, length - 1)[:, None]  # past the end the last row again: nobody reads what comes of it
    place = qkv + (start + row) * stride
    k = (num_heads + head // (num_heads // num_kv_heads)) * 2 * HALF_DIM
    v = k + num_kv_heads * 2 * HALF_DIM
    q1, q2 = _read(place + head * 2 * HALF_DIM + half, is_half, HALF_DIM)
    k1, k2 = _read(place + k + half, is_half, HALF_DIM)
    values = tl.load(place + v + whole, mask=is_whole, other=0.0)
    cos, sin = _read_rope(cos_table, sin_table, row * HALF_DIM + half, is_half)
    q1, q2 = _turned(q1, q2, cos, sin, q_norm, eps, HALF_DIM, HALF, HAS_NORM)
    k1, k2 = _turned(k1, k2, cos, sin, k_norm, eps, HALF_DIM, HALF, HAS_NORM)
    scores = tl.where(own[None, :] <= own[:, None], _scores(q1, q2, k1, k2), -1.0e30)
    highest = tl.max(scores, 1)
    if first == 0:
        weights = tl.exp2(scores * scale - (highest * scale)[:, None])
        mixed = tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        total = tl.sum(weights, 1)
    else:
        place = qkv + (start + own)[:, None] * stride
        k1, k2 = _read(place + k + half, is_half, HALF_DIM)
        cos, sin = _read_rope(cos_table, sin_table, own[:, None] * HALF_DIM + half, is_half)
        first_values = tl.load(place + v + whole, mask=is_whole, other=0.0)
        k1, k2 = _turned(k1, k2, cos, sin, k_norm, eps, HALF_DIM, HALF, HAS_NORM)
        first_scores = _scores(q1, q2, k1, k2)
        highest = tl.maximum(highest, tl.max(first_scores, 1))
        weights = tl.exp2(scores * scale - (highest * scale)[:, None])
        first_weights = tl.exp2(first_scores * scale - (highest * scale)[:, None])
        mixed = tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        mixed = tl.dot(first_weights.to(values.dtype), first_values, mixed, input_precision="ieee")
        total = tl.sum(weights, 1) + tl.sum(first_weights, 1)
    rows, is_row = start + first + own, first + own < length
    _write(mixed, total, out, scales, input_scale, rows, is_row, out_stride, head, HALF_DIM, HALF, IS_FP8)


@triton.jit(do_not_specialize=["num_sequences"])
def _last(
    queries, keys_and_values, last_token_ids, out, scales, input_scale, starts, lengths, cos_table, sin_table, q_norm, k_norm, eps,
    scale, q_stride, stride, out_stride, num_sequences, num_heads, num_kv_heads, HALF_DIM: tl.constexpr, HALF: tl.constexpr,
    HAS_NORM: tl.constexpr, IS_FP8: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One head of one query, which sees the keys of its sequence up to its own; each is read once."""
    head = tl.program_id(0)
    row = tl.program_id(1) + tl.arange(0, 1)
    end = tl.load(last_token_ids + tl.program_id(1))
    start = 0
    for base in range(0, num_sequences, BLOCK):  # the sequence that the row lies in begins last of those before it
        others = base + tl.arange(0, BLOCK)
        is_there = tl.load(lengths + others, mask=others < num_sequences, other=0) > 0
        begins = tl.load(starts + others, mask=is_there, other=0)
        start = tl.maximum(start, tl.max(tl.where(begins < end, begins, 0)))
    half = tl.arange(0, HALF)[None, :]
    whole = tl.arange(0, 2 * HALF)[None, :]
    q1, q2 = _read(queries + row[:, None] * q_stride + head * 2 * HALF_DIM + half, half < HALF_DIM, HALF_DIM)
    own_cos, own_sin = _read_rope(cos_table, sin_table, (end - 1 - start) * HALF_DIM + half, half < HALF_DIM)
    q1, q2 = _turned(q1, q2, own_cos, own_sin, q_norm, eps, HALF_DIM, HALF, HAS_NORM)
    q1, q2 = q1.to(tl.float32), q2.to(tl.float32)
    k = keys_and_values + start.to(tl.int64) * stride + head // (num_heads // num_kv_heads) * 2 * HALF_DIM
    v = k + num_kv_heads * 2 * HALF_DIM
    highest = tl.full([1], -1.0e30, tl.float32)
    total = tl.zeros([1], tl.float32)
    mixed = tl.zeros([1, 2 * HALF], tl.float32)
    for base in range(0, end - start, BN):
        keys = base + tl.arange(0, BN)
        is_key = (keys < end - start)[:, None]
        rows = keys.to(tl.int64)[:, None] * stride
        is_half = is_key & (half < HALF_DIM)
        k1, k2 = _read(k + rows + half, is_half, HALF_DIM)
        cos, sin = _read_rope(cos_table, sin_table, keys[:, None] * HALF_DIM + half, is_half)
        k1, k2 = _turned(k1, k2, cos, sin, k_norm, eps, HALF_DIM, HALF, HAS_NORM)
        scores = tl.sum(q1 * k1.to(tl.float32) + q2 * k2.to(tl.float32), 1) * scale
        scores = tl.where(keys < end - start, scores, -1.0e30)
        higher = tl.maximum(highest, tl.max(scores, 0))
        weights = tl.exp2(scores - higher)
        shrunk = tl.exp2(highest - higher)
        values = tl.load(v + rows + whole, mask=is_key & (whole < 2 * HALF_DIM), other=0.0).to(tl.float32)
        mixed = mixed * shrunk[:, None] + tl.sum(weights[:, None] * values, 0)[None, :]
        total = total * shrunk + tl.sum(weights, 0)
        highest = higher
    _write(mixed, total, out, scales, input_scale, row, row >= 0, out_stride, head, HALF_DIM, HALF, IS_FP8)


@triton.jit
def _rotate_keys(
    qkv, tiles, cos_table, sin_table, k_norm, eps, stride, num_heads,
    HALF_DIM: tl.constexpr, HALF: tl.constexpr, HAS_NORM: tl.constexpr, BM: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    tile = tiles + 3 * tl.program_id(0)
    length = tl.load(tile + 2)
    if length == 0:
        return
    positions = tl.load(tile + 1) + tl.arange(0, BM)
    half = tl.arange(0, HALF)[None, :]
    mask = (positions < length)[:, None] & (half < HALF_DIM)
    cos, sin = _read_rope(cos_table, sin_table, positions[:, None] * HALF_DIM + half, mask)
    rows = qkv + (tl.load(tile) + positions).to(tl.int64)[:, None] * stride + half
    first_head = num_heads + tl.program_id(1) * AT_ONCE
    for head in range(first_head, first_head + AT_ONCE):
        k = rows + head * 2 * HALF_DIM
        k1, k2 = _read(k, mask, HALF_DIM)
        k1, k2 = _turned(k1, k2, cos, sin, k_norm, eps, HALF_DIM, HALF, HAS_NORM)
        tl.store(k, k1, mask=mask)
        tl.store(k + HALF_DIM, k2, mask=mask)


@triton.jit
def _long(
    qkv, out, scales, input_scale, tiles, cos_table, sin_table, q_norm, eps, scale, stride, out_stride, num_heads, num_kv_heads,
    HALF_DIM: tl.constexpr, HALF: tl.constexpr, HAS_NORM: tl.constexpr, BM: tl.constexpr, IS_FP8: tl.constexpr,
    BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    Q: tl.constexpr = BM // 2
    head = tl.program_id(0)
    tile = tiles + 3 * (tl.program_id(1) // 2)
    length = tl.load(tile + 2)
    first_query = tl.load(tile + 1) + (1 - tl.program_id(1) % 2) * Q
    if (length == 0) | (first_query >= length):
        return
    start = tl.load(tile).to(tl.int64)
    queries = first_query + tl.arange(0, Q)
    half = tl.arange(0, HALF)[None, :]
    is_row = queries < length
    is_half = is_row[:, None] & (half < HALF_DIM)
    q1, q2 = _read(qkv + (start + queries)[:, None] * stride + head * 2 * HALF_DIM + half, is_half, HALF_DIM)
    cos, sin = _read_rope(cos_table, sin_table, queries[:, None] * HALF_DIM + half, is_half)
    q1, q2 = _turned(q1, q2, cos, sin, q_norm, eps, HALF_DIM, HALF, HAS_NORM)
    k = qkv + start * stride + (num_heads + head // (num_heads // num_kv_heads)) * 2 * HALF_DIM
    v = k + num_kv_heads * 2 * HALF_DIM
    highest = tl.full([Q], -1.0e30, tl.float32)
    total = tl.zeros([Q], tl.float32)
    mixed = tl.zeros([Q, 2 * HALF], tl.float32)
    for base in tl.range(0, first_query, BN, num_stages=STAGES):  # every query sees all of these keys
        highest, total, mixed = _attend(
            q1, q2, k, v, base, queries, length, highest, total, mixed, scale, stride, HALF_DIM, HALF, BN, IS_EDGE=False
        )
    for base in tl.range(first_query, tl.minimum(first_query + Q, length), BN, num_stages=STAGES):
        highest, total, mixed = _attend(
            q1, q2, k, v, base, queries, length, highest, total, mixed, scale, stride, HALF_DIM, HALF, BN, IS_EDGE=True
        )
    _write(mixed, total, out, scales, input_scale, start + queries, is_row, out_stride, head, HALF_DIM, HALF, IS_FP8)


@triton.jit
def _attend(
    q1, q2, k, v, base, queries, length, highest, total, mixed, scale, stride,
    HALF_DIM: tl.constexpr, HALF: tl.constexpr, BN: tl.constexpr, IS_EDGE: tl.constexpr,
):  # fmt: skip
    """Take a block of keys into the running softmax. ``IS_EDGE``: some lie after a query, or past the sequence."""
    half = tl.arange(0, HALF)[None, :]
    whole = tl.arange(0, 2 * HALF)[None, :]
    keys = base + tl.arange(0, BN)
    rows = keys.to(tl.int64)[:, None] * stride
    is_half, is_whole = half < HALF_DIM, whole < 2 * HALF_DIM
    if IS_EDGE:
        is_half &= (keys < length)[:, None]
        is_whole &= (keys < length)[:, None]
    k1, k2 = _read(k + rows + half, is_half, HALF_DIM)
    scores = _scores(q1, q2, k1, k2) * scale
    if IS_EDGE:
        scores = tl.where(keys[None, :] <= queries[:, None], scores, -1.0e30)
    higher = tl.maximum(highest, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    shrunk = tl.exp2(highest - higher)
    values = tl.load(v + rows + whole, mask=is_whole, other=0.0)
    mixed = tl.dot(weights.to(values.dtype), values, mixed * shrunk[:, None], input_precision="ieee")
    return higher, total * shrunk + tl.sum(weights, 1), mixed
