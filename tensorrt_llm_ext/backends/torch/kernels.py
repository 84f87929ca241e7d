"""The decoder's operations on a CUDA card: Triton for what a row does on its own, the vendor's library for products.

Every kernel reads its rows once and writes what the next product takes, e4m3 with a scale a row where that is FP8: residual
add, norm and quantisation are one pass. SwiGLU is the epilogue of its product where ``gated`` serves that, else one pass with its
quantisation. What each hand-written one saves against its twin in ``plain.py``, compiled where that can be, and attention against
the libraries', is measured by tests/bench/torch_h200.py --parts operations.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tensorrt_llm_ext.backends.torch import cublaslt, gated
from tensorrt_llm_ext.backends.torch.attention import attention, last_attention, layout
from tensorrt_llm_ext.backends.torch.values import Layout, Linear, Norm, Rows

__all__ = [
    "add_norm", "adds_itself", "attention", "embed", "last_attention", "layout", "mean", "multiply", "multiply_add", "multiply_swiglu",
    "quantise", "swiglu", "take",
]  # fmt: skip

_MEAN_ROWS, _MEAN_COLUMNS = 32, 128
_SPARED = 2048  # lanes: what a third piece of a row must spare, or two are quicker


def embed(token_ids: torch.Tensor, table: torch.Tensor, x: torch.Tensor) -> None:
    """See ``plain.embed``."""
    size = x.shape[1]
    _embed[(len(x),)](token_ids, table, x, size, **_row(size))


def add_norm(x: torch.Tensor, delta: torch.Tensor | None, norm: Norm, out: Rows) -> None:
    """See ``plain.add_norm``."""
    size = x.shape[1]
    _add_norm[(len(x),)](
        x, x if delta is None else delta, norm.weight, out.values, _scales(out), size, norm.eps, out.input_scale or 0.0,
        HAS_DELTA=delta is not None, IS_FP8=out.scales is not None, IS_FIXED=out.input_scale is not None, **_row(size),
    )  # fmt: skip


def swiglu(gate_up: torch.Tensor, out: Rows) -> None:
    """See ``plain.swiglu``."""
    _rewrite(gate_up, out, is_gated=True)


def quantise(rows: torch.Tensor, out: Rows) -> None:
    """See ``plain.quantise``."""
    _rewrite(rows, out, is_gated=False)


def _rewrite(rows: torch.Tensor, out: Rows, *, is_gated: bool) -> None:
    size = out.values.shape[1]
    first, second, third = _pieces(size)
    _pieces_of_rows[(len(rows),)](
        rows, out.values, _scales(out), size, out.input_scale or 0.0, IS_GATED=is_gated, IS_FP8=out.scales is not None,
        IS_FIXED=out.input_scale is not None, FIRST=first, SECOND=second, THIRD=third, num_warps=min(max(first // 1024, 1), 8),
    )  # fmt: skip


def take(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    last_token_ids: torch.Tensor | None,
    norm: Norm | None,
    out: torch.Tensor,
) -> None:
    """See ``plain.take``."""
    size = x.shape[1]
    _take[(len(out),)](
        x, x if delta is None else delta, x if last_token_ids is None else last_token_ids,
        x if norm is None else norm.weight, out, size, 0.0 if norm is None else norm.eps,
        HAS_DELTA=delta is not None, IS_INDEXED=last_token_ids is not None, HAS_NORM=norm is not None, **_row(size),
    )  # fmt: skip


def mean(rows: torch.Tensor, where: Layout, out: torch.Tensor) -> None:
    """See ``plain.mean``."""
    grid = (len(out), triton.cdiv(rows.shape[1], _MEAN_COLUMNS))
    _mean[grid](rows, where.starts, where.lengths, out, rows.shape[1], ROWS=_MEAN_ROWS, COLUMNS=_MEAN_COLUMNS)


def multiply(rows: Rows, linear: Linear, out: torch.Tensor) -> None:
    """See ``plain.multiply``."""
    if cublaslt.can_multiply(linear):
        cublaslt.multiply(rows, linear, out, adds=False)
        return
    weight = linear.weight.t()
    for step in rows.steps():
        if linear.is_fp8:
            torch._scaled_mm(
                rows.values[step], weight, scale_a=rows.scales[step], scale_b=linear.scales, bias=linear.bias,
                out_dtype=out.dtype, use_fast_accum=True, out=out[step],
            )  # fmt: skip
        elif linear.bias is None:
            torch.mm(rows.values[step], weight, out=out[step])
        else:
            torch.addmm(linear.bias, rows.values[step], weight, out=out[step])


def adds_itself(linear: Linear) -> bool:
    """See ``plain.adds_itself``: the library does where it can."""
    return cublaslt.can_multiply(linear) or not linear.is_fp8 and linear.bias is None


def multiply_add(rows: Rows, linear: Linear, x: torch.Tensor, delta: torch.Tensor) -> None:
    """See ``plain.multiply_add``."""
    if not adds_itself(linear):
        multiply(rows, linear, delta)
    elif cublaslt.can_multiply(linear):
        cublaslt.multiply(rows, linear, x, adds=True)
    else:
        for step in rows.steps():
            torch.addmm(x[step], rows.values[step], linear.weight.t(), out=x[step])


def multiply_swiglu(rows: Rows, linear: Linear, gate_up: torch.Tensor, out: Rows) -> None:
    """See ``plain.multiply_swiglu``."""
    if not gated.can_multiply(linear):
        multiply(rows, linear, gate_up)
        swiglu(gate_up, out)
    elif out.scales is None:
        gated.multiply(rows, linear, out.values)
    else:
        inner = gate_up.view(-1)[: gate_up.numel() // 2].view(len(gate_up), -1)
        gated.multiply(rows, linear, inner)
        quantise(inner, out)


def _row(size: int) -> dict[str, int]:
    """One program holds a row: 32 values a thread are in flight at most."""
    block = triton.next_power_of_2(size)
    return {"BLOCK": block, "num_warps": min(max(block // 1024, 1), 16)}


def _pieces(size: int) -> tuple[int, int, int]:
    """Divide a row into two or three powers of two, of which only the last reaches past its end: one alone would waste up to
    half its lanes."""
    first = triton.next_power_of_2(size + 1) // 2
    second = triton.next_power_of_2(size - first + 1) // 2 if size > first else 0
    rest = size - first - second
    third = triton.next_power_of_2(rest) if rest else 0
    at_once = triton.next_power_of_2(second + third)
    return (first, second, third) if at_once - second - third >= _SPARED else (first, at_once, 0)


def _scales(rows: Rows) -> torch.Tensor:
    return rows.values if rows.scales is None else rows.scales


@triton.jit
def _measure(row, IS_FIXED: tl.constexpr):
    """What decides a row's scale: its largest magnitude; under a fixed scale 0, or NaN where a value is not finite."""
    if IS_FIXED:
        measure = tl.sum(row * 0.0, 0)
    else:
        measure = tl.max(tl.abs(row), 0)
    return measure


@triton.jit
def _larger(measure, other, IS_FIXED: tl.constexpr):
    """The measure of two pieces of a row together."""
    if IS_FIXED:
        both = measure + other
    else:
        both = tl.maximum(measure, other)
    return both


@triton.jit
def _write_scale(measure, input_scale, scales, index, IS_FIXED: tl.constexpr):
    """Write a row's scale, and return what its values are divided by."""
    if IS_FIXED:
        scale = input_scale
        tl.store(scales + index, scale + measure)
    else:
        scale = tl.maximum(measure, 1e-12) / 448.0
        tl.store(scales + index, scale)
    return scale


@triton.jit
def _saturated(row, IS_FIXED: tl.constexpr):
    """Cut what lies beyond e4m3; a NaN stays one, and a row's own scale leaves nothing to cut."""
    if IS_FIXED:
        row = tl.where(row > 448.0, 448.0, tl.where(row < -448.0, -448.0, row))
    return row


@triton.jit
def _write(row, values, scales, index, size, input_scale, columns, inside, IS_FP8: tl.constexpr, IS_FIXED: tl.constexpr):
    """Write a float32 row, quantised with its own scale, or a fixed one, where it is FP8."""
    if IS_FP8:
        scale = _write_scale(_measure(row, IS_FIXED), input_scale, scales, index, IS_FIXED)
        row = _saturated(row * (1.0 / scale), IS_FIXED)
    tl.store(values + index * size + columns, row.to(values.dtype.element_ty), mask=inside)


@triton.jit
def _embed(token_ids, table, x, size, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    token = tl.load(token_ids + index).to(tl.int64)
    row = tl.load(table + token * size + columns, mask=inside & (token >= 0), other=0.0)
    tl.store(x + index * size + columns, row.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _add_norm(x, delta, weight, values, scales, size, eps, input_scale, HAS_DELTA: tl.constexpr,
              IS_FP8: tl.constexpr, IS_FIXED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    row = tl.load(x + index * size + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        row += tl.load(delta + index * size + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = row.to(x.dtype.element_ty)
        tl.store(x + index * size + columns, rounded, mask=inside)
        row = rounded.to(tl.float32)
    row = row * tl.rsqrt(tl.sum(row * row, 0) / size + eps)
    row = row * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    _write(row, values, scales, index, size, input_scale, columns, inside, IS_FP8, IS_FIXED)


@triton.jit
def _piece(place, size, columns, IS_GATED: tl.constexpr):
    """A piece of a row; of gate and up, which lie one behind the other, silu(gate) * up."""
    inside = columns < size
    row = tl.load(place + columns, mask=inside, other=0.0).to(tl.float32)
    if IS_GATED:
        up = tl.load(place + size + columns, mask=inside, other=0.0).to(tl.float32)
        root = tl.rsqrt(1.0 + tl.exp2(row * -1.4426950408889634))  # of the sigmoid: a division takes many more instructions
        row = row * up * (root * root)
    return row


@triton.jit
def _pieces_of_rows(rows, values, scales, size, input_scale, IS_GATED: tl.constexpr, IS_FP8: tl.constexpr,
                    IS_FIXED: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    place = rows + index * size * (2 if IS_GATED else 1)
    columns1 = tl.arange(0, FIRST)
    row1 = _piece(place, size, columns1, IS_GATED)
    measure = _measure(row1, IS_FIXED)
    if SECOND > 0:
        columns2 = FIRST + tl.arange(0, SECOND)
        row2 = _piece(place, size, columns2, IS_GATED)
        measure = _larger(measure, _measure(row2, IS_FIXED), IS_FIXED)
    if THIRD > 0:
        columns3 = FIRST + SECOND + tl.arange(0, THIRD)
        row3 = _piece(place, size, columns3, IS_GATED)
        measure = _larger(measure, _measure(row3, IS_FIXED), IS_FIXED)
    factor = 1.0
    if IS_FP8:
        factor = 1.0 / _write_scale(measure, input_scale, scales, index, IS_FIXED)
    out = values + index * size
    tl.store(out + columns1, _saturated(row1 * factor, IS_FIXED).to(values.dtype.element_ty), mask=columns1 < size)
    if SECOND > 0:
        tl.store(out + columns2, _saturated(row2 * factor, IS_FIXED).to(values.dtype.element_ty), mask=columns2 < size)
    if THIRD > 0:
        tl.store(out + columns3, _saturated(row3 * factor, IS_FIXED).to(values.dtype.element_ty), mask=columns3 < size)


@triton.jit
def _take(x, delta, last_token_ids, weight, out, size, eps, HAS_DELTA: tl.constexpr,
          IS_INDEXED: tl.constexpr, HAS_NORM: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    source = index
    if IS_INDEXED:
        source = tl.load(last_token_ids + index).to(tl.int64) - 1
    row = tl.load(x + source * size + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        row += tl.load(delta + source * size + columns, mask=inside, other=0.0).to(tl.float32)
        row = row.to(x.dtype.element_ty).to(tl.float32)  # the sum is rounded wherever it is computed
    if HAS_NORM:
        row = row * tl.rsqrt(tl.sum(row * row, 0) / size + eps)
        row = row * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + index * size + columns, row.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _mean(rows, starts, lengths, out, size, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < size
    start = tl.load(starts + index).to(tl.int64)
    length = tl.load(lengths + index)
    total = tl.zeros([COLUMNS], tl.float32)
    for base in range(0, length, ROWS):
        own = base + tl.arange(0, ROWS)
        place = rows + (start + own)[:, None] * size + columns[None, :]
        total += tl.sum(tl.load(place, mask=(own < length)[:, None] & inside[None, :], other=0.0), 0)
    tl.store(out + index * size + columns, total / length, mask=inside)
