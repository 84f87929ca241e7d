"""Weights of a graph: external data, left where it lies in the checkpoint's files or streamed into weights.bin.

What can stay in place is linked into the engine's folder and no byte is rewritten: values of the compute type, and
narrower values of a float32 build, which widen exactly by a Cast in the graph. Everything else (de-quantised, narrowed,
computed) is streamed into ``weights.bin``, one tensor at a time.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
from onnx import TensorProto

from tensorrt_llm_ext.errors import BuildError, DiskFull
from tensorrt_llm_ext.graph.fp8 import FP8, rounded_to_fp8
from tensorrt_llm_ext.graph.names import WEIGHTS_FILE
from tensorrt_llm_ext.graph.operators import NUMPY_TYPES, ONNX_TYPES, Graph

if TYPE_CHECKING:
    from tensorrt_llm_ext.checkpoint.protocol import Checkpoint, TensorInfo

LINKED_FILE = "checkpoint-{}.weights"  # numbered in the order of use: the same names wherever the checkpoint lies
MIN_PART_USED = 0.01  # of a file's bytes, for it to be linked: the norms of a quantised GGUF alone are not worth the file
ALIGNMENT = 64  # bytes: a cache line, and what vectorised loads want
_PIECE = 4 << 20  # values converted at once


@dataclass(frozen=True)
class _Values:
    """The values of a tensor and the type they are stored in. ``place`` is where they lie as they are, if they do."""

    dtype: str
    shape: tuple[int, ...]
    reads: tuple[Callable[[], np.ndarray], ...]  # the parts, one behind the other
    place: TensorInfo | None

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape)) * NUMPY_TYPES[self.dtype].itemsize


@dataclass(frozen=True)
class _Weight:
    """An initializer that gets its place when the files are written."""

    initializer: TensorProto
    values: _Values


class ExternalWeights:
    """Initializers of one graph whose values lie beside it: collected while the graph is built, then written."""

    def __init__(self, checkpoint: Checkpoint, dtype: str) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._weights: list[_Weight] = []

    def initializer(self, g: Graph, name: str) -> str:
        """Add the checkpoint's tensor ``name`` to the graph; return the value that holds it in the compute type."""
        value = self.stored(g, name)
        return value if self._weights[-1].values.dtype == self._dtype else g.cast(value, self._dtype)

    def stored(self, g: Graph, name: str) -> str:
        """Add the tensor in the type it is stored in, which the reader casts (an embedding: after the look-up)."""
        return self._add(g, name, self._plain(name))

    def quantised(self, g: Graph, name: str, scales: np.ndarray) -> str:
        """Add the tensor ``[out, in]``, divided by the scales ``[out]`` and rounded to float8_e4m3fn; where it is stored so
        already, the scales are its own, and its values stay as they are."""
        return self._add(g, name, self._rounded(name, scales))

    def quantised_together(self, g: Graph, names: Sequence[str], scales: Sequence[np.ndarray]) -> str | None:
        """Add tensors ``[out, in]`` of one width as one, rounded as ``quantised`` rounds each. None, and nothing is added,
        where they would have to be copied: stored in FP8 already, and not one right behind the other."""
        parts = [self._rounded(*part) for part in zip(names, scales, strict=True)]
        places = [part.place for part in parts]
        if not (_adjoin(places) or not any(places)):
            return None
        shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])
        place = places[0] and replace(places[0], shape=shape, length=sum(one.length for one in places))
        reads = tuple(read for part in parts for read in part.reads)
        return self._add(g, " and ".join(names), _Values(FP8, shape, reads, place))

    def table(self, g: Graph, name: str, array: np.ndarray) -> str:
        """Add an array that was computed here."""
        return self._add(g, name, _Values(self._dtype, array.shape, (lambda: array,), None))

    def num_bytes(self) -> Counter[str]:
        """Bytes of the weights by the type they are stored in."""
        counted: Counter[str] = Counter()
        for weight in self._weights:
            counted[weight.values.dtype] += weight.values.num_bytes
        return counted

    def write(self, folder: Path, progress: Callable[[int, int], None]) -> tuple[str, ...]:
        """Link and stream every weight into ``folder``; return the names of the files.

        Raises DiskFull, before it streams, when the space does not suffice; BuildError for a value that the compute type
        cannot hold. ``progress`` hears of bytes done and bytes in all.
        """
        linked = self._worth_linking()
        copies = {file: name for file, name in linked.items() if not link(file, folder / name)}
        streamed = [w for w in self._weights if w.values.place is None or w.values.place.file not in linked]
        needed = sum(file.stat().st_size for file in copies) + sum(w.values.num_bytes + ALIGNMENT for w in streamed)
        check_space(folder, "the weights", needed)
        for file, name in copies.items():
            shutil.copyfile(file, folder / name)
        for weight in self._weights:
            place = weight.values.place
            if place is not None and place.file in linked:
                _locate(weight.initializer, linked[place.file], place.offset, place.length)
        if not streamed:
            return tuple(linked.values())
        with open(folder / WEIGHTS_FILE, "wb") as out:
            for weight in streamed:
                progress(out.tell(), needed)
                _append(out, weight)
            progress(needed, needed)
        return (*linked.values(), WEIGHTS_FILE)

    def _plain(self, name: str) -> _Values:
        info = self._checkpoint.info(name)
        stays = info.file is not None and (info.dtype == self._dtype or self._dtype == "float32")
        read = partial(self._checkpoint.tensor, name)
        return _Values(info.dtype if stays else self._dtype, info.shape, (read,), info if stays else None)

    def _rounded(self, name: str, scales: np.ndarray) -> _Values:
        stored = self._checkpoint.fp8_scales(name.removesuffix(".weight"))
        if stored is not None:
            return _Values(FP8, stored.values.shape, (partial(_raw_fp8, stored.values),), stored.values)
        read = lambda: rounded_to_fp8(self._checkpoint.tensor(name), scales[:, None])  # noqa: E731
        return _Values(FP8, self._checkpoint.info(name).shape, (read,), None)

    def _add(self, g: Graph, name: str, values: _Values) -> str:
        initializer = TensorProto(name=name, data_type=ONNX_TYPES[values.dtype], dims=values.shape)
        g.initializers.append(initializer)
        self._weights.append(_Weight(initializer, values))
        return name

    def _worth_linking(self) -> dict[Path, str]:
        """The checkpoint's files that hold enough of what stays in place, with their names in the engine's folder."""
        used: Counter[Path] = Counter()  # in the order of first use
        for place in (weight.values.place for weight in self._weights):
            if place is not None:
                used[place.file] += place.length
        worth = [file for file in used if used[file] >= MIN_PART_USED * file.stat().st_size]
        return {file: LINKED_FILE.format(number) for number, file in enumerate(worth, 1)}


def _adjoin(places: Sequence[TensorInfo | None]) -> bool:
    """Whether each lies in the same file right behind the one before."""
    if not all(places):
        return False
    return all(b.file == a.file and b.offset == a.offset + a.length for a, b in pairwise(places))


def _raw_fp8(info: TensorInfo) -> np.ndarray:
    return np.fromfile(info.file, NUMPY_TYPES[FP8], info.length, offset=info.offset)


def link(source: Path, target: Path) -> bool:
    """Hard-link the file itself (ONNX Runtime refuses a symlink that leaves the folder), or say that it is refused."""
    try:
        os.link(source.resolve(), target)
    except OSError:
        return False
    return True


def check_space(folder: Path, what: str, needed: int) -> None:
    """Raise DiskFull when ``what`` takes ``needed`` bytes and fewer are free where ``folder`` lies."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DiskFull(
            f"no space for {what} on the disk of '{folder}'",
            expected=f"{needed / 1e9:.2f} GB free",
            found=f"{free / 1e9:.2f} GB free",
            fix="free space, or name an --out on another disk",
        )


def _append(out: BinaryIO, weight: _Weight) -> None:
    """Write one tensor, a piece at a time: narrowed, it is never in memory twice."""
    out.write(b"\0" * (-out.tell() % ALIGNMENT))
    _locate(weight.initializer, WEIGHTS_FILE, out.tell(), weight.values.num_bytes)
    for read in weight.values.reads:
        values = read().reshape(-1)
        for start in range(0, len(values), _PIECE):
            piece = _converted(weight.initializer.name, values[start : start + _PIECE], weight.values.dtype)
            out.write(memoryview(piece.view(np.uint8)))


def _converted(name: str, values: np.ndarray, dtype: str) -> np.ndarray:
    """Convert, refusing a finite value that becomes infinite."""
    with np.errstate(over="ignore"):
        result = np.ascontiguousarray(values, dtype=NUMPY_TYPES[dtype])
    if dtype == "float16" and values.dtype != result.dtype and (np.isinf(result) & np.isfinite(values)).any():
        raise BuildError(
            f"a weight of '{name}' is too large for {dtype}",
            expected=f"values within ±{np.finfo(np.float16).max}",
            found=f"{np.abs(values.astype(np.float32)).max():g}",
            fix="build with float32, or with bfloat16 on a card that has it",
        )
    return result


def _locate(initializer: TensorProto, location: str, offset: int, length: int) -> None:
    initializer.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(length))):
        initializer.external_data.add(key=key, value=value)
