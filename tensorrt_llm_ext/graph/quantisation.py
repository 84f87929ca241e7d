"""Linears in FP8: their inputs and weights are rounded to float8_e4m3fn by scales that were fixed when the graph was written.

A compiler that sees QuantizeLinear and DequantizeLinear around a Gemm computes it in FP8; ONNX Runtime computes the same
rounding in float32. Activations have one scale a tensor and weights one an output channel: static, so that a request's
numbers do not depend on what else is in the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tensorrt_llm_ext.errors import BuildError
from tensorrt_llm_ext.graph.fp8 import FP8, FP8_MAX
from tensorrt_llm_ext.graph.operators import ONNX_TYPES, Graph
from tensorrt_llm_ext.graph.weights import ExternalWeights

SMALLEST_ROW = 1e-12  # a row of zeros gets its scale from this, and stays zero


@dataclass(frozen=True)
class LinearScales:
    """Scales of one linear: what a rounded value is multiplied with to have its size again.

    Each is a value of bfloat16, so graphs of float32 and of bfloat16 round alike.
    """

    activation: float
    weight: np.ndarray  # float32 [out]


@dataclass(frozen=True)
class Fp8Linears:
    """Every linear of a decoder by name (``model.layers.0.self_attn.q_proj`` …): its scales, or that it is kept as it is.

    ``by_row`` has scales of its own for each row of its input and of its weight, found when it is computed: backend torch
    does that, and no compiled graph.
    """

    scales: Mapping[str, LinearScales]
    kept: frozenset[str] = frozenset()
    by_row: frozenset[str] = frozenset()


class Fp8Operands:
    """Gives the operands of each Gemm of a graph, rounded where the linear is one of FP8."""

    def __init__(self, linears: Fp8Linears, weights: ExternalWeights) -> None:
        self._linears = linears
        self._weights = weights
        self._rounded: dict[tuple[str, float], str] = {}  # q, k and v have one input, and one scale

    def __call__(self, g: Graph, x: str, name: str) -> tuple[str, str]:
        """The input ``[T, in]`` and the weight ``[out, in]`` of the linear ``name``. Raises BuildError without a scale."""
        if name in self._linears.kept:
            return x, g.weight(f"{name}.weight")
        if name not in self._linears.scales:
            raise BuildError(
                f"there is no FP8 scale for '{name}'",
                expected="scales of every linear that is not kept in a higher precision",
                found=f"scales of {len(self._linears.scales)} linears, and {len(self._linears.kept)} that are kept",
                fix="calibrate again with this checkpoint",
            )
        scales = self._linears.scales[name]
        weight = self._weights.quantised(g, f"{name}.weight", scales.weight)
        channels = g.constant(scales.weight, g.dtype)
        return self._input(g, x, scales.activation), g.node("DequantizeLinear", weight, channels, axis=0)

    def together(self, g: Graph, x: str, names: Sequence[str]) -> tuple[str, str] | None:
        """The operands of several linears at once, where all are rounded and by one scale of the input."""
        scales = [self._linears.scales[name] for name in names if name in self._linears.scales]
        if len(scales) < len(names) or len({found.activation for found in scales}) > 1:
            return None
        weight = self._weights.quantised_together(
            g, [f"{name}.weight" for name in names], [found.weight for found in scales]
        )
        if weight is None:
            return None
        channels = g.constant(np.concatenate([found.weight for found in scales]), g.dtype)
        return self._input(g, x, scales[0].activation), g.node("DequantizeLinear", weight, channels, axis=0)

    def _input(self, g: Graph, x: str, scale: float) -> str:
        if (x, scale) not in self._rounded:
            self._rounded[x, scale] = rounded_value(g, x, g.constant(scale, g.dtype))
        return self._rounded[x, scale]


def rounded_value(g: Graph, x: str, scale: str) -> str:
    """``x`` rounded to FP8 by a scalar scale, and in its own type again."""
    return g.node("DequantizeLinear", g.node("QuantizeLinear", x, scale, g.constant(0, FP8)), scale)


def rounded_rows(g: Graph, x: str) -> str:
    """``x`` ``[rows, width]`` rounded to FP8, each row by the scale of its own largest value, and in its own type again."""
    largest = g.node("ReduceMax", g.node("Abs", x), g.constant([-1], "int64"), keepdims=1)
    scales = g.divide(g.node("Max", largest, g.constant(SMALLEST_ROW, g.dtype)), g.constant(FP8_MAX, g.dtype))
    codes = g.node("Cast", g.divide(x, scales), to=ONNX_TYPES[FP8])
    return g.multiply(g.node("Cast", codes, to=ONNX_TYPES[g.dtype]), scales)
