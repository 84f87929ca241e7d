"""Tuning: the algorithms of a decoder's products, chosen by trial on the engine's own weights and buffers."""

from __future__ import annotations

import torch

from tensorrt_llm_ext.backends.torch import cublaslt, gated
from tensorrt_llm_ext.backends.torch.decoder import Decoder
from tensorrt_llm_ext.backends.torch.values import Linear, Rows
from tensorrt_llm_ext.backends.torch.workspace import Workspace

_PRODUCTS = {"qkv": ("hidden", "qkv"), "o": ("attended", "x"), "gate_up": ("hidden", "gate_up"), "down": ("inner", "x")}
"""A layer's products: the rows that each reads, and what it writes, or adds to."""


def choose_algorithms(decoder: Decoder, space: Workspace) -> None:
    """Choose an algorithm for every kind of product that a pass leaves to cuBLASLt, over as many rows as ``space`` has. What its
    buffers held is lost."""
    for name, (source, out) in _PRODUCTS.items():
        kinds: dict[torch.dtype, list[Linear]] = {}
        for layer in decoder.layers:
            linear = getattr(layer, name)
            kinds.setdefault(linear.weight.dtype, []).append(linear)
        for linears in kinds.values():
            is_fused = name == "gate_up" and gated.can_multiply(linears[0])
            if cublaslt.can_multiply(linears[0]) and not is_fused:
                rows = space.rows(source, linears[0])
                _draw(rows, space.delta)
                cublaslt.try_algorithms(rows, linears, getattr(space, out), adds=out == "x")


def _draw(rows: Rows, noise: torch.Tensor) -> None:
    """Fill rows with normal values: what a product costs in power depends on them."""
    noise.normal_()
    for start in range(0, rows.values.shape[1], noise.shape[1]):
        part = rows.values[:, start : start + noise.shape[1]]
        part.copy_(noise[:, : part.shape[1]])
    if rows.scales is not None:
        rows.scales.fill_(1)
