"""manifest.json and header.json: what a dataset of states says about itself.

``header.json`` is there from the beginning; ``manifest.json`` comes last, when every row of the input is settled, and holds
the header, the counts, and size and hash of every shard and of its part of the index.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from tensorrt_llm_ext.errors import ForeignDataset
from tensorrt_llm_ext.fingerprint import canonical_json
from tensorrt_llm_ext.store.folder import PART_PREFIX, STATES_NAME, listing, synced
from tensorrt_llm_ext.store.header import Header, header_from_text
from tensorrt_llm_ext.store.index import IndexPart

HEADER_NAME, MANIFEST_NAME = "header.json", "manifest.json"


def states_folder(path: Path) -> Path:
    """The folder of the states of an output folder, or the path itself. Raises ForeignDataset when there are none."""
    path = Path(path)
    for folder in (path / STATES_NAME, path):
        if (folder / HEADER_NAME).is_file():
            return folder
    raise ForeignDataset(
        f"'{path}' holds no dataset of states",
        expected=f"a folder with {STATES_NAME}/{HEADER_NAME}",
        found=listing(path) if path.is_dir() else "no such folder",
        fix="name the folder that `trtllm-extract run --out` wrote with taps @all, or a partition that `store --out` did",
    )


def read_states_header(folder: Path) -> Header:
    """Read header.json. Raises ForeignDataset when it is damaged or something else."""
    return header_from_text((folder / HEADER_NAME).read_bytes(), "states", str(folder))


def manifest_of(header: Header, parts: Sequence[IndexPart]) -> dict:
    """What manifest.json says, from the header and the parts of the index."""
    return {
        **header.to_dict(),
        "num_sequences": sum(part.num_sequences for part in parts),
        "num_rows": sum(part.num_rows for part in parts),
        "num_bytes": sum(part.shard.num_bytes for part in parts),
        "settled_rows": parts[-1].settled_rows if parts else 0,
        "shards": [
            {
                "name": part.shard.name,
                "bytes": part.shard.num_bytes,
                "hash": part.shard.hash,
                "num_sequences": part.num_sequences,
                "num_rows": part.num_rows,
                "index": part.name,
                "index_hash": part.hash,
            }
            for part in parts
        ],
    }


def write_json(path: Path, value: dict) -> None:
    """Write a JSON file beside its place, bring it to the disk and to its name. Raises OSError."""
    hidden = path.with_name(PART_PREFIX + path.name)
    with open(hidden, "w", encoding="ascii") as file:
        file.write(canonical_json(value))
        file.flush()
        os.fsync(file.fileno())
    os.rename(hidden, path)
    synced(path.parent)


def read_manifest(folder: Path) -> dict | None:
    """Read manifest.json; None where the dataset is not finished. Raises ForeignDataset when it is damaged."""
    try:
        return json.loads((folder / MANIFEST_NAME).read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ForeignDataset(
            f"'{folder / MANIFEST_NAME}' is damaged",
            expected="JSON",
            found=error,
            fix="remove it and go on with --resume, which writes it again",
        ) from error
