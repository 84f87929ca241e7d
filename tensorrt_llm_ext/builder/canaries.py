"""Canaries: a few token sequences and their right hidden states, by which an engine proves itself at every start.

A canary is of use only where a wrong answer would be noticed, so each state carries its distance to the nearest
confusion, and a confusion nearer than four tolerances is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from tensorrt_llm_ext.builder.layerwise import layer_states
from tensorrt_llm_ext.checkpoint.protocol import Checkpoint
from tensorrt_llm_ext.errors import BuildError
from tensorrt_llm_ext.recipes.contract import Canary, CanaryState
from tensorrt_llm_ext.recipes.recipe import Precision
from tensorrt_llm_ext.taps import Norm, Tap

SOURCE = "graph-fp32"
LENGTHS = (5, 1, 12, 3)  # different, one of a single token, none in order of length
MIN_TOLERANCES_APART = 4
_GOLDEN_RATIO = 0.6180339887498949

# What an engine may differ by from float32, as a part of the largest value of the state. float32: other summation order
# only; 50 times what SmolLM2 shows (7e-7 to 2e-6). float16: 4 times what SmolLM2 shows (5e-3).
RELATIVE = {"float32": 1e-4, "float16": 2e-2}

Place = tuple[int, Norm]
States = dict[Place, list[np.ndarray]]  # a place's states, [tokens, hidden] a canary


def make_canaries(
    checkpoint: Checkpoint,
    taps: tuple[Tap, ...],
    precision: Precision,
    progress: Callable[[int, int], None],
) -> tuple[Canary, ...]:
    """Compute the canaries of an engine in float32, layer by layer.

    Raises BuildError when a state is not finite, or when a wrong answer lies nearer than four tolerances.
    """
    sequences = canary_sequences(checkpoint.architecture.vocab_size)
    states = _collect(checkpoint, sequences, taps, progress)
    canaries = []
    for index, token_ids in enumerate(sequences):
        found = tuple(_state(states, tap, index, RELATIVE[precision], checkpoint) for tap in taps)
        canaries.append(Canary(tuple(int(token) for token in token_ids), SOURCE, found))
    return tuple(canaries)


def canary_sequences(vocab_size: int) -> list[np.ndarray]:
    """Choose the canaries' tokens, int32: spread over the middle half of the vocabulary, no token twice.

    Special tokens, bytes and padding of the vocabulary stand at its ends.
    """
    steps = np.arange(1, sum(LENGTHS) + 1) * _GOLDEN_RATIO % 1.0
    token_ids = (vocab_size * (0.25 + 0.5 * steps)).astype(np.int32)
    return np.split(token_ids, np.cumsum(LENGTHS)[:-1])


def rows_of(states: np.ndarray, tap_rows: str) -> np.ndarray:
    """What a tap takes of one sequence's states ``[tokens, hidden]``: ``[1, hidden]``, or all of them."""
    if tap_rows == "last":
        return states[-1:]
    if tap_rows == "mean":
        return states.mean(axis=0, keepdims=True, dtype=np.float64).astype(np.float32)
    return states


def _collect(
    checkpoint: Checkpoint, sequences: list[np.ndarray], taps: tuple[Tap, ...], progress: Callable[[int, int], None]
) -> States:
    """The states of every tapped place and of the places it could be confused with."""
    num_layers = checkpoint.architecture.num_layers
    wanted = {(tap.layer, tap.norm) for tap in taps}
    wanted |= {place for tapped in tuple(wanted) for place in _neighbours(tapped, num_layers)}
    last_layer = None if (num_layers, "post") in wanted else max(layer for layer, _ in wanted)
    kept = {}
    for layer, norm, states in layer_states(checkpoint, sequences, last_layer=last_layer):
        if not all(np.isfinite(state).all() for state in states):
            raise BuildError(
                f"the states after layer {layer} of '{checkpoint.name}' are not finite",
                expected="finite float32 numbers",
                found="NaN or Inf for a canary",
                fix="check the checkpoint's weights: this model is broken, or was converted wrongly",
            )
        if (layer, norm) in wanted:
            kept[layer, norm] = states
        progress(layer, num_layers if last_layer is None else last_layer)
    return kept


def _neighbours(place: Place, num_layers: int) -> list[Place]:
    """The places next to this one: the layers before and after, and the other side of the final norm."""
    layer, norm = place
    if norm == "post":
        return [(num_layers, "pre"), (num_layers - 1, "pre")]
    above = (layer + 1, "pre") if layer < num_layers else (num_layers, "post")
    return [above] if layer == 0 else [(layer - 1, "pre"), above]


def _state(states: States, tap: Tap, index: int, relative: float, checkpoint: Checkpoint) -> CanaryState:
    right = rows_of(states[tap.layer, tap.norm][index], tap.rows)
    tolerance = relative * float(np.abs(right).max())
    num_layers = checkpoint.architecture.num_layers
    distance, confusion = min((_distance(right, wrong), name) for name, wrong in _confusions(states, tap, index, num_layers))
    if distance < MIN_TOLERANCES_APART * tolerance:
        raise BuildError(
            f"canary {index} cannot tell '{tap.spelling(num_layers)}' of '{checkpoint.name}' from {confusion}",
            expected=f"a difference of at least {MIN_TOLERANCES_APART} tolerances, {MIN_TOLERANCES_APART * tolerance:.3g}",
            found=f"{distance:.3g}",
            fix="tap another layer, or build in a higher precision",
        )
    return CanaryState(tap, right, tolerance, distance, confusion)


def _confusions(states: States, tap: Tap, index: int, num_layers: int) -> Iterator[tuple[str, np.ndarray]]:
    """Name every wrong answer that a mistake in the engine or the runtime could give in this one's place."""
    place = tap.layer, tap.norm
    own = states[place][index]
    for other in _neighbours(place, num_layers):
        yield f"layer {other[0]}, {other[1]} norm", rows_of(states[other][index], tap.rows)
    for number, others in enumerate(states[place]):
        if number != index:
            yield f"canary {number}", rows_of(others, tap.rows)
    if tap.rows == "last":
        for number, others in enumerate(states[place]):
            for row, wrong in enumerate(others):
                if (number, row) != (index, len(own) - 1):
                    yield f"row {row} of canary {number}", wrong[None]
    elif len(own) > 1 and tap.rows == "mean":
        yield "the mean without the last row", rows_of(own[:-1], "mean")
        yield "the mean with the last row twice", rows_of(np.concatenate([own, own[-1:]]), "mean")
        yield "the last row", own[-1:]
    elif len(own) > 1:
        yield "its rows shifted by one", np.roll(own, 1, axis=0)


def _distance(right: np.ndarray, wrong: np.ndarray) -> float:
    """Largest absolute difference over the rows that both have."""
    common = min(len(right), len(wrong))
    return float(np.abs(right[:common] - wrong[:common]).max())
