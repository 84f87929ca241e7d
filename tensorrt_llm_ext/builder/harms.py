"""Harms: how far one product in FP8 moves the states at the end, all else in float32.

Where FP8 hurts is the model's matter: a rounding error of the same size dies out in one layer and grows in another, so the
error where it is made says little. It is followed to the end, for every product alone. Errors of different products are
unrelated and add: measured on SmolLM2, the harms of its 120 products sum to 0.0039, and all of them in FP8 give 0.0036.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tensorrt_llm_ext.builder.layerwise import MAX_PADDED_TOKENS, Step, batches_of, embedded
from tensorrt_llm_ext.checkpoint.layout import PRODUCTS, product_linears
from tensorrt_llm_ext.checkpoint.protocol import Checkpoint
from tensorrt_llm_ext.graph.fp8 import rounded_to_fp8
from tensorrt_llm_ext.graph.layer_model import input_scale, layer_model, norm_model
from tensorrt_llm_ext.graph.layers import layer_prefix
from tensorrt_llm_ext.graph.quantisation import LinearScales
from tensorrt_llm_ext.recipes.contract import row_cosines


_WORST_WEIGHT = 0.1  # of the worst token beside the mean, in the order of the products: a few tokens are lost first
_DIGITS = 3


@dataclass(frozen=True)
class Harm:
    """1 - cosine of the tokens' states: its mean, and the worst token's."""

    mean: float
    worst: float

    @property
    def weighed(self) -> float:
        return self.mean + _WORST_WEIGHT * self.worst


def product_harms(
    checkpoint: Checkpoint,
    sequences: Sequence[np.ndarray],
    scales: Mapping[str, LinearScales],
    *,
    num_layers: int,
    progress: Callable[[int, int], None],
) -> dict[str, Harm]:
    """By product (``11.down``): 1 - cosine between the states after ``num_layers`` layers with it in FP8 and without, over
    all tokens; after the final norm where those are all layers.

    One layer's weights are in memory, and the states of every product below it: 4 x layers x tokens x hidden x 4 bytes.
    Raises BackendError with the layer.
    """
    batches = batches_of(sequences, checkpoint.architecture.vocab_size)
    longest = max(map(len, sequences))
    exact = Step(layer_model(checkpoint, longest), checkpoint)
    rounding = {part: Step(layer_model(checkpoint, longest, rounded=names), checkpoint) for part, names in PRODUCTS.items()}
    x = embedded(checkpoint, sequences)
    products = [f"{layer}.{part}" for layer in range(num_layers) for part in PRODUCTS]
    moved = np.empty((len(products), *x.shape), np.float32)  # the states with that product in FP8

    def advance(step: Step, prefix: str, weights: dict[str, np.ndarray], num_products: int) -> None:
        """Take the states of the first products one step on, as many as one call takes at once: it reads all weights."""
        most = max(1, MAX_PADDED_TOKENS // (longest * len(sequences)))
        for first in range(0, num_products, most):
            some = moved[first : min(first + most, num_products)]
            together = batches_of([*sequences] * len(some), checkpoint.architecture.vocab_size)
            some[:] = step.run(prefix, weights, some.reshape(-1, x.shape[1]), together).reshape(some.shape)

    for layer in range(num_layers):
        prefix = layer_prefix(layer)
        weights = exact.weights(prefix)
        own = range(layer * len(PRODUCTS), (layer + 1) * len(PRODUCTS))
        advance(exact, prefix, weights, own.start)
        for number, step in zip(own, rounding.values(), strict=True):
            linears = product_linears(products[number])
            moved[number] = step.run(prefix, weights | rounded(weights, prefix, linears, scales), x, batches)
        x = exact.run(prefix, weights, x, batches)
        progress(layer + 1, num_layers)
    if num_layers == checkpoint.architecture.num_layers:
        norm = Step(norm_model(checkpoint), checkpoint)
        advance(norm, "", norm.weights(""), len(products))
        x = norm.run("", norm.weights(""), x, batches)
    return {product: _harm(1 - row_cosines(x, states)) for product, states in zip(products, moved, strict=True)}


def products_to_keep(harms: Mapping[str, Harm], sizes: Mapping[str, int], most: float) -> frozenset[str]:
    """Choose the products that stay out of FP8: those that harm most for their size, the worst token counted, until the
    others harm at most ``most`` in the sum of means."""
    kept: set[str] = set()
    for product in sorted(harms, key=lambda name: (-harms[name].weighed / sizes[name], name)):
        if total(harms, harms.keys() - kept) <= most:
            break
        kept.add(product)
    return frozenset(kept)


def total(harms: Mapping[str, Harm], products: Iterable[str]) -> float:
    """What these products harm together, in the mean."""
    return sum(harms[product].mean for product in sorted(products))


def _harm(away: np.ndarray) -> Harm:
    return Harm(_rounded_to_digits(away.mean()), _rounded_to_digits(away.max()))


def _rounded_to_digits(value: float) -> float:
    """Another machine's order of summation must not choose other products."""
    return float(f"{value:.{_DIGITS}g}")


def rounded(
    weights: Mapping[str, np.ndarray], prefix: str, linears: Iterable[str], scales: Mapping[str, LinearScales]
) -> dict[str, np.ndarray]:
    """The inputs of a step in which these linears are in FP8: their weights, rounded, and the scales of their inputs."""
    feed = {}
    for linear in linears:
        name = linear.removeprefix(prefix)
        channels = scales[linear].weight[:, None]
        feed[f"{name}.weight"] = rounded_to_fp8(weights[f"{name}.weight"], channels).astype(np.float32) * channels
        feed[input_scale(name)] = np.array(scales[linear].activation, np.float32)
    return feed
