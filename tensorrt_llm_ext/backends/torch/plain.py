"""The decoder's operations in plain torch: what each promises, on any device. ``kernels.py`` has the same ones, fused.

Sums and norms are computed in float32 whatever the type of the rows.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn import functional

from tensorrt_llm_ext.backends.torch.values import FP8_MAX, Batch, HeadNorms, Heads, Layout, Linear, Norm, Rope, Rows
from tensorrt_llm_ext.graph.quantisation import SMALLEST_ROW


def layout(batch: Batch, num_rows: int, places: torch.Tensor) -> Layout:
    """Lay out a batch of which ``num_rows`` rows are computed; ``places`` is the kernels' int32 memory for it."""
    lengths, num_tokens = batch.sequence_lengths, len(batch.input_ids)
    starts = torch.cumsum(lengths, 0, dtype=torch.int32) - lengths
    token_ids = functional.pad(batch.input_ids, (0, num_rows - num_tokens), value=-1)
    return Layout(token_ids, lengths, starts, batch.last_token_ids, num_tokens)


def embed(token_ids: torch.Tensor, table: torch.Tensor, x: torch.Tensor) -> None:
    """Write the row of ``table`` of each of ``token_ids`` ``[M]`` to ``x`` ``[M, hidden]``; zeros where that is -1."""
    x.copy_(torch.where(token_ids[:, None] < 0, 0, table[token_ids.clamp(min=0).long()]))


def add_norm(x: torch.Tensor, delta: torch.Tensor | None, norm: Norm, out: Rows) -> None:
    """Add ``delta`` to the residual stream ``x`` in place, and write the norm of the sum to ``out``."""
    if delta is not None:
        x.copy_(x.float() + delta.float())
    write_rows(normalised(x.float(), norm), out)


def attention(
    qkv: torch.Tensor, heads: Heads, rope: Rope, norms: HeadNorms | None, where: Layout, out: Rows
) -> None:
    """Rotate queries and keys of ``qkv`` ``[M, fused]`` and write causal grouped-query attention to ``out`` ``[M, q]``, which
    is FP8 only by a fixed scale: no head knows the others' values."""
    for start, length in zip(where.starts.tolist(), where.lengths.tolist(), strict=True):
        own = slice(start, start + length)
        q, kv = qkv[own].split([heads.q_size, 2 * heads.kv_size], dim=1)
        _write_attention(q, kv, heads, rope, norms, out, own)


def last_attention(
    queries: torch.Tensor,
    keys_and_values: torch.Tensor,
    heads: Heads,
    rope: Rope,
    norms: HeadNorms | None,
    where: Layout,
    out: Rows,
) -> None:
    """The same for the rows alone that ``where.last`` names, wherever in its sequence each lies: ``queries`` and ``out``
    ``[as many or more, q]`` have a row for each, ``keys_and_values`` ``[M, 2 kv]`` one a token."""
    for index, end in enumerate(where.last.tolist()):
        start = int(where.starts[where.starts < end].max())
        own = slice(index, index + 1)
        _write_attention(queries[own], keys_and_values[start:end], heads, rope, norms, out, own)


def swiglu(gate_up: torch.Tensor, out: Rows) -> None:
    """Write silu(gate) * up of ``gate_up`` ``[M, 2 intermediate]`` to ``out``."""
    gate, up = gate_up.float().chunk(2, dim=1)
    write_rows(functional.silu(gate) * up, out)


def quantise(rows: torch.Tensor, out: Rows) -> None:
    """Write ``rows`` to ``out``, both ``[M, width]``: e4m3, each row with a scale of its own or the fixed one."""
    write_rows(rows.float(), out)


def take(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    last_token_ids: torch.Tensor | None,
    norm: Norm | None,
    out: torch.Tensor,
) -> None:
    """Write rows of the residual stream ``x`` (+ ``delta``) to ``out`` ``[rows, hidden]``, after ``norm`` if one is given.

    The rows are those that ``last_token_ids`` (1-based) names, or the first ``len(out)``.
    """
    rows = _taken(x[: len(out)] if last_token_ids is None else x, last_token_ids).float()
    if delta is not None:
        rows = rows + _taken(delta[: len(out)] if last_token_ids is None else delta, last_token_ids).float()
        rows = rows.to(x.dtype).float()  # the sum is rounded wherever it is computed
    out.copy_(rows if norm is None else normalised(rows, norm))


def mean(rows: torch.Tensor, where: Layout, out: torch.Tensor) -> None:
    """Write the mean of each sequence's ``rows`` (float32 ``[T, hidden]``) to ``out`` (float32 ``[B, hidden]``)."""
    for index, (start, length) in enumerate(zip(where.starts.tolist(), where.lengths.tolist(), strict=True)):
        out[index] = rows[start : start + length].mean(0)


def multiply(rows: Rows, linear: Linear, out: torch.Tensor) -> None:
    """Write ``rows @ weight.T + bias`` to ``out`` ``[M, out]``."""
    values, weight = rows.values, linear.weight
    if linear.is_fp8:
        product = (values.float() * rows.scales) @ (weight.float() * linear.scales.T).T
    else:
        product = (values @ weight.T).float()
    out.copy_(product if linear.bias is None else product + linear.bias.float())


def adds_itself(linear: Linear) -> bool:
    """Say whether ``multiply_add`` adds to ``x`` itself."""
    return False


def multiply_add(rows: Rows, linear: Linear, x: torch.Tensor, delta: torch.Tensor) -> None:
    """Add ``rows @ weight.T + bias`` to ``x`` if ``adds_itself`` says so, else write it to ``delta`` for a later addition."""
    multiply(rows, linear, delta)


def multiply_swiglu(rows: Rows, linear: Linear, gate_up: torch.Tensor, out: Rows) -> None:
    """Write silu(gate) * up of ``rows @ weight.T + bias`` to ``out``; ``gate_up`` ``[M, 2 intermediate]`` is memory for what lies
    between."""
    multiply(rows, linear, gate_up)
    swiglu(gate_up, out)


def quantised(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round float32 rows to e4m3, each with a scale of its own: values, and scales ``[rows, 1]``."""
    scales = rows.abs().amax(1, keepdim=True).clamp_(min=SMALLEST_ROW) / FP8_MAX
    return (rows / scales).to(torch.float8_e4m3fn), scales


def quantised_by(input_scale: float, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round float32 rows to e4m3 by one scale: values, which saturate, and scales ``[rows, 1]``, NaN for rows that are not finite."""
    values = (rows / input_scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    is_finite = rows.isfinite().all(1, keepdim=True)
    return values, torch.where(is_finite, input_scale, torch.nan).to(torch.float32)


def write_rows(rows: torch.Tensor, out: Rows) -> None:
    if out.scales is None:
        out.values.copy_(rows)
        return
    values, scales = quantised(rows) if out.input_scale is None else quantised_by(out.input_scale, rows)
    out.values.copy_(values)
    out.scales.copy_(scales)


def normalised(rows: torch.Tensor, norm: Norm) -> torch.Tensor:
    """Root-mean-square norm of float32 rows."""
    return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + norm.eps) * norm.weight.float()


def _taken(rows: torch.Tensor, last_token_ids: torch.Tensor | None) -> torch.Tensor:
    return rows if last_token_ids is None else rows[last_token_ids.long() - 1]


def _write_attention(
    q: torch.Tensor, kv: torch.Tensor, heads: Heads, rope: Rope, norms: HeadNorms | None, out: Rows, own: slice
) -> None:
    """Write the attention of a sequence's last rows, one or all, to ``own`` rows of ``out``."""
    q, k, v = (part.unflatten(1, (-1, heads.head_dim)).transpose(0, 1) for part in (q, *kv.chunk(2, dim=1)))
    first = k.shape[1] - q.shape[1]
    q, k = _turned(q, rope, norms and norms.q, norms, first), _turned(k, rope, norms and norms.k, norms)
    o = functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=first == 0, enable_gqa=True)[0]
    scales = None if out.scales is None else out.scales[own]
    write_rows(o.transpose(0, 1).flatten(1).float(), replace(out, values=out.values[own], scales=scales))


def _turned(
    x: torch.Tensor, rope: Rope, weight: torch.Tensor | None, norms: HeadNorms | None, first: int = 0
) -> torch.Tensor:
    """Normalise the heads of ``x`` ``[heads, tokens, head_dim]`` if they are, and rotate them by their positions from ``first``."""
    heads = x.float()
    if weight is not None:
        heads = normalised(heads, Norm(weight, norms.eps))
    cos, sin = (table[first : first + x.shape[1]] for table in (rope.cos, rope.sin))
    one, two = heads.chunk(2, dim=-1)
    return torch.cat([one * cos - two * sin, two * cos + one * sin], dim=-1).to(x.dtype)
