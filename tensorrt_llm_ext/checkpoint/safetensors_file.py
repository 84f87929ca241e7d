"""Where the tensors of a safetensors file lie: the header, checked against the file's size; no weight is read."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

from tensorrt_llm_ext.errors import DamagedCheckpoint

_COPY_AGAIN = "copy or download the file again"
_ITEM_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16,
    "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as it lies in a file. ``dtype`` is safetensors' name; ``offset`` counts bytes from the file's start."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Read the header of a safetensors file. Raises DamagedCheckpoint when it is truncated or contradicts itself."""
    size = path.stat().st_size
    header, start = _header(path, size)
    tensors = {name: _stored(path, name, entry, start) for name, entry in header.items() if name != "__metadata__"}
    end = max((tensor.offset + tensor.length for tensor in tensors.values()), default=start)
    if end != size:
        what = "is truncated" if size < end else "is longer than its header says"
        raise DamagedCheckpoint(f"'{path}' {what}", expected=f"{end} bytes", found=f"{size} bytes", fix=_COPY_AGAIN)
    return tensors


def _header(path: Path, size: int) -> tuple[dict, int]:
    with open(path, "rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else None
        if length is None or length > min(size - 8, _MAX_HEADER_BYTES):
            raise DamagedCheckpoint(
                f"'{path}' is truncated, or is not a safetensors file",
                expected="a header within the file",
                found=f"{size} bytes, of which the header claims {length}",
                fix=_COPY_AGAIN,
            )
        text = file.read(length)
    try:
        header = json.loads(text)
        if not isinstance(header, dict):
            raise ValueError(f"a {type(header).__name__}")
    except ValueError as error:
        raise DamagedCheckpoint(
            f"the header of '{path}' is damaged", expected="a JSON object", found=error, fix=_COPY_AGAIN
        ) from error
    return header, 8 + length


def _stored(path: Path, name: str, entry: dict, start: int) -> StoredTensor:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        num_values = math.prod(shape)
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedCheckpoint(
            f"the header of '{path}' does not describe the tensor '{name}'",
            expected="dtype, shape and data_offsets",
            found=repr(entry),
            fix=_COPY_AGAIN,
        ) from error
    bits = _ITEM_BITS.get(dtype)  # types that are not in the table are refused later, by name
    if bits is not None and (begin < 0 or (end - begin) * 8 != num_values * bits):
        raise DamagedCheckpoint(
            f"the header of '{path}' contradicts itself about the tensor '{name}'",
            expected=f"{num_values * bits // 8} bytes for {dtype} {list(shape)}",
            found=f"{end - begin} bytes at {begin}",
            fix=_COPY_AGAIN,
        )
    return StoredTensor(path, dtype, shape, start + begin, end - begin)
