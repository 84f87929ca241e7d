"""Canaries: a few token sequences and their right hidden states, by which an engine proves itself at every start.

A canary is of use only where a wrong answer would be noticed: each state carries its distance to the nearest confusion,
and a state whose confusion lies nearer than four tolerances is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from tensorrt_llm_ext.builder.layerwise import layer_states
from tensorrt_llm_ext.checkpoint.protocol import Checkpoint
from tensorrt_llm_ext.errors import BuildError
from tensorrt_llm_ext.recipes.contract import Canary, CanaryState, row_distances
from tensorrt_llm_ext.recipes.recipe import Precision
from tensorrt_llm_ext.taps import Norm, Tap

SOURCE = "graph-fp32"
LENGTHS = (5, 1, 12, 3)  # different, one of a single token, none in order of length
MIN_TOLERANCES_APART = 4
MIN_CANARIES = 2  # that can tell, for each tap: one of them then has more than one token
_GOLDEN_RATIO = 0.6180339887498949

# How far an engine's rows may lie from float32, by ``row_distances``. Measured on SmolLM2, worst row of any layer: float32
# 1.2e-5 (the order of summation), float16 2.8e-3, transformers' bfloat16 5.3e-2; the first two with room for deeper models
# and other machines. fp8: the distance of two rows of cosine 0.995, the least that a recipe's fp8 engine is allowed.
TOLERANCES = {"float32": 2e-4, "float16": 1e-2, "bfloat16": 6e-2, "fp8": 0.1}

Place = tuple[int, Norm]
States = dict[Place, list[np.ndarray]]  # a place's states, [tokens, hidden] a canary
Oracle = Callable[..., Iterator[tuple[int, Norm, list[np.ndarray]]]]  # called like ``layer_states``


def make_canaries(
    checkpoint: Checkpoint,
    taps: tuple[Tap, ...],
    precision: Precision,
    progress: Callable[[int, int], None],
    *,
    max_seq_len: int,
    oracle: Oracle = layer_states,
    source: str = SOURCE,
) -> tuple[Canary, ...]:
    """Compute the canaries of an engine in float32, layer by layer, by ``oracle``; ``source`` names it.

    Raises BuildError when a state is not finite, or a tap has fewer than MIN_CANARIES that could tell a wrong answer.
    """
    sequences = canary_sequences(checkpoint.architecture.vocab_size, max_seq_len)
    states = _collect(checkpoint, sequences, taps, progress, oracle)
    num_layers, tolerance = checkpoint.architecture.num_layers, TOLERANCES[precision]
    canaries = []
    for index, token_ids in enumerate(sequences):
        found = (_state(states, tap, index, tolerance, num_layers) for tap in taps)
        telling = tuple(state for state in found if state.confusion >= MIN_TOLERANCES_APART * tolerance)
        canaries.append(Canary(tuple(int(token) for token in token_ids), source, telling))
    for tap in taps:
        _require_telling(tap, canaries, tolerance, checkpoint)
    return tuple(canaries)


def canary_sequences(vocab_size: int, max_seq_len: int) -> list[np.ndarray]:
    """Choose the canaries' tokens, int32: spread over the middle half of the vocabulary, no token twice.

    Special tokens, bytes and padding of the vocabulary stand at its ends. LENGTHS, or what an engine of shorter
    sequences takes.
    """
    lengths = [min(length, max_seq_len) for length in LENGTHS]
    steps = np.arange(1, sum(lengths) + 1) * _GOLDEN_RATIO % 1.0
    token_ids = (vocab_size * (0.25 + 0.5 * steps)).astype(np.int32)
    return np.split(token_ids, np.cumsum(lengths)[:-1])


def _require_telling(tap: Tap, canaries: list[Canary], tolerance: float, checkpoint: Checkpoint) -> None:
    num_telling = sum(any(state.tap == tap for state in canary.states) for canary in canaries)
    if num_telling < MIN_CANARIES:
        raise BuildError(
            f"the canaries cannot tell '{tap.spelling(checkpoint.architecture.num_layers)}' of '{checkpoint.name}' from a "
            "wrong answer",
            expected=f"{MIN_CANARIES} canaries at least {MIN_TOLERANCES_APART} tolerances, "
            f"{MIN_TOLERANCES_APART * tolerance:g}, from the nearest confusion",
            found=num_telling,
            fix="tap another place, or build in a higher precision",
        )


def rows_of(states: np.ndarray, tap_rows: str) -> np.ndarray:
    """What a tap takes of one sequence's states ``[tokens, hidden]``: ``[1, hidden]``, or all of them."""
    if tap_rows == "last":
        return states[-1:]
    if tap_rows == "mean":
        return states.mean(axis=0, keepdims=True, dtype=np.float64).astype(np.float32)
    return states


def _collect(
    checkpoint: Checkpoint,
    sequences: list[np.ndarray],
    taps: tuple[Tap, ...],
    progress: Callable[[int, int], None],
    oracle: Oracle,
) -> States:
    """The states of every tapped place and of the places it could be confused with."""
    num_layers = checkpoint.architecture.num_layers
    wanted = {(tap.layer, tap.norm) for tap in taps}
    wanted |= {place for tapped in tuple(wanted) for place in _neighbours(tapped, num_layers)}
    last_layer = None if (num_layers, "post") in wanted else max(layer for layer, _ in wanted)
    kept = {}
    for layer, norm, states in oracle(checkpoint, sequences, last_layer=last_layer):
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


def _state(states: States, tap: Tap, index: int, tolerance: float, num_layers: int) -> CanaryState:
    """The right rows of one canary, and how near the nearest wrong ones lie."""
    right = rows_of(states[tap.layer, tap.norm][index], tap.rows)
    confusion, name = min((_distance(wrong, right), name) for name, wrong in _confusions(states, tap, index, num_layers))
    return CanaryState(tap, right, tolerance, confusion, name)


def _confusions(states: States, tap: Tap, index: int, num_layers: int) -> Iterator[tuple[str, np.ndarray]]:
    """Name every wrong answer that a mistake in the engine or the runtime could give in this one's place."""
    place = tap.layer, tap.norm
    own = states[place][index]
    for layer, norm in _neighbours(place, num_layers):
        yield f"layer {layer}, {norm} norm", rows_of(states[layer, norm][index], tap.rows)
    if tap.rows == "mean":
        yield from ((f"canary {i}", rows_of(other, "mean")) for i, other in enumerate(states[place]) if i != index)
        if len(own) > 1:
            yield "the mean without the last row", rows_of(own[:-1], "mean")
            yield "the mean with the last row twice", rows_of(np.concatenate([own, own[-1:]]), "mean")
            yield "the last row", own[-1:]
    else:
        packed = np.concatenate(states[place])
        count = len(own) if tap.rows == "all" else 1
        right_start = sum(map(len, states[place][: index + 1])) - count
        for start in range(len(packed) - count + 1):
            if start != right_start:
                yield f"rows that begin {start - right_start:+d} from the right one", packed[start : start + count]


def _distance(wrong: np.ndarray, right: np.ndarray) -> float:
    return float(row_distances(wrong, right).max())
