"""WeightIndex: where each weight of a torch engine lies, and by what it is known to be the one that was built. Free of torch.

The file weights.json of the engine directory. Weights stay in the safetensors files of the checkpoint, which are linked
into the directory; a checkpoint that is changed in place changes them, and its hashes tell.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import xxhash

from tensorrt_llm_ext.errors import EngineError

FILE_NAME = "weights.json"
NUMPY_TYPES = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
}
SCALE_NAMES = "{}.weight_scale", "{}.input_scale"
"""Of a linear whose weight was stored in FP8: float32 ``[out]`` and, where its input has a fixed scale, ``[1]``."""
_COPY_AGAIN = "copy the engine directory again, or build it again"


@dataclass(frozen=True)
class StoredWeight:
    """A weight as it lies in a file of the engine directory. ``xxh3`` is xxh3-128 of its bytes, in hex."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int
    xxh3: str


@dataclass(frozen=True)
class WeightIndex:
    """Every weight by its canonical name, and how the engine computes.

    ``kept`` names the products that stay in bfloat16 in an FP8 engine (``3.down``: layer 3, counted from 0; parts qkv, o,
    gate_up, down). ``is_deterministic``: the same sequence gives the same bytes in any batch. Weights that were stored in FP8
    have scales among the weights: see SCALE_NAMES.
    """

    weights: dict[str, StoredWeight]
    kept: tuple[str, ...] = ()
    is_deterministic: bool = False

    def write(self, folder: Path) -> None:
        (folder / FILE_NAME).write_text(json.dumps(asdict(self), indent=1))


def read_weight_index(folder: Path) -> WeightIndex:
    """Read weights.json. Raises EngineError when it is missing or damaged."""
    path = folder / FILE_NAME
    try:
        value = json.loads(path.read_text())
        weights = {name: StoredWeight(**{**w, "shape": tuple(w["shape"])}) for name, w in value["weights"].items()}
        return WeightIndex(weights, tuple(value["kept"]), bool(value["is_deterministic"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EngineError(
            f"'{path}' is missing or damaged",
            expected="the places of the engine's weights",
            found=f"{type(error).__name__}: {error}",
            fix=_COPY_AGAIN,
        ) from error


def read_weight(folder: Path, name: str, weight: StoredWeight) -> np.ndarray:
    """Read one weight and check that its bytes are those that were built. Raises EngineError naming it."""
    try:
        raw = np.fromfile(folder / weight.file, np.uint8, weight.length, offset=weight.offset)
    except OSError as error:
        raise _changed(folder, name, weight, error) from error
    if len(raw) != weight.length or (found := weight_hash(raw)) != weight.xxh3:
        found = f"{len(raw)} bytes" if len(raw) != weight.length else f"xxh3-128 {found}"
        raise _changed(folder, name, weight, found)
    return raw.view(NUMPY_TYPES[weight.dtype]).reshape(weight.shape)


def weight_hash(values: np.ndarray) -> str:
    return xxhash.xxh3_128_hexdigest(memoryview(np.ascontiguousarray(values).view(np.uint8).reshape(-1)))


def _changed(folder: Path, name: str, weight: StoredWeight, found: object) -> EngineError:
    return EngineError(
        f"the weight '{name}' in '{folder / weight.file}' is not the one that the engine was built with",
        expected=f"{weight.length} bytes at {weight.offset}, xxh3-128 {weight.xxh3}",
        found=found,
        fix="the checkpoint was changed after the build: restore it, or build the engine again",
    )
