"""Dumps of hidden states, anyone's: which format lies at a path, what it promises, and its sequences one by one.

Known: our datasets of states; speculators v2 (``hs_{i}.safetensors``) and v1 (``data_{i}.pt`` with a list); vLLM's
``{req_id}.safetensors``; SpecForge's ``data_{i}.ckpt`` and ``.ckpt.gz``; ModelOpt's ``{conversation_id}.pt``; TensorRT-LLM's
``data_{k}.pt`` (lists of requests). Pickles are loaded with ``weights_only=True``, never otherwise.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from tensorrt_llm_ext.errors import ForeignDataset, MissingExtra
from tensorrt_llm_ext.store import STATES_NAME, read_states_header, states_folder
from tensorrt_llm_ext.store.manifest import HEADER_NAME
from tensorrt_llm_ext.store.shard import LOSS_MASK, TOKEN_IDS, open_shard
from tensorrt_llm_ext.store.states_reading import entries_of
from tensorrt_llm_ext.taps import Norm

Place = tuple[int, Norm]
"""A layer (the residual stream after so many) and the side of the final norm."""


@dataclass(frozen=True)
class Dumped:
    """One sequence as a dump holds it. A slot's rows are ``[rows, hidden]``, one a token, or one in all."""

    token_ids: np.ndarray  # int64 [tokens]
    slots: tuple[np.ndarray, ...]  # the auxiliary ones, then the last
    loss_mask: np.ndarray | None = None
    last_norm: Norm | None = None  # where the file itself says it


@dataclass(frozen=True)
class Entry:
    """A sequence that can be loaded. ``key`` is what it is known by: a number of the input's row, or an id."""

    key: str
    place: str  # file, and where in it
    load: Callable[[], Dumped]  # raises ValueError, OSError or KeyError for a file that is not whole


@dataclass(frozen=True)
class Dump:
    """What lies at a path. ``last_norm`` is what the format promises of the last slot; ``places`` is None where the format
    does not say which layers it holds."""

    format: str
    path: Path
    entries: list[Entry]
    last_norm: Norm
    places: tuple[Place, ...] | None = None
    may_be_padded: bool = False
    arrow: Path | None = None  # an Arrow dataset whose rows are the sequences


def open_dump(path: Path) -> Dump:
    """Find out what lies at a path, and list its sequences in the order of their numbers. Raises ForeignDataset."""
    path = Path(path)
    for folder in (path, path / STATES_NAME):
        if (folder / HEADER_NAME).is_file():
            return _ours(folder)
    files = sorted((file for file in path.rglob("*") if file.is_file()), key=_by_number) if path.is_dir() else [path]
    numbered = [file for file in files if re.fullmatch(r"hs_\d+\.safetensors", file.name)]
    if numbered:
        arrow = next((folder for folder in (path, path.parent) if (folder / "dataset_info.json").is_file()), None)
        entries = [Entry(_number(file), file.name, lambda file=file: _safetensors(file)) for file in numbered]
        return Dump("speculators-v2", path, entries, "pre", arrow=arrow)
    single = [file for file in files if file.suffix == ".safetensors"]
    if single:
        entries = [Entry(file.stem, file.name, lambda file=file: _safetensors(file)) for file in single]
        return Dump("vllm", path, entries, "pre")
    ckpt = [file for file in files if re.fullmatch(r"data_\d+\.ckpt(\.gz)?", file.name)]
    if ckpt:
        entries = [Entry(_number(file), file.name, lambda file=file: _specforge(_pickled(file))) for file in ckpt]
        return Dump("specforge", path, entries, "post", may_be_padded=True)
    pickles = [file for file in files if file.suffix == ".pt" and file.name not in ("token_freq.pt", "vocab_mapping.pt")]
    if pickles:
        return _of_pickles(path, pickles)
    raise ForeignDataset(
        f"'{path}' is not a dump of hidden states that is known here",
        expected="states of ours, hs_*.safetensors, *.safetensors, data_*.ckpt, *.pt",
        found=", ".join(file.name for file in files[:5]) or "no files",
        fix="name the folder that holds the files",
    )


def _ours(folder: Path) -> Dump:
    header = read_states_header(folder)
    columns = sorted(header.columns, key=lambda column: (column.tap.layer, column.tap.norm == "post"))

    def load(stored, part) -> Dumped:
        tensors = open_shard(folder / part.shard.name)
        place = slice(stored.first_row, stored.first_row + stored.num_rows)
        slots = tuple(np.asarray(tensors[column.name][place]) for column in columns)
        return Dumped(np.asarray(tensors[TOKEN_IDS][place], np.int64), slots, np.asarray(tensors[LOSS_MASK][place]))

    entries = [
        Entry(stored.request_id, f"{part.shard.name}, row {stored.first_row}", lambda s=stored, p=part: load(s, p))
        for stored, part in entries_of(states_folder(folder), header)
    ]
    places = tuple((column.tap.layer, column.tap.norm) for column in columns)
    return Dump("tensorrt_llm_ext states", folder, entries, places[-1][1], places)


def _of_pickles(path: Path, files: list[Path]) -> Dump:
    """ModelOpt's, TensorRT-LLM's or speculators v1's: the first file that can be read says which."""
    for file in files:
        try:
            first = _pickled(file)
            break
        except UNREADABLE:
            continue
    else:
        raise ForeignDataset(
            f"none of the files of '{path}' can be read",
            expected="files that torch.load(weights_only=True) takes",
            found=f"{len(files)} .pt files",
            fix="copy them again from where they were written",
        )
    if isinstance(first, list):
        return Dump("tensorrt-llm", path, list(_trtllm_entries(files)), "post")
    if isinstance(first.get("hidden_states"), list):
        entries = [Entry(_number(file), file.name, lambda file=file: _speculators_v1(_pickled(file))) for file in files]
        return Dump("speculators-v1", path, entries, "pre")
    entries = [Entry(file.stem, file.name, lambda file=file: _modelopt(_pickled(file))) for file in files]
    return Dump("modelopt", path, entries, "post")


def _trtllm_entries(files: list[Path]) -> Iterator[Entry]:
    for file in files:
        try:
            requests = _pickled(file)
        except UNREADABLE as error:
            yield Entry(file.name, file.name, lambda error=error: _raise(error))
            continue
        for number, request in enumerate(requests):
            place = f"{file.name}[{number}]"
            yield Entry(str(request["id"]), place, lambda file=file, number=number: _trtllm(_last_pickled(file)[number]))


def _safetensors(path: Path) -> Dumped:
    tensors = open_shard(path)
    states = tensors["hidden_states"]  # [tokens, slots, hidden]
    slots = tuple(np.asarray(states[:, slot]) for slot in range(states.shape[1]))
    return Dumped(np.asarray(tensors["token_ids"], np.int64), slots)


def _specforge(data: dict) -> Dumped:
    last = _array(data["hidden_state"])[0]
    aux = _split(_array(data["aux_hidden_state"])[0], last.shape[-1])
    return Dumped(_array(data["input_ids"]).reshape(-1), (*aux, last), _array(data["loss_mask"]).reshape(-1))


def _modelopt(data: dict) -> Dumped:
    last = _array(data["hidden_states"])
    aux = _split(_array(data["aux_hidden_states"]), last.shape[-1])
    mask = _array(data["loss_mask"]) if "loss_mask" in data else None
    norm = "pre" if data.get("hidden_states_prenorm", False) else "post"
    return Dumped(_array(data["input_ids"]), (*aux, last), mask, norm)


def _trtllm(request: dict) -> Dumped:
    last = _array(request["hidden_state"])
    aux = request.get("aux_hidden_states", request.get("hidden_state_features"))
    return Dumped(_array(request["input_ids"]), (*_split(_array(aux), last.shape[-1]), last) if aux is not None else (last,))


def _speculators_v1(data: dict) -> Dumped:
    return Dumped(_array(data["input_ids"]), tuple(map(_array, data["hidden_states"])), _array(data["loss_mask"]))


def _split(rows: np.ndarray, hidden_size: int) -> tuple[np.ndarray, ...]:
    if rows.shape[-1] % hidden_size:
        raise ValueError(f"{rows.shape[-1]} values a row, no multiple of the hidden size {hidden_size}")
    return tuple(np.split(rows, rows.shape[-1] // hidden_size, axis=-1))


def _array(tensor: Any) -> np.ndarray:
    """A tensor as NumPy has it; bfloat16 as float32."""
    return (tensor.float() if tensor.is_floating_point() else tensor).numpy()


def _pickled(path: Path):
    try:
        import torch
    except ImportError as error:
        raise MissingExtra(
            "files of torch need torch, which is not installed",
            expected="the extra 'export' of this package",
            found=error,
            fix="pip install 'tensorrt_llm_ext[export]'",
        ) from error
    with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as file:
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # pickles, zip files and torch fail each in their own way
            raise ValueError(f"torch.load(weights_only=True): {str(error).splitlines()[0]}") from error


_last_pickled = lru_cache(1)(_pickled)  # a file of many requests is read once, and then the next


UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, IndexError)
"""What loading a damaged file raises."""


def _raise(error: Exception):
    raise error


def _number(path: Path) -> str:
    return re.findall(r"\d+", path.name)[-1]


def _by_number(path: Path) -> tuple:
    """Sorts by the numbers in a name, never by their text."""
    return (str(path.parent), *(int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.name)))

