"""speculators, data format 2 (releases 0.5 and later): ``hidden_states/hs_{i}.safetensors`` beside an Arrow dataset.

``hidden_states [tokens, slots, hidden]``: the auxiliary states, then the last one **before** the final norm; ``token_ids``
int64. ``i`` is the row of the Arrow dataset, which holds ``input_ids``, ``loss_mask`` and ``seq_len``, in torch's format
(speculators/train/data.py, ``ArrowDataset``).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tensorrt_llm_ext.store.exports.slots import Slots
from tensorrt_llm_ext.store.exports.tensors import library
from tensorrt_llm_ext.store.states_reading import TrainingSequence


def write_speculators(sequences: Iterable[TrainingSequence], out: Path, slots: Slots) -> None:
    """Write the files of every sequence, and the Arrow dataset."""
    datasets = library("datasets", "the format speculators-v2")
    library("torch", "the format speculators-v2")
    (out / "hidden_states").mkdir()

    def rows():
        for number, sequence in enumerate(sequences):
            states = np.stack([*slots.aux_of(sequence), slots.last_of(sequence)], axis=1)  # [tokens, slots, hidden]
            token_ids = sequence.token_ids.astype(np.int64)
            save_file({"hidden_states": states, "token_ids": token_ids}, out / "hidden_states" / f"hs_{number}.safetensors")
            yield {
                "input_ids": token_ids,
                "loss_mask": sequence.loss_mask.astype(np.int64),
                "seq_len": len(token_ids),
                "request_id": sequence.request_id,
            }

    integers = datasets.Sequence(datasets.Value("int64"))
    features = datasets.Features(
        input_ids=integers, loss_mask=integers, seq_len=datasets.Value("int64"), request_id=datasets.Value("string")
    )
    table = saved_rows(datasets, rows, features, out)
    table.set_format(type="torch")
    table.save_to_disk(out)


def saved_rows(datasets, rows, features, out: Path):
    """A dataset of rows that are made once, in constant memory; its working files lie under ``out`` and go with it."""
    try:
        return datasets.Dataset.from_generator(rows, features=features, cache_dir=str(out / WORK), writer_batch_size=64)
    except Exception as error:  # the library hides what went wrong in a generator behind an error of its own
        raise (error.__cause__ or error) from error


WORK = ".working"
"""A folder for the library's own files; it is removed before an export is published."""
