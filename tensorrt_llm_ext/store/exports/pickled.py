"""The formats that are pickles of torch: SpecForge's and ModelOpt's, one file a sequence, ``torch.save`` of a dict.

SpecForge, eagle3 (``OfflineEagle3Dataset``): ``rows_{g}-{g + 2000}/data_{i}.ckpt`` with ``input_ids [S]``,
``loss_mask [S]``, ``hidden_state [1, S, H]`` **after** the final norm, ``aux_hidden_state [1, S, 3H]``. No row is padded.

ModelOpt: ``{conversation_id}.pt`` with ``input_ids [S]``, ``loss_mask [S]``, ``hidden_states [S, H]``,
``aux_hidden_states [S, A * H]``, ``conversation_id`` and ``hidden_states_prenorm``, which says on which side of the final norm
the last state is; without it the trainer takes it to be after.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

import numpy as np

from tensorrt_llm_ext.store.exports.slots import Slots
from tensorrt_llm_ext.store.exports.tensors import library, torch_tensor
from tensorrt_llm_ext.store.states_reading import TrainingSequence

_GROUP_ROWS = 2000
_LONGEST_NAME = 200  # bytes; file systems take 255


def write_specforge(sequences: Iterable[TrainingSequence], out: Path, slots: Slots) -> None:
    """Write one file a sequence; ``i`` counts the sequences in the order of the input."""
    torch = library("torch", "the format specforge")
    for number, sequence in enumerate(sequences):
        first = number // _GROUP_ROWS * _GROUP_ROWS
        folder = out / f"rows_{first}-{first + _GROUP_ROWS}"
        folder.mkdir(exist_ok=True)
        aux = np.concatenate(slots.aux_of(sequence), axis=1)
        tensors = {
            **_tokens(sequence),
            "hidden_state": torch_tensor(slots.last_of(sequence)[None]),
            "aux_hidden_state": torch_tensor(aux[None]),
        }
        torch.save(tensors, folder / f"data_{number}.ckpt")


def write_modelopt(sequences: Iterable[TrainingSequence], out: Path, slots: Slots) -> None:
    """Write one file a sequence, named by its request id."""
    torch = library("torch", "the format modelopt")
    for sequence in sequences:
        tensors = {
            **_tokens(sequence),
            "hidden_states": torch_tensor(slots.last_of(sequence)),
            "aux_hidden_states": torch_tensor(np.concatenate(slots.aux_of(sequence), axis=1)),
            "conversation_id": sequence.request_id,
            "hidden_states_prenorm": slots.last_norm == "pre",
        }
        torch.save(tensors, out / f"{file_name(sequence.request_id)}.pt")


def file_name(request_id: str) -> str:
    """A file name for a request id, another for each: percent-encoded where it must be, hashed where it is too long."""
    name = quote(request_id, safe=" @+=,")
    name = name.replace(".", "%2E", 1) if name.startswith(".") else name
    return name if len(name) <= _LONGEST_NAME else hashlib.sha256(request_id.encode()).hexdigest()


def _tokens(sequence: TrainingSequence) -> dict:
    return {
        "input_ids": torch_tensor(sequence.token_ids.astype(np.int64)),
        "loss_mask": torch_tensor(sequence.loss_mask.astype(np.int64)),
    }
