"""Where the tensors of a GGUF file lie, and its metadata; no weight is read.

The ``gguf`` package has a reader too; it makes an array object of every string and number, which for a vocabulary of
49,000 tokens takes 3.8 s and 160 MB. This one takes a tenth of each. De-quantisation is the package's.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGUF_MAGIC, GGMLQuantizationType, GGUFValueType

from tensorrt_llm_ext.checkpoint.fields import integer
from tensorrt_llm_ext.errors import DamagedCheckpoint, UnsupportedCheckpoint

_VERSIONS = (2, 3)
_SCALARS = {
    GGUFValueType.UINT8: "<u1", GGUFValueType.INT8: "<i1", GGUFValueType.UINT16: "<u2", GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4", GGUFValueType.INT32: "<i4", GGUFValueType.FLOAT32: "<f4", GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8", GGUFValueType.INT64: "<i8", GGUFValueType.FLOAT64: "<f8",
}  # fmt: skip


@dataclass(frozen=True)
class GgufTensor:
    """A tensor as it lies in a file. ``shape`` is ``[out, in]``; ``offset`` counts bytes from the file's start."""

    type: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    length: int


@dataclass(frozen=True)
class GgufFile:
    """The header of a GGUF file. Arrays of numbers in ``metadata`` are NumPy arrays, arrays of strings are lists."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """Read the header of a GGUF file.

    Raises DamagedCheckpoint when it is truncated or not GGUF, UnsupportedCheckpoint for a version, byte order or
    tensor type that is not known.
    """
    path = Path(path)
    with open(path, "rb") as file:
        cursor = _Cursor(file, path)
        magic, version = cursor.scalar("<u4"), cursor.scalar("<u4")
        if magic != GGUF_MAGIC:
            raise cursor.damaged("the letters GGUF at its start", f"{struct.pack('<I', magic)!r}")
        if version not in _VERSIONS:  # a big-endian file shows its version in the upper bytes
            raise UnsupportedCheckpoint(
                f"'{path}' is GGUF of a version that is not served",
                expected=f"version {' or '.join(map(str, _VERSIONS))}, little-endian",
                found=f"version field {version}",
                fix="convert the model again with a current llama.cpp",
            )
        num_tensors, num_fields = cursor.scalar("<u8"), cursor.scalar("<u8")
        metadata = {cursor.string(): cursor.value(cursor.scalar("<u4")) for _ in range(num_fields)}
        entries = [_entry(cursor) for _ in range(num_tensors)]
        alignment = integer(metadata, "general.alignment", GGUF_DEFAULT_ALIGNMENT)
        start = math.ceil(file.tell() / alignment) * alignment
    tensors = {name: _tensor(cursor, name, shape, kind, start + offset) for name, shape, kind, offset in entries}
    return GgufFile(path, metadata, tensors)


def _entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    sizes = [cursor.scalar("<u8") for _ in range(cursor.scalar("<u4"))]  # fastest first: the reverse of NumPy's
    return name, tuple(reversed(sizes)), cursor.scalar("<u4"), cursor.scalar("<u8")


def _tensor(cursor: _Cursor, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
    try:
        type_ = GGMLQuantizationType(kind)
    except ValueError as error:
        raise UnsupportedCheckpoint(
            f"the tensor '{name}' of '{cursor.path}' has a type that is not known",
            expected="a type that the installed gguf package knows",
            found=f"type number {kind}",
            fix="install a newer gguf package, or convert the model to another type",
        ) from error
    block_size, block_bytes = GGML_QUANT_SIZES[type_]
    length = math.prod(shape) // block_size * block_bytes
    if offset + length > cursor.size:
        raise cursor.damaged(f"at least {offset + length} bytes, for the tensor '{name}'", f"{cursor.size} bytes")
    return GgufTensor(type_, shape, offset, length)


class _Cursor:
    """Reads values one after the other, and says so when the file ends before they do."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file = file
        self.path = path
        self.size = path.stat().st_size

    def scalar(self, dtype: str) -> Any:
        return np.frombuffer(self._bytes(np.dtype(dtype).itemsize), dtype)[0].item()

    def string(self) -> str:
        raw = self._bytes(*struct.unpack("<Q", self._bytes(8)))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.damaged("text in UTF-8", f"{raw[:40]!r}") from error

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind == GGUFValueType.ARRAY:
            item, count = self.scalar("<u4"), self.scalar("<u8")
            if item in _SCALARS:
                return np.frombuffer(self._bytes(count * np.dtype(_SCALARS[item]).itemsize), _SCALARS[item])
            return [self.value(item) for _ in range(count)]
        raise self.damaged("a field of a known type", f"type number {kind}")

    def damaged(self, expected: str, found: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(
            f"'{self.path}' is truncated, or is not a GGUF file",
            expected=expected,
            found=found,
            fix="copy or download the file again",
        )

    def _bytes(self, count: int) -> bytes:
        if count > self.size:  # before asking for memory
            raise self.damaged(f"{count} bytes at byte {self._file.tell()}", f"{self.size} bytes in all")
        read = self._file.read(count)
        if len(read) < count:
            raise self.damaged(f"{count} bytes at byte {self._file.tell() - len(read)}", f"{self.size} bytes in all")
        return read
