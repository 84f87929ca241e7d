"""Canaries of an fp8 engine, run with the rounding that its card will do: an engine that would fail them is not published.

The oracle runs every layer twice on the weights that it read once: in float32, which gives the canaries, and with the
linears in FP8, which says how far the engine will be from them. A plan needs no card for that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from tensorrt_llm_ext.builder.calibration import is_quantised
from tensorrt_llm_ext.builder.canaries import TOLERANCES, States, rows_of
from tensorrt_llm_ext.builder.harms import rounded
from tensorrt_llm_ext.builder.layerwise import Step, batches_of, embedded
from tensorrt_llm_ext.checkpoint import Checkpoint
from tensorrt_llm_ext.checkpoint.layout import PRODUCTS
from tensorrt_llm_ext.errors import BuildError
from tensorrt_llm_ext.graph.fp8 import FP8_MAX, rounded_to_fp8
from tensorrt_llm_ext.graph.layer_model import input_scale, layer_model, norm_model
from tensorrt_llm_ext.graph.layers import layer_prefix
from tensorrt_llm_ext.graph.quantisation import SMALLEST_ROW, Fp8Linears
from tensorrt_llm_ext.recipes import BuildSettings
from tensorrt_llm_ext.recipes.contract import Canary, row_distances
from tensorrt_llm_ext.taps import Norm

_LINEARS = tuple(name for names in PRODUCTS.values() for name in names)


class Fp8Oracle:
    """Called like ``layer_states``, and gives the same; ``rounded`` then holds the states with the linears in FP8."""

    def __init__(self, linears: Fp8Linears) -> None:
        self._linears = linears
        self.rounded: States = {}

    def __call__(
        self, checkpoint: Checkpoint, sequences: Sequence[np.ndarray], *, last_layer: int | None = None
    ) -> Iterator[tuple[int, Norm, list[np.ndarray]]]:
        num_layers = checkpoint.architecture.num_layers
        ends = np.cumsum([*map(len, sequences)])[:-1]
        batches = batches_of(sequences, checkpoint.architecture.vocab_size)
        longest = max(map(len, sequences))
        steps: dict[tuple[tuple[str, ...], ...], Step] = {}  # by the linears that are rounded: layers keep different ones
        exact = steps[(), ()] = Step(layer_model(checkpoint, longest), checkpoint)

        def result(layer: int, norm: Norm) -> tuple[int, Norm, list[np.ndarray]]:
            self.rounded[layer, norm] = np.split(y, ends)
            return layer, norm, np.split(x, ends)

        x = y = embedded(checkpoint, sequences)
        yield result(0, "pre")
        for layer in range(num_layers if last_layer is None else last_layer):
            prefix = layer_prefix(layer)
            weights = exact.weights(prefix)
            fixed, by_row = (
                tuple(name for name in _LINEARS if prefix + name in linears)
                for linears in (self._linears.scales, self._linears.by_row)
            )
            if (fixed, by_row) not in steps:
                steps[fixed, by_row] = Step(layer_model(checkpoint, longest, rounded=fixed, by_row=by_row), checkpoint)
            x = exact.run(prefix, weights, x, batches)
            feed = self._feed(checkpoint, weights, prefix, fixed) | _feed_by_row(checkpoint, weights, prefix, by_row)
            y = steps[fixed, by_row].run(prefix, weights | feed, y, batches)
            yield result(layer + 1, "pre")
        if last_layer is None:
            norm = Step(norm_model(checkpoint), checkpoint)
            x, y = (norm.run("", norm.weights(""), states, batches) for states in (x, y))
            yield result(num_layers, "post")

    def _feed(
        self, checkpoint: Checkpoint, weights: dict[str, np.ndarray], prefix: str, fixed: Sequence[str]
    ) -> dict[str, np.ndarray]:
        """The inputs of a step that rounds; weights that the checkpoint stores in FP8 are rounded already."""
        linears = [prefix + name for name in fixed]
        scales = self._linears.scales
        inputs = {input_scale(name): np.array(scales[prefix + name].activation, np.float32) for name in fixed}
        return inputs | rounded(weights, prefix, [name for name in linears if checkpoint.fp8_scales(name) is None], scales)


def _feed_by_row(
    checkpoint: Checkpoint, weights: dict[str, np.ndarray], prefix: str, by_row: Sequence[str]
) -> dict[str, np.ndarray]:
    """Weights with each row rounded by its own size, where the checkpoint does not store them rounded."""
    feed = {}
    for name in by_row:
        if checkpoint.fp8_scales(prefix + name) is None:
            weight = weights[f"{name}.weight"]
            scales = np.maximum(np.abs(weight).max(axis=1, keepdims=True), SMALLEST_ROW).astype(np.float32) / np.float32(FP8_MAX)
            feed[f"{name}.weight"] = rounded_to_fp8(weight, scales).astype(np.float32) * scales
    return feed


def check_fp8_canaries(
    checkpoint: Checkpoint, settings: BuildSettings, canaries: Sequence[Canary], rounded_states: States
) -> float:
    """Return the largest distance of a canary's rows in FP8. Raises BuildError when the engine would fail one of them.

    A card computes in bfloat16 around its FP8 products, so a part of the tolerance is left to that: two errors that have
    nothing to do with each other add by their squares.
    """
    tolerance = TOLERANCES["fp8"]
    allowed = tolerance if settings.backend == "ort" else math.sqrt(tolerance**2 - TOLERANCES["bfloat16"] ** 2)
    largest = 0.0
    for number, canary in enumerate(canaries):
        for state in canary.states:
            rows = rows_of(rounded_states[state.tap.layer, state.tap.norm][number], state.tap.rows)
            distance = float(row_distances(rows, state.rows).max())
            if not distance <= allowed:
                spelling = state.tap.spelling(checkpoint.architecture.num_layers)
                raise BuildError(
                    f"the fp8 engine of '{checkpoint.name}' would fail its own canaries: its rounding alone moves {spelling} "
                    f"of canary {number} too far from float32",
                    expected=f"a distance of at most {allowed:.3g}",
                    found=f"{distance:.3g}",
                    fix=_fix(checkpoint, settings),
                )
            largest = max(largest, distance)
    return largest


def _fix(checkpoint: Checkpoint, settings: BuildSettings) -> str:
    if settings.fp8_harm is None or is_quantised(checkpoint):  # of scales that are there, no harm is measured
        return "name more products in the recipe's fp8_kept, or build with --precision bfloat16"
    return (
        f"lower fp8_harm in the recipe, now {settings.fp8_harm:g}, so that more products stay in bfloat16; "
        "or build with --precision bfloat16"
    )
