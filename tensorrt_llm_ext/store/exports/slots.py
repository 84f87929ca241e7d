"""Slots: which of a dataset's states a trainer's file takes as auxiliary states and which as the last one.

Auxiliary are the states before the final norm of every layer but the last, in the order of the taps; the last one is the state
of layer n before or after the final norm, as the format wants it. A state after the norm that was not extracted is made from
the one before it with the checkpoint's own norm, in float32, and rounded to the dtype it came in.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tensorrt_llm_ext.checkpoint.protocol import Checkpoint
from tensorrt_llm_ext.errors import CheckpointError, TapError
from tensorrt_llm_ext.store.header import Column, Header
from tensorrt_llm_ext.store.states_reading import TrainingSequence
from tensorrt_llm_ext.taps import Norm

_FINAL_NORM = "model.norm.weight"


@dataclass(frozen=True)
class FinalNorm:
    """The model's last RMSNorm."""

    weight: np.ndarray  # float32 [hidden]
    eps: float

    def apply(self, rows: np.ndarray) -> np.ndarray:
        """Normalise rows ``[tokens, hidden]`` in float32; the result has their dtype."""
        x = rows.astype(np.float32)
        x /= np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(self.eps))
        return (x * self.weight).astype(rows.dtype)


@dataclass(frozen=True)
class Slots:
    """Where a format's tensors come from."""

    aux: tuple[Column, ...]
    last: Column
    last_norm: Norm  # of the last state as it is written
    norm: FinalNorm | None  # applied to the last state, where it was extracted before the norm and is written after it

    def aux_of(self, sequence: TrainingSequence) -> list[np.ndarray]:
        """The auxiliary states, each ``[tokens, hidden]``."""
        return [sequence.states[column.name] for column in self.aux]

    def last_of(self, sequence: TrainingSequence) -> np.ndarray:
        """The last state, ``[tokens, hidden]``."""
        rows = sequence.states[self.last.name]
        return rows if self.norm is None else self.norm.apply(rows)

    def described(self, num_layers: int) -> dict:
        """What the slots are, in one convention: layer k is the residual stream after k layers, 0 the embedding."""
        return {
            "convention": "layer k is the residual stream after k layers; 0 is the embedding, num_layers the last",
            "num_layers": num_layers,
            "aux": [column.tap.to_dict() for column in self.aux],
            "last": {"layer": num_layers, "norm": self.last_norm},
            "last_is_derived": self.norm is not None,
        }


def slots_of(header: Header, last_norm: Norm, checkpoint: Checkpoint | None, *, num_aux: int | None = None) -> Slots:
    """Choose the slots for a format whose last state is before or after the final norm, and has ``num_aux`` others.

    Raises TapError where the dataset's taps do not give them, CheckpointError for another checkpoint than the engine's.
    """
    num_layers = header.contract.architecture.num_layers
    aux = tuple(column for column in header.columns if column.tap.layer < num_layers)
    finals = {column.tap.norm: column for column in header.columns if column.tap.layer == num_layers}
    if not aux or (num_aux is not None and len(aux) != num_aux):
        raise _missing(header, f"{num_aux or 'one or more'} auxiliary layers", "extract with --taps eagle3")
    if last_norm in finals:
        return Slots(aux, finals[last_norm], last_norm, None)
    if last_norm == "pre" or not finals:
        raise _missing(header, f"the tap {'final:pre' if last_norm == 'pre' else 'final'}@all", "build an engine with it")
    if checkpoint is None:
        raise _missing(header, "the tap final@all, or the checkpoint to make it from", "name the checkpoint: --checkpoint DIR")
    if checkpoint.fingerprint() != header.origin.checkpoint_fingerprint:
        raise CheckpointError(
            f"'{checkpoint.path}' is not the checkpoint that the states come from",
            expected=header.origin.checkpoint_fingerprint,
            found=checkpoint.fingerprint(),
            fix="name the checkpoint that the engine was built from",
        )
    norm = FinalNorm(checkpoint.tensor(_FINAL_NORM).astype(np.float32), checkpoint.architecture.norm_eps)
    return Slots(aux, finals["pre"], "post", norm)


def _missing(header: Header, wanted: str, fix: str) -> TapError:
    num_layers = header.contract.architecture.num_layers
    return TapError(
        "the dataset does not hold the states that this format needs",
        expected=wanted,
        found=", ".join(column.tap.spelling(num_layers) for column in header.columns),
        fix=fix,
    )
