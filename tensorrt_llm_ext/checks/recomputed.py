"""What the slots of a dump are: every slot against the state of every layer, on both sides of the final norm.

The nearest state is what the slot is. Rows that are not clearly near one are tried as something else: divided by their length,
another token's, another sequence's, of the same tokens with a BOS more or less.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from tensorrt_llm_ext.builder import layer_states
from tensorrt_llm_ext.checkpoint import Checkpoint
from tensorrt_llm_ext.checks.dumps import Dumped, Place
from tensorrt_llm_ext.checks.faults import Fault, num_pads
from tensorrt_llm_ext.recipes.contract import row_distances

MAX_TOKENS = 1024  # of a sequence that are recomputed: causal states of its beginning do not depend on the rest

NEAR = 0.4
"""Rows nearer than this (0 is equal, about 1 is unrelated) are a state of their own tokens; which one, the nearest decides."""

CERTAIN = 0.1
"""Rows that are nearer than this are not tried as anything else; beyond, another explanation wins that is three times nearer."""

_CLEARLY_NEARER = 3
_UNIT_LENGTH = 0.02  # how far from 1 the length of a normalised row may be, in bfloat16


@dataclass(frozen=True)
class SlotFinding:
    """What a slot is: the place promised, the nearest place, their distances, and the nearest other place."""

    slot: str
    promised: str
    found: str
    distance: float
    runner_up: str
    runner_up_distance: float


def recompute(
    sample: Mapping[str, Dumped],
    promised: Mapping[str, list[Place]],
    checkpoint: Checkpoint,
    progress: Callable[[int, int], None],
) -> tuple[list[SlotFinding], list[Fault]]:
    """Compare every slot with every place, and say of each slot what it is, and of which sequences it is something else."""
    slots: list[SlotFinding] = []
    faults: list[Fault] = []
    tokens = {key: _tokens_to_run(dumped) for key, dumped in sample.items()}
    distances: dict[str, list[dict[Place, float]]] = {key: [{} for _ in dumped.slots] for key, dumped in sample.items()}
    kept: dict[Place, dict[str, np.ndarray]] = {}
    wanted = {place for places in promised.values() for place in places}
    num_layers = checkpoint.architecture.num_layers
    for layer, norm, states in layer_states(checkpoint, list(tokens.values())):
        by_key = dict(zip(tokens, states, strict=True))
        for key, dumped in sample.items():
            for slot, rows in enumerate(dumped.slots):
                distances[key][slot][layer, norm] = _distance(rows, by_key[key], dumped)
        if (layer, norm) in wanted:
            kept[layer, norm] = by_key
        progress(layer, num_layers)
    for slot in range(max(len(dumped.slots) for dumped in sample.values())):
        keys = [key for key in sample if slot < len(sample[key].slots)]
        near = []
        for key in keys:
            place, own = promised[key][slot], distances[key][slot]
            fault = None
            if min(own.values()) > CERTAIN:
                fault = _explained(key, slot, sample, kept[place], own, place, checkpoint)
            if fault is not None:
                faults.append(fault)
            else:
                near.append(key)
        if near:
            slots.append(_slot_finding(slot, near, distances, promised, num_layers))
            faults += _wrong_places(slot, near, distances, promised, num_layers)
    return slots, faults


def _tokens_to_run(dumped: Dumped) -> np.ndarray:
    is_pooled = any(len(rows) == 1 for rows in dumped.slots)
    return dumped.token_ids if is_pooled else dumped.token_ids[:MAX_TOKENS]


def _distance(rows: np.ndarray, states: np.ndarray, dumped: Dumped) -> float:
    """How far the rows of a slot lie from a state; one row for many tokens should be the last token's that is no padding."""
    if len(rows) == 1 and len(dumped.token_ids) > 1:
        last = len(dumped.token_ids) - 1 - num_pads(dumped)
        return _median_distance(rows, states[last : last + 1])
    return _median_distance(rows, states)


def _median_distance(rows: np.ndarray, states: np.ndarray) -> float:
    num_rows = min(len(rows), len(states))
    with np.errstate(invalid="ignore", over="ignore"):
        measured = row_distances(rows[:num_rows].astype(np.float32), states[:num_rows])
    finite = measured[np.isfinite(measured)]
    return float(np.median(finite)) if len(finite) else np.inf


def _slot_finding(slot: int, keys: list[str], distances, promised, num_layers: int) -> SlotFinding:
    """What a slot is, over all sequences whose rows are near some state."""
    mean = {place: float(np.mean([distances[key][slot][place] for key in keys])) for place in distances[keys[0]][slot]}
    best, second = sorted(mean, key=mean.get)[:2]
    spelt = lambda place: _spelt(place, num_layers)  # noqa: E731
    return SlotFinding(f"slot {slot}", spelt(promised[keys[0]][slot]), spelt(best), mean[best], spelt(second), mean[second])


def _wrong_places(slot: int, keys: list[str], distances, promised, num_layers: int) -> list[Fault]:
    """Sequences whose slot is the state of another place than promised, grouped by what it is."""
    wrong = defaultdict(list)
    for key in keys:
        best = min(distances[key][slot], key=distances[key][slot].get)
        if best != promised[key][slot]:
            wrong[promised[key][slot], best].append(key)
    faults = []
    for (right, best), of_keys in wrong.items():
        is_norm = right[0] == best[0]
        code = "wrong_norm" if is_norm else "layer_off_by_one" if abs(right[0] - best[0]) == 1 else "wrong_layer"
        where = f"slot {slot} of {len(of_keys)} sequences, the first '{of_keys[0]}'"
        faults.append(Fault(code, where, _spelt(right, num_layers), _spelt(best, num_layers)))
    return faults


def _explained(
    key: str,
    slot: int,
    sample: Mapping[str, Dumped],
    states: Mapping[str, np.ndarray],
    distances: Mapping[Place, float],
    promised: Place,
    checkpoint: Checkpoint,
) -> Fault | None:
    """Say what rows are that are not clearly a state of their own tokens; None where they are near one after all."""
    near = min(NEAR, min(distances.values()) / _CLEARLY_NEARER)
    num_layers = checkpoint.architecture.num_layers
    rows, where = sample[key].slots[slot], f"{key}, slot {slot}"
    expected = f"{_spelt(promised, num_layers)} of its own tokens"
    lengths = np.linalg.norm(rows.astype(np.float32), axis=1)
    if (np.abs(lengths - 1) < _UNIT_LENGTH).all():
        return Fault("l2_normalised", where, expected, "rows of length 1: they were divided by their length")
    if len(rows) == 1 and len(sample[key].token_ids) > 1:
        place = int(np.argmin(row_distances(np.repeat(rows.astype(np.float32), len(states[key]), 0), states[key])))
        if _median_distance(rows, states[key][place : place + 1]) < near:
            is_pad = place >= len(sample[key].token_ids) - num_pads(sample[key])
            code, what = ("last_on_padding", "padding") if is_pad else ("wrong_row", "not the last")
            return Fault(code, where, expected, f"the row of token {place}, which is {what}")
    for other, states_of_other in states.items():
        if other != key and _median_distance(rows, states_of_other) < near:
            return Fault("other_request", where, expected, f"rows of '{other}'")
    if reason := _with_other_beginning(sample[key].token_ids, rows, promised, checkpoint, near):
        return Fault("missing_bos", where, expected, reason)
    nearest = min(distances, key=distances.get)
    if distances[nearest] < NEAR:
        return None
    found = f"near no state: the nearest, {_spelt(nearest, num_layers)}, is {distances[nearest]:.2f} away"
    return Fault("unknown_rows", where, expected, found)


def _with_other_beginning(
    tokens: np.ndarray, rows: np.ndarray, promised: Place, checkpoint: Checkpoint, near: float
) -> str:
    """Whether the rows are those of the same tokens with a BOS before them, or without their first token."""
    tokens = tokens[:MAX_TOKENS]
    bos = checkpoint.tokenizer().bos_id
    tries = []
    if len(tokens) > 1:
        tries.append((tokens[1:], 0, rows[1:], "rows computed without the first token"))
    if bos is not None:
        tries.append((np.concatenate([[bos], tokens]), 1, rows, "rows computed with a BOS that the token ids lack"))
    if not tries:
        return ""
    last_layer = None if promised[1] == "post" else promised[0]
    for layer, norm, states in layer_states(checkpoint, [ids for ids, *_ in tries], last_layer=last_layer):
        if (layer, norm) == promised:
            for (_, first, own, what), found in zip(tries, states, strict=True):
                if len(own) and _median_distance(own, found[first:]) < near:
                    return what
    return ""


def _spelt(place: Place, num_layers: int) -> str:
    layer, norm = place
    if layer == num_layers:
        return f"the last layer's state, {'before' if norm == 'pre' else 'after'} the final norm"
    return f"the state after {layer} layers" if layer else "the embedding"
