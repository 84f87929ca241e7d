"""audit: what a dump of hidden states really holds, by recomputing a sample of it.

A sample of sequences, from the first to the last, is run through the checkpoint layer by layer in float32
(``builder.layer_states``), and each slot is compared with the state of every layer, on both sides of the final norm: the
nearest is what the slot is (``recomputed``). What can be seen without computing is looked at everywhere (``faults``): files that
are not whole, rows that are not as many as tokens, padding, values that are not finite, sequences that are there twice or not
at all, and, against the input, token ids that are another row's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tensorrt_llm_ext.checkpoint import Checkpoint
from tensorrt_llm_ext.checks.dumps import UNREADABLE, Dump, Dumped, Place
from tensorrt_llm_ext.checks.faults import Fault, Held, against_reference, missing_bos, twice, wrong_shapes
from tensorrt_llm_ext.checks.recomputed import SlotFinding, recompute
from tensorrt_llm_ext.errors import InputError, TapError
from tensorrt_llm_ext.taps import parse_taps

NUM_SAMPLED = 16


@dataclass
class Audit:
    """What was looked at, and what was found."""

    format: str
    num_sequences: int
    sampled: list[str]
    slots: list[SlotFinding] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def audit(
    dump: Dump,
    checkpoint: Checkpoint,
    *,
    reference: Mapping[str, np.ndarray] | None = None,
    layers: str | None = None,
    num_sampled: int = NUM_SAMPLED,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Audit:
    """Audit a dump against a checkpoint.

    ``reference`` holds the token ids that should be there, by key (row number or id), in the order of the input; ``layers``
    says which layers the auxiliary slots should be, as numbers or ``eagle3``. Raises InputError for a dump without sequences.
    """
    if not dump.entries:
        raise InputError("the dump holds no sequence", expected="at least one", found="none", fix="name another folder")
    found = Audit(dump.format, len(dump.entries), [])
    held = _held(dump, found)
    found.faults += twice(dump, held)
    if reference is not None:
        found.faults += against_reference(held, reference, dump.may_be_padded)
    sample = {key: held[key].entry.load() for key in _spread(list(held), num_sampled)}
    found.sampled = list(sample)
    if not sample:
        return found
    for key, dumped in sample.items():
        found.faults += wrong_shapes(key, dumped, dump, checkpoint, found.notes)
    if reference is None:
        found.faults += missing_bos(sample, checkpoint)
    usable = {key: dumped for key, dumped in sample.items() if _is_usable(dumped, checkpoint)}
    if usable:
        promised = _promised(dump, usable, checkpoint, layers)
        found.slots, faults = recompute(usable, promised, checkpoint, progress)
        found.faults += faults
    return found


def _held(dump: Dump, found: Audit) -> dict[str, Held]:
    """Load every sequence once; one that cannot be is a fault."""
    held: dict[str, Held] = {}
    for entry in dump.entries:
        try:
            token_ids = np.array(entry.load().token_ids)
        except UNREADABLE as error:
            found.faults.append(Fault("unreadable", entry.place, "a whole file", f"{type(error).__name__}: {error}"))
        else:
            held[entry.key if entry.key not in held else entry.place] = Held(entry, token_ids)
    return held


def _spread(keys: list[str], number: int) -> list[str]:
    """Keys spread over all, the first and the last among them."""
    return [keys[place] for place in sorted({round(place) for place in np.linspace(0, len(keys) - 1, min(number, len(keys)))})]


def _is_usable(dumped: Dumped, checkpoint: Checkpoint) -> bool:
    a = checkpoint.architecture
    tokens = dumped.token_ids
    has_shape = all(rows.ndim == 2 and rows.shape[1] == a.hidden_size and len(rows) for rows in dumped.slots)
    return bool(len(tokens)) and has_shape and 0 <= tokens.min() <= tokens.max() < a.vocab_size


def _promised(dump: Dump, sample: Mapping[str, Dumped], checkpoint: Checkpoint, layers: str | None) -> dict[str, list[Place]]:
    """For each sequence, the place that each of its slots should be."""
    num_layers = checkpoint.architecture.num_layers
    promised = {}
    for key, dumped in sample.items():
        if dump.places is not None:
            promised[key] = list(dump.places)
            continue
        aux = _aux_layers(layers, num_layers, len(dumped.slots) - 1)
        promised[key] = [*((layer, "pre") for layer in aux), (num_layers, dumped.last_norm or dump.last_norm)]
    return promised


def _aux_layers(layers: str | None, num_layers: int, num_aux: int) -> list[int]:
    if layers is None or layers == "eagle3":
        aux = [tap.layer for tap in parse_taps("eagle3", num_layers)[:-1]] if num_aux else []
    else:
        aux = [int(layer) for layer in layers.split(",")]
    if len(aux) != num_aux:
        raise TapError(
            "the dump has another number of auxiliary slots than layers are expected",
            expected=f"{len(aux)} slots, for the layers {aux}",
            found=f"{num_aux} slots",
            fix="say which layers they should be: --layers 2,16,29 (the state after so many layers; eagle3 where left out)",
        )
    return aux


def arrow_reference(path: Path) -> dict[str, np.ndarray]:
    """The token ids of an Arrow dataset (``save_to_disk``), by row number."""
    import datasets

    rows = datasets.load_from_disk(str(path)).with_format(None)["input_ids"]
    return {str(number): np.asarray(ids, np.int64) for number, ids in enumerate(rows)}
