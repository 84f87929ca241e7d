"""Loading: weights stream from the engine's files to their device, read ahead by threads; FP8 is made on the way.

Layers that read the same rows are fused: queries, keys and values; gate and up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from tensorrt_llm_ext.backends.torch.decoder import Decoder, Layer
from tensorrt_llm_ext.backends.torch.plain import quantised
from tensorrt_llm_ext.backends.torch.sizes import is_needed
from tensorrt_llm_ext.backends.torch.values import FP8, FP8_MAX, HeadNorms, Heads, Linear, Norm, Rope
from tensorrt_llm_ext.backends.torch.weight_index import SCALE_NAMES, WeightIndex, read_weight
from tensorrt_llm_ext.checkpoint.architecture import Architecture
from tensorrt_llm_ext.checkpoint.layout import PRODUCTS, decoder_shapes
from tensorrt_llm_ext.checkpoint.rope import rope_tables
from tensorrt_llm_ext.errors import EngineError
from tensorrt_llm_ext.graph.quantisation import SMALLEST_ROW

READERS = 4  # threads that read and hash; each is as fast as one core copies
_AHEAD = 8  # weights in memory at most
_ROUNDING = 1.1  # e4m3 makes a value larger by a sixteenth at most, bfloat16 by far less


def load_decoder(
    folder: Path,
    index: WeightIndex,
    a: Architecture,
    *,
    num_layers: int,
    max_seq_len: int,
    dtype: torch.dtype,
    is_fp8: bool,
    device: torch.device,
) -> Decoder:
    """Load the embedding, the first ``num_layers`` layers and the final norm to ``device``, in ``dtype``; products in e4m3
    where ``is_fp8``, except those that the index keeps.

    Raises EngineError when a weight is not the one that was built, and what torch raises when memory runs out.
    """
    names = [name for name in decoder_shapes(a) if is_needed(name, num_layers)]
    with _reading(folder, index, [found for name in names for found in (*_scale_names(name, index), name)]) as read:

        def load(name: str, as_stored: bool = False) -> torch.Tensor:
            values = _torch_from_numpy(read(name)).to(device)
            return values if as_stored else values.to(dtype)

        embedding = load("model.embed_tokens.weight")
        layers = tuple(_layer(load, a, number, index, is_fp8) for number in range(num_layers))
        final_norm = Norm(load("model.norm.weight"), a.norm_eps)
    tables = torch.float32 if dtype == torch.float32 else torch.float16
    cos, sin = (torch.from_numpy(table).to(device, tables) for table in rope_tables(a, max_seq_len))
    return Decoder(embedding, layers, final_norm, Heads(a.num_heads, a.num_kv_heads, a.head_dim), Rope(cos, sin))


def _layer(load, a: Architecture, number: int, index: WeightIndex, is_fp8: bool) -> Layer:
    prefix = f"model.layers.{number}."
    biased = {"qkv": a.has_qkv_bias, "o": a.has_o_bias, "gate_up": a.has_mlp_bias, "down": a.has_mlp_bias}
    attention_norm = Norm(load(prefix + "input_layernorm.weight"), a.norm_eps)

    def linear(part: str) -> Linear:
        names = [prefix + name for name in PRODUCTS[part]]
        stored = [_stored_in_fp8(load, name, index) for name in names]
        bias = torch.cat([load(f"{name}.bias") for name in names]) if biased[part] else None
        in_fp8 = is_fp8 and f"{number}.{part}" not in index.kept
        if in_fp8 and all(stored):
            return _fused(stored, bias)
        dtype = attention_norm.weight.dtype
        weights = [load(f"{name}.weight") if one is None else one.wide().to(dtype) for name, one in zip(names, stored, strict=True)]
        return _linear(weights, bias, in_fp8)

    qkv = linear("qkv")
    norms = [load(f"{prefix}self_attn.{name}_norm.weight") for name in ("q", "k")] if a.has_qk_norm else None
    heads = Heads(a.num_heads, a.num_kv_heads, a.head_dim)
    return Layer(
        attention_norm=attention_norm,
        qkv=qkv,
        head_norms=norms and HeadNorms(*norms, a.norm_eps),
        o=with_attended_scale(linear("o"), attention_norm, qkv, heads),
        mlp_norm=Norm(load(prefix + "post_attention_layernorm.weight"), a.norm_eps),
        gate_up=linear("gate_up"),
        down=linear("down"),
    )


def with_attended_scale(o: Linear, norm: Norm, qkv: Linear, heads: Heads) -> Linear:
    """Give the product of attention's rows a fixed scale that no row can pass, so that attention itself writes them in e4m3.

    What attention gives is a mean of values ``v = W x``, and the norm gives every row ``x`` the length ``sqrt(hidden)`` before
    its weight ``w``: by Cauchy and Schwarz ``|v| <= sqrt(hidden) |W w|`` for every output. That is tens of times what rows
    hold, which e4m3 does not feel: its steps are relative over four decades.
    """
    if not o.is_fp8 or o.input_scale is not None:
        return o
    rows = slice(heads.fused_size - heads.kv_size, None)
    weight = qkv.weight[rows].float() * (qkv.scales[0, rows, None] if qkv.is_fp8 else 1)
    bound = (weight * norm.weight.float()).norm(dim=1) * weight.shape[1] ** 0.5
    bound += 0 if qkv.bias is None else qkv.bias[rows].float().abs()
    return replace(o, input_scale=max(bound.max().item() * _ROUNDING, SMALLEST_ROW) / FP8_MAX)


@dataclass(frozen=True)
class _Stored:
    """A weight that was stored in e4m3 ``[out, in]``, with its scales ``[out]`` and the fixed scale of its input, if any."""

    values: torch.Tensor
    scales: torch.Tensor
    input_scale: float | None

    def wide(self) -> torch.Tensor:
        return self.values.float() * self.scales[:, None]


def _scale_names(weight: str, index: WeightIndex) -> list[str]:
    """The scales that the index holds for a weight, in the order in which they are read."""
    return [name.format(weight.removesuffix(".weight")) for name in SCALE_NAMES if name.format(weight.removesuffix(".weight")) in index.weights]


def _stored_in_fp8(load, linear: str, index: WeightIndex) -> _Stored | None:
    """The weight of a linear as it was stored, if that was in FP8."""
    scales = [load(name, as_stored=True) for name in _scale_names(f"{linear}.weight", index)]
    if not scales:
        return None
    return _Stored(load(f"{linear}.weight", as_stored=True), scales[0], scales[1].item() if len(scales) > 1 else None)


def _fused(stored: list[_Stored], bias: torch.Tensor | None) -> Linear:
    """Fuse weights as they were stored. They read the same rows: of their input's scales the largest cuts nothing."""
    input_scales = [one.input_scale for one in stored]
    return Linear(
        torch.cat([one.values.view(torch.uint8) for one in stored]).view(FP8),
        torch.cat([one.scales for one in stored])[None],
        bias,
        None if None in input_scales else max(input_scales),
    )


def _linear(weights: list[torch.Tensor], bias: torch.Tensor | None, is_fp8: bool) -> Linear:
    """Fuse the weights; in e4m3, one scale an output."""
    if not is_fp8:
        return Linear(weights[0] if len(weights) == 1 else torch.cat(weights), None, bias)
    sizes = [len(weight) for weight in weights]
    values = torch.empty(sum(sizes), weights[0].shape[1], dtype=FP8, device=weights[0].device)
    scales = torch.empty(1, sum(sizes), dtype=torch.float32, device=values.device)
    for weight, rows, row_scales in zip(weights, values.split(sizes), scales.split(sizes, dim=1), strict=True):
        rounded, scale = quantised(weight.float())
        rows.copy_(rounded)
        row_scales.copy_(scale.T)
    return Linear(values, scales, bias)


def _torch_from_numpy(values: np.ndarray) -> torch.Tensor:
    if values.dtype.name == "bfloat16":  # NumPy's bfloat16 is another package's, and so is its e4m3
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    if values.dtype.name == "float8_e4m3fn":
        return torch.from_numpy(values.view(np.uint8)).view(FP8)
    return torch.from_numpy(values)


@contextmanager
def _reading(folder: Path, index: WeightIndex, names: Sequence[str]) -> Iterator:
    """Lend a function that gives each of ``names``, asked for once and roughly in order; the next ones are read ahead."""
    missing = [name for name in names if name not in index.weights]
    if missing:
        raise EngineError(
            f"the engine in '{folder}' lacks weights of its architecture",
            expected=f"a weight '{missing[0]}'",
            found=f"{len(index.weights)} others",
            fix="copy the engine directory again, or build it again",
        )
    waiting = iter(names)
    futures: dict[str, Future] = {}
    pool = ThreadPoolExecutor(READERS, thread_name_prefix="weights")

    def start(name: str) -> None:
        futures[name] = pool.submit(read_weight, folder, name, index.weights[name])

    def read(name: str) -> np.ndarray:
        while name not in futures:
            start(next(waiting))
        values = futures.pop(name).result()
        while len(futures) < _AHEAD and (following := next(waiting, None)) is not None:
            start(following)
        return values

    try:
        yield read
    finally:
        pool.shutdown(cancel_futures=True)
