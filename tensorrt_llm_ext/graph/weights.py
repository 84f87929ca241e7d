"""Weights of a graph: external data, left where it lies in the checkpoint's files or streamed into weights.bin.

What can stay in place is linked into the engine's folder and no byte is rewritten: values of the compute type, and
narrower values of a float32 build, which widen exactly by a Cast in the graph. Everything else (de-quantised, narrowed,
computed) is streamed into ``weights.bin``, one tensor at a time.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
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
class _Weight:
    """An initializer that gets its place when the files are written; ``dtype`` is the one it is stored in."""

    initializer: TensorProto
    dtype: str
    num_bytes: int
    read: Callable[[], np.ndarray]
    in_place: TensorInfo | None  # where the values lie as they are


class ExternalWeights:
    """Initializers of one graph whose values lie beside it: collected while the graph is built, then written."""

    def __init__(self, checkpoint: Checkpoint, dtype: str) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._weights: list[_Weight] = []

    def initializer(self, g: Graph, name: str) -> str:
        """Add the checkpoint's tensor ``name`` to the graph; return the value that holds it in the compute type."""
        value = self.stored(g, name)
        return value if self._weights[-1].dtype == self._dtype else g.cast(value, self._dtype)

    def stored(self, g: Graph, name: str) -> str:
        """Add the tensor in the type it is stored in, which the reader casts (an embedding: after the look-up)."""
        info = self._checkpoint.info(name)
        stays = info.file is not None and (info.dtype == self._dtype or self._dtype == "float32")
        dtype = info.dtype if stays else self._dtype
        return self._add(g, name, dtype, info.shape, lambda: self._checkpoint.tensor(name), info if stays else None)

    def quantised(self, g: Graph, name: str, scales: np.ndarray) -> str:
        """Add the tensor ``[out, in]``, divided by the scales ``[out]`` and rounded to float8_e4m3fn; where it is stored so
        already, the scales are its own, and its values stay as they are."""
        stored = self._checkpoint.fp8_scales(name.removesuffix(".weight"))
        if stored is not None:
            return self._add(g, name, FP8, stored.values.shape, lambda: _raw_fp8(stored.values), stored.values)
        read = lambda: rounded_to_fp8(self._checkpoint.tensor(name), scales[:, None])  # noqa: E731
        return self._add(g, name, FP8, self._checkpoint.info(name).shape, read, None)

    def table(self, g: Graph, name: str, array: np.ndarray) -> str:
        """Add an array that was computed here."""
        return self._add(g, name, self._dtype, array.shape, lambda: array, None)

    def num_bytes(self) -> Counter[str]:
        """Bytes of the weights by the type they are stored in."""
        counted: Counter[str] = Counter()
        for weight in self._weights:
            counted[weight.dtype] += weight.num_bytes
        return counted

    def write(self, folder: Path, progress: Callable[[int, int], None]) -> tuple[str, ...]:
        """Link and stream every weight into ``folder``; return the names of the files.

        Raises DiskFull, before it streams, when the space does not suffice; BuildError for a value that the compute type
        cannot hold. ``progress`` hears of bytes done and bytes in all.
        """
        linked = self._worth_linking()
        copies = {file: name for file, name in linked.items() if not link(file, folder / name)}
        streamed = [weight for weight in self._weights if weight.in_place is None or weight.in_place.file not in linked]
        needed = sum(file.stat().st_size for file in copies) + sum(weight.num_bytes + ALIGNMENT for weight in streamed)
        check_space(folder, "the weights", needed)
        for file, name in copies.items():
            shutil.copyfile(file, folder / name)
        for weight in self._weights:
            if weight.in_place is not None and weight.in_place.file in linked:
                _locate(weight.initializer, linked[weight.in_place.file], weight.in_place.offset, weight.in_place.length)
        if not streamed:
            return tuple(linked.values())
        with open(folder / WEIGHTS_FILE, "wb") as out:
            for weight in streamed:
                progress(out.tell(), needed)
                _append(out, weight)
            progress(needed, needed)
        return (*linked.values(), WEIGHTS_FILE)

    def _add(
        self,
        g: Graph,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        read: Callable[[], np.ndarray],
        in_place: TensorInfo | None,
    ) -> str:
        initializer = TensorProto(name=name, data_type=ONNX_TYPES[dtype], dims=shape)
        g.initializers.append(initializer)
        num_bytes = int(np.prod(shape)) * NUMPY_TYPES[dtype].itemsize
        self._weights.append(_Weight(initializer, dtype, num_bytes, read, in_place))
        return name

    def _worth_linking(self) -> dict[Path, str]:
        """The checkpoint's files that hold enough of what stays in place, with their names in the engine's folder."""
        used: Counter[Path] = Counter()  # in the order of first use
        for weight in self._weights:
            if weight.in_place is not None:
                used[weight.in_place.file] += weight.in_place.length
        worth = [file for file in used if used[file] >= MIN_PART_USED * file.stat().st_size]
        return {file: LINKED_FILE.format(number) for number, file in enumerate(worth, 1)}


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
    _locate(weight.initializer, WEIGHTS_FILE, out.tell(), weight.num_bytes)
    values = weight.read().reshape(-1)
    for start in range(0, len(values), _PIECE):
        piece = _converted(weight.initializer.name, values[start : start + _PIECE], weight.dtype)
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
