"""Export: a dataset of states in the files that a trainer reads, whole or not at all.

Beside them lies ``export.json``: which states the slots are (layer and side of the final norm, in one convention), where they
come from, and how many there are.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tensorrt_llm_ext.checkpoint.protocol import Checkpoint
from tensorrt_llm_ext.errors import ForeignDataset, InputError, StoreError, nearest_name
from tensorrt_llm_ext.fingerprint import fingerprint
from tensorrt_llm_ext.store.disk import disk_errors
from tensorrt_llm_ext.store.exports.pickled import write_modelopt, write_specforge
from tensorrt_llm_ext.store.exports.slots import Slots, slots_of
from tensorrt_llm_ext.store.exports.speculators import WORK, write_speculators
from tensorrt_llm_ext.store.exports.tables import write_hf_dataset, write_numpy, write_parquet
from tensorrt_llm_ext.store.folder import PART_PREFIX, listing, synced
from tensorrt_llm_ext.store.header import Header, identity_of
from tensorrt_llm_ext.store.manifest import write_json
from tensorrt_llm_ext.store.states_reading import States, TrainingSequence

FORMATS = ("speculators-v2", "specforge", "modelopt", "parquet", "numpy", "hf-datasets")
EXPORT_NAME = "export.json"


@dataclass(frozen=True)
class Exported:
    """What was written. ``left_out`` names the taps that the format has no place for."""

    path: Path
    num_sequences: int
    num_tokens: int
    left_out: tuple[str, ...]


def export(
    states: States,
    out: Path,
    format: str,
    *,
    checkpoint: Checkpoint | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Exported:
    """Write a dataset in another format to ``out``, which is new or an empty folder.

    ``checkpoint`` gives the final norm where a format wants the state after it and the dataset has the one before it.
    Raises InputError for an unknown format, TapError where the taps do not give what the format needs, ForeignDataset where
    ``out`` holds something, MissingExtra, StoreError, DiskFull; nothing is left at ``out`` then.
    """
    out = Path(os.path.abspath(out))
    if format not in FORMATS:
        raise InputError("unknown export format", expected=", ".join(FORMATS), found=format, fix=nearest_name(format, FORMATS))
    slots = _slots(states.header, format, checkpoint)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        found = listing(out) if out.is_dir() else "a file"
        raise ForeignDataset(f"'{out}' exists already", expected="a new or empty folder", found=found, fix="name another --out")
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f"{PART_PREFIX}{out.name}-", dir=out.parent))
    try:
        with disk_errors(out):
            counted = _Counted(states, on_progress)
            _write(counted, part, format, slots)
            if counted.num_sequences != len(states):
                raise StoreError(
                    "the export has not every sequence of the dataset",
                    expected=f"{len(states)}",
                    found=f"{counted.num_sequences}",
                    fix="this is a defect: keep the dataset and report it",
                )
            shutil.rmtree(part / WORK, ignore_errors=True)
            write_json(part / EXPORT_NAME, _described(states.header, format, slots, counted))
            for path in part.rglob("*"):
                synced(path)
            part.chmod(0o755)
            part.rename(out)
            synced(out.parent)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return Exported(out, counted.num_sequences, counted.num_tokens, _left_out(states.header, slots))


class _Counted:
    """Iterates once over the sequences, and counts them."""

    def __init__(self, states: States, on_progress: Callable[[int, int], None]) -> None:
        self.states = states
        self.num_sequences = self.num_tokens = 0
        self._on_progress = on_progress

    def __iter__(self) -> Iterator[TrainingSequence]:
        for sequence in self.states.sequences():
            yield sequence
            self.num_sequences += 1
            self.num_tokens += len(sequence.token_ids)
            self._on_progress(self.num_sequences, len(self.states))


def _slots(header: Header, format: str, checkpoint: Checkpoint | None) -> Slots | None:
    if format == "speculators-v2":
        return slots_of(header, "pre", checkpoint)
    if format == "specforge":
        return slots_of(header, "post", checkpoint, num_aux=3)
    if format == "modelopt":
        num_layers = header.contract.architecture.num_layers
        is_post = checkpoint is not None or any((c.tap.layer, c.tap.norm) == (num_layers, "post") for c in header.columns)
        return slots_of(header, "post" if is_post else "pre", checkpoint)
    return None


def _write(counted: _Counted, part: Path, format: str, slots: Slots | None) -> None:
    header = counted.states.header
    if slots is not None:
        write = {"speculators-v2": write_speculators, "specforge": write_specforge, "modelopt": write_modelopt}[format]
        write(counted, part, slots)
    elif format == "numpy":
        write_numpy(counted, part, header, counted.states.num_tokens)
    else:
        {"parquet": write_parquet, "hf-datasets": write_hf_dataset}[format](counted, part, header)


def _described(header: Header, format: str, slots: Slots | None, counted: _Counted) -> dict:
    num_layers = header.contract.architecture.num_layers
    columns = {column.name: column.tap.to_dict() for column in header.columns}
    return {
        "format": format,
        "slots": {"columns": columns} if slots is None else slots.described(num_layers),
        "left_out": list(_left_out(header, slots)),
        "computed_dtype": header.contract.activation_dtype,
        "num_sequences": counted.num_sequences,
        "num_tokens": counted.num_tokens,
        "dataset": fingerprint(identity_of(header)),
        "origin": header.to_dict()["origin"],
        "job": header.job,
    }


def _left_out(header: Header, slots: Slots | None) -> tuple[str, ...]:
    if slots is None:
        return ()
    num_layers = header.contract.architecture.num_layers
    used = {*slots.aux, slots.last}
    return tuple(column.tap.spelling(num_layers) for column in header.columns if column not in used)
