"""Weights of a graph: external data, left where it lies in the checkpoint's files or streamed into weights.bin.

What can stay in place is linked into the engine's folder, and no byte is rewritten: values of the compute type, and
narrower values of a float32 build, which widen exactly by a Cast in the graph. Everything else (de-quantised, or
narrowed) is streamed into ``weights.bin`` one tensor at a time.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from onnx import TensorProto

from tensorrt_llm_ext.errors import BuildError, DiskFull
from tensorrt_llm_ext.graph.names import WEIGHTS_FILE
from tensorrt_llm_ext.graph.operators import NUMPY_TYPES, ONNX_TYPES, Graph

if TYPE_CHECKING:
    from tensorrt_llm_ext.checkpoint.protocol import Checkpoint, TensorInfo

ALIGNMENT = 64  # bytes: a cache line, and what vectorised loads want


@dataclass(frozen=True)
class _Streamed:
    """A tensor that goes to weights.bin: its initializer is filled in when its place is known."""

    initializer: TensorProto
    dtype: str
    num_bytes: int
    read: Callable[[], np.ndarray]


class ExternalWeights:
    """Initializers of one graph whose values lie beside it. Collects while the graph is built; ``write`` does the rest."""

    def __init__(self, checkpoint: Checkpoint, dtype: str) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._linked: dict[str, Path] = {}
        self._streamed: list[_Streamed] = []

    def initializer(self, g: Graph, name: str) -> str:
        """Add the checkpoint's tensor ``name`` to the graph; return the value that holds it in the compute type."""
        value = self.stored(g, name)
        return value if self.stored_dtype(name) == self._dtype else g.cast(value, self._dtype)

    def stored(self, g: Graph, name: str) -> str:
        """Add the tensor in the type it is stored in, which the reader casts (an embedding: after the look-up)."""
        info = self._checkpoint.info(name)
        initializer = self._add(g, name, self.stored_dtype(name), info.shape)
        if _stays(info, self._dtype):
            self._linked[info.file.name] = info.file
            _locate(initializer, info.file.name, info.offset, info.length)
        else:
            self._stream(initializer, self._dtype, lambda: self._checkpoint.tensor(name))
        return name

    def stored_dtype(self, name: str) -> str:
        info = self._checkpoint.info(name)
        return info.dtype if _stays(info, self._dtype) else self._dtype

    def table(self, g: Graph, name: str, array: np.ndarray) -> str:
        """Add an array that was computed here."""
        self._stream(self._add(g, name, self._dtype, array.shape), self._dtype, lambda: array)
        return name

    def write(self, folder: Path) -> tuple[str, ...]:
        """Link and stream every weight into ``folder``; return the names of the files.

        Raises DiskFull before anything is written when the space does not suffice, BuildError for a value that the
        compute type cannot hold.
        """
        copies = [file for name, file in self._linked.items() if not _link(file.resolve(), folder / name)]
        needed = sum(file.stat().st_size for file in copies) + sum(s.num_bytes + ALIGNMENT for s in self._streamed)
        _check_space(folder, needed)
        for file in copies:
            shutil.copyfile(file, folder / file.name)
        if self._streamed:
            with open(folder / WEIGHTS_FILE, "wb") as out:
                for tensor in self._streamed:
                    _append(out, tensor)
        return (*self._linked, *([WEIGHTS_FILE] if self._streamed else []))

    def _add(self, g: Graph, name: str, dtype: str, shape: tuple[int, ...]) -> TensorProto:
        g.initializers.append(TensorProto(name=name, data_type=ONNX_TYPES[dtype], dims=shape))
        return g.initializers[-1]

    def _stream(self, initializer: TensorProto, dtype: str, read: Callable[[], np.ndarray]) -> None:
        num_bytes = int(np.prod(initializer.dims)) * NUMPY_TYPES[dtype].itemsize
        self._streamed.append(_Streamed(initializer, dtype, num_bytes, read))


def _stays(info: TensorInfo, dtype: str) -> bool:
    return info.file is not None and (info.dtype == dtype or dtype == "float32")


def _link(source: Path, target: Path) -> bool:
    """Hard-link, or say that this file system refuses."""
    try:
        os.link(source, target)
    except OSError:
        return False
    return True


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DiskFull(
            f"the weights do not fit on the disk of '{folder}'",
            expected=f"{needed / 1e9:.2f} GB free",
            found=f"{free / 1e9:.2f} GB free",
            fix="free space, or name an --out on another disk",
        )


def _append(out, tensor: _Streamed) -> None:
    out.write(b"\0" * (-out.tell() % ALIGNMENT))
    values = tensor.read()
    narrowed = _narrowed(tensor.initializer.name, values, tensor.dtype)
    _locate(tensor.initializer, WEIGHTS_FILE, out.tell(), narrowed.nbytes)
    out.write(memoryview(narrowed.reshape(-1).view(np.uint8)))


def _narrowed(name: str, values: np.ndarray, dtype: str) -> np.ndarray:
    """Convert, refusing a finite value that becomes infinite."""
    with np.errstate(over="ignore"):
        result = np.ascontiguousarray(values, dtype=NUMPY_TYPES[dtype])
    if result.dtype != values.dtype and dtype == "float16" and not np.isfinite(result).all() and np.isfinite(values).all():
        raise BuildError(
            f"a weight of '{name}' is too large for {dtype}",
            expected=f"values within ±{np.finfo(np.float16).max}",
            found=f"{float(np.abs(values).max()):g}",
            fix="build with float32, or bfloat16 on a card that has it",
        )
    return result


def _locate(initializer: TensorProto, location: str, offset: int, length: int) -> None:
    initializer.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(length))):
        initializer.external_data.add(key=key, value=value)
