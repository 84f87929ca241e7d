"""Saying in words what lies at a path: checkpoint, recipe, card, engine, contract, record payload, dataset or none of them.

What a thing is, its content decides, never its name. Headers and metadata are read; weights are not.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.filesize import decimal

from tensorrt_llm_ext.checks import facts
from tensorrt_llm_ext.checks.facts import Description
from tensorrt_llm_ext.errors import InputError
from tensorrt_llm_ext.recipes import Card, Recipe
from tensorrt_llm_ext.recipes.contract import FILE_NAME as CONTRACT
from tensorrt_llm_ext.results.payload import FORMAT as RECORD_FORMAT
from tensorrt_llm_ext.store import STATES_NAME
from tensorrt_llm_ext.store.manifest import HEADER_NAME

_LARGEST_TEXT = 64 << 20  # bytes: what is larger is no contract, recipe or card, and is not read to find out
_NAMES_SHOWN = 5


@dataclass(frozen=True)
class Kind:
    """A kind of thing: what it looks like, how to tell that something is one, how to describe it."""

    looks_like: str
    is_at: Callable[[Path], bool]
    describe: Callable[[Path], Description]


def describe(path: Path) -> Description:
    """Say what lies at ``path``. Raises InputError when nothing does, and what the reader of its kind raises."""
    path = Path(path)
    if not path.exists():
        raise InputError(
            f"there is nothing at '{path}'", expected="a file or a folder", found="no such path", fix="check the path"
        )
    for kind in KINDS:
        if kind.is_at(path):
            return kind.describe(path)
    what = "a folder" if path.is_dir() else "a file"
    found = {"holds": _content(path), "looked_for": [kind.looks_like for kind in KINDS]}
    return Description("unknown", f"{what} that this package does not know", found)


def _is_engine(path: Path) -> bool:
    return (path / CONTRACT).is_file()


def _is_dataset(path: Path) -> bool:
    return any((folder / "_versions").is_dir() for folder in (path, path / "vectors.lance"))


def _is_states(path: Path) -> bool:
    return any((folder / HEADER_NAME).is_file() and (folder / "index").is_dir() for folder in (path, path / STATES_NAME))


def _is_checkpoint_folder(path: Path) -> bool:
    return path.is_dir() and ((path / "config.json").is_file() or any(path.glob("*.gguf")))


def _is_gguf(path: Path) -> bool:
    return path.is_file() and (_start(path, 4) == b"GGUF" or path.suffix == ".gguf")  # damaged ones get their own error


def _is_record(path: Path) -> bool:
    return _is_safetensors(path) and _safetensors_metadata(path).get("format") == RECORD_FORMAT


def _is_safetensors(path: Path) -> bool:
    return path.is_file() and _start(path, 9)[8:] == b"{"


def _is_contract(path: Path) -> bool:
    value = _parsed(path, json.loads)
    return isinstance(value, dict) and {"format_version", "fingerprints", "canaries"} <= value.keys()


def _is_card(path: Path) -> bool:
    return bool(_toml_keys(path) & (_keys(Card) - _keys(Recipe)))


def _is_recipe(path: Path) -> bool:
    return bool(_toml_keys(path) & (_keys(Recipe) - _keys(Card)))


KINDS = (
    Kind("an engine directory: a folder with contract.json", _is_engine, facts.of_engine),
    Kind("a dataset of vectors: a folder that run wrote, or the Lance folder in it", _is_dataset, facts.of_dataset),
    Kind("a dataset of states: a folder that run wrote with taps @all, or the folder states in it", _is_states, facts.of_states),
    Kind("a checkpoint: a folder with config.json, or with a GGUF file", _is_checkpoint_folder, facts.of_checkpoint),
    Kind("a checkpoint: a GGUF file", _is_gguf, facts.of_checkpoint),
    Kind("a record payload: a safetensors file with our header", _is_record, facts.of_record),
    Kind("weights: a safetensors file", _is_safetensors, facts.of_weights),
    Kind("a contract: JSON with format_version and fingerprints", _is_contract, facts.of_contract),
    Kind("a card: TOML with backend and precisions", _is_card, facts.of_card),
    Kind("a recipe: TOML with taps, precision or [model]", _is_recipe, facts.of_recipe),
)


def _keys(cls: type) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


def _toml_keys(path: Path) -> set[str]:
    value = _parsed(path, tomllib.loads)
    return set(value) if isinstance(value, dict) else set()


def _parsed(path: Path, parse: Callable[[str], object]) -> object:
    """The file parsed, or None: trying is how a text's kind is found out."""
    if not path.is_file() or path.stat().st_size > _LARGEST_TEXT:
        return None
    try:
        return parse(path.read_text(encoding="utf-8"))
    except ValueError:  # of JSON, TOML and UTF-8 alike
        return None


def _safetensors_metadata(path: Path) -> dict:
    """The header's free part, unchecked: the reader of its kind says what is wrong with a file."""
    length = int.from_bytes(_start(path, 8), "little")
    try:
        header = json.loads(_start(path, 8 + min(length, _LARGEST_TEXT))[8:])
    except ValueError:
        return {}
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    return metadata if isinstance(metadata, dict) else {}


def _start(path: Path, num_bytes: int) -> bytes:
    with path.open("rb") as file:
        return file.read(num_bytes)


def _content(path: Path) -> str:
    if path.is_dir():
        names = sorted(entry.name for entry in path.iterdir())
        more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
        return ", ".join(names[:_NAMES_SHOWN]) + more or "nothing"
    return f"{decimal(path.stat().st_size)}, beginning with {_start(path, 16)!r}"
