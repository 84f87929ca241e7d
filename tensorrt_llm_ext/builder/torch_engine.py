"""What backend torch runs: the checkpoint's weights, where they lie where that is possible, and an index of them.

There is no graph: the decoder is code. Weights of a Hugging Face folder are linked into the engine and no byte is
rewritten; de-quantised ones (GGUF) are streamed into one safetensors file, one tensor at a time.
"""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from tensorrt_llm_ext.backends.torch.sizes import FORMULA, engine_bytes, is_needed
from tensorrt_llm_ext.backends.torch.tensors import STREAM_DTYPES, engine_tensors
from tensorrt_llm_ext.backends.torch.weight_index import (
    FILE_NAME,
    NUMPY_TYPES,
    SCALE_NAMES,
    StoredWeight,
    WeightIndex,
    weight_hash,
)
from tensorrt_llm_ext.builder.calibration import SCALES_FILE, calibrated, stored_scales
from tensorrt_llm_ext.builder.parts import EngineParts, Progress
from tensorrt_llm_ext.checkpoint.architecture import Architecture
from tensorrt_llm_ext.checkpoint.layout import PRODUCTS, decoder_shapes, product_linears
from tensorrt_llm_ext.checkpoint.protocol import Checkpoint, Fp8Scales, TensorInfo
from tensorrt_llm_ext.graph.quantisation import Fp8Linears, LinearScales
from tensorrt_llm_ext.graph.weights import check_space, link
from tensorrt_llm_ext.recipes import BuildSettings
from tensorrt_llm_ext.recipes.contract import MemoryEstimate

ACCEPTED_RUNTIME = "torch>=2.10,<3"  # 2.11 and 2.13 were run; row-wise FP8 by the vendor's library came with 2.10

WRITTEN_FILE = "weights.safetensors"
LINKED_FILE = "weights-{}.safetensors"  # numbered in the order of use
_SAFETENSORS_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def write_torch_engine(
    checkpoint: Checkpoint,
    folder: Path,
    settings: BuildSettings,
    progress: Progress = lambda step, done, total: None,
    calibration: Path | str | None = None,
) -> EngineParts:
    """Link or write the weights up to the highest tap into the existing, empty ``folder``, with weights.json.

    For precision fp8 the products that stay in bfloat16 are measured on the text ``calibration``, unless the recipe names
    them. Weights that the checkpoint stores in FP8 stay as they are, with its scales, and nothing is measured. Raises what
    ``calibrated`` raises, DiskFull, and OSError for what else a disk refuses.
    """
    highest = max(tap.layer for tap in settings.taps)
    stored = stored_scales(checkpoint, calibration, num_layers=highest) if settings.precision == "fp8" else {}
    measured = calibrated(checkpoint, settings, calibration, progress) if settings.fp8_harm is not None and not stored else None
    kept = _kept(stored, settings, highest) if stored else measured.kept if measured else settings.fp8_kept or ()
    names = [name for name in decoder_shapes(checkpoint.architecture) if is_needed(name, highest)]
    in_fp8 = {f"{linear}.weight": scales.values for linear, scales in stored.items()}
    infos = [in_fp8.get(name) or checkpoint.info(name) for name in names]
    write = _linked if all(info.file is not None for info in infos) else _written
    weights = write(checkpoint, folder, infos, STREAM_DTYPES[settings.precision], partial(progress, "weights"))
    index = WeightIndex(weights | _written_scales(folder, stored), kept, settings.is_deterministic)
    index.write(folder)
    num_bytes: Counter[str] = Counter()
    for weight in index.weights.values():
        num_bytes[weight.dtype] += weight.length
    return EngineParts(
        files=(FILE_NAME, *sorted({weight.file for weight in index.weights.values()})),
        tensors=engine_tensors(checkpoint.architecture, settings.taps, settings.precision),
        weight_dtype="float8_e4m3fn" if settings.precision == "fp8" else num_bytes.most_common(1)[0][0],
        memory=_memory(checkpoint.architecture, settings, index),
        accepted_runtime=ACCEPTED_RUNTIME,
        fp8=_linears(stored, kept, highest) if settings.precision == "fp8" else None,
        build={"calibration": measured.facts(checkpoint)} if measured else _facts(stored, kept),
    )


def _kept(stored: Mapping[str, Fp8Scales], settings: BuildSettings, num_layers: int) -> tuple[str, ...]:
    """The products that are not whole in FP8 in the checkpoint, and those that the recipe names."""
    products = [f"{layer}.{part}" for layer in range(num_layers) for part in PRODUCTS]
    named = settings.fp8_kept or ()
    return tuple(p for p in products if p in named or not stored.keys() >= {*product_linears(p)})


def _linears(stored: Mapping[str, Fp8Scales], kept: tuple[str, ...], num_layers: int) -> Fp8Linears:
    """How the linears of the layers are rounded: by fixed scales of the checkpoint's for the input where it brings any
    (linears that are fused have the largest of theirs), row by row elsewhere."""
    fixed, by_row, in_bfloat16 = {}, set(), set()
    for product in (f"{layer}.{part}" for layer in range(num_layers) for part in PRODUCTS):
        names = product_linears(product)
        scales = [stored[name].activation for name in names if name in stored]
        if product in kept:
            in_bfloat16.update(names)
        elif scales and None not in scales:
            fixed.update({name: LinearScales(max(scales), stored[name].weight) for name in names})
        else:
            by_row.update(names)
    return Fp8Linears(fixed, frozenset(in_bfloat16), frozenset(by_row))


def _facts(stored: Mapping[str, Fp8Scales], kept: tuple[str, ...]) -> dict:
    """What the contract says of scales that came with the checkpoint."""
    num_fixed = sum(scales.activation is not None for scales in stored.values())
    return {"stored_scales": {"linears": len(stored), "fixed_inputs": num_fixed, "kept_products": list(kept)}} if stored else {}


def _memory(architecture: Architecture, settings: BuildSettings, index: WeightIndex) -> MemoryEstimate:
    item_bytes = NUMPY_TYPES[STREAM_DTYPES[settings.precision]].itemsize
    on_card = bool(settings.compute_capabilities)
    needed = engine_bytes(
        architecture,
        settings.limits,
        settings.taps,
        index,
        item_bytes=item_bytes,
        is_fp8=settings.precision == "fp8",
        on_card=on_card,
    )
    return MemoryEstimate(needed if on_card else 0, 0 if on_card else needed, FORMULA)


def _linked(
    checkpoint: Checkpoint, folder: Path, infos: list[TensorInfo], dtype: str, progress: Callable[[int, int], None]
) -> dict[str, StoredWeight]:
    """Link every file that holds one of the weights, or copy it where links are refused; hash each weight."""
    names = {file: LINKED_FILE.format(n) for n, file in enumerate(dict.fromkeys(info.file for info in infos), 1)}
    copies = [file for file, name in names.items() if not link(file, folder / name)]
    check_space(folder, "the weights", sum(file.stat().st_size for file in copies))
    for file in copies:
        shutil.copyfile(file, folder / names[file])
    weights = {}
    for info, values in _read(checkpoint, infos, progress):
        where = (names[info.file], info.dtype, info.shape, info.offset, info.length)
        weights[info.name] = StoredWeight(*where, weight_hash(values))
    return weights


def _written(
    checkpoint: Checkpoint, folder: Path, infos: list[TensorInfo], dtype: str, progress: Callable[[int, int], None]
) -> dict[str, StoredWeight]:
    """Write every weight as ``dtype`` into one safetensors file; hash each."""
    lengths = [math.prod(info.shape) * NUMPY_TYPES[dtype].itemsize for info in infos]
    header, start = _header(infos, lengths, dtype)
    check_space(folder, "the weights", start + sum(lengths))
    weights = {}
    with open(folder / WRITTEN_FILE, "wb") as out:
        out.write(header)
        for info, values in _read(checkpoint, infos, progress):
            converted = np.ascontiguousarray(values, dtype=NUMPY_TYPES[dtype])
            where = (WRITTEN_FILE, dtype, info.shape, out.tell(), converted.nbytes)
            out.write(memoryview(converted.view(np.uint8).reshape(-1)))
            weights[info.name] = StoredWeight(*where, weight_hash(converted))
    return weights


def _written_scales(folder: Path, stored: Mapping[str, Fp8Scales]) -> dict[str, StoredWeight]:
    """Write the scales that came with the checkpoint into one safetensors file; where each lies."""
    values = {}
    for linear, scales in stored.items():
        for name, scale in zip(SCALE_NAMES, (scales.weight, scales.activation), strict=True):
            if scale is not None:
                values[name.format(linear)] = np.array(scale, "<f4").reshape(-1)
    if not values:
        return {}
    infos = [TensorInfo(name, "float32", scale.shape) for name, scale in values.items()]
    header, offset = _header(infos, [scale.nbytes for scale in values.values()], "float32")
    weights = {}
    with open(folder / SCALES_FILE, "wb") as out:
        out.write(header)
        for name, scale in values.items():
            weights[name] = StoredWeight(SCALES_FILE, "float32", scale.shape, offset, scale.nbytes, weight_hash(scale))
            offset += out.write(scale.tobytes())
    return weights


def _header(infos: list[TensorInfo], lengths: list[int], dtype: str) -> tuple[bytes, int]:
    """The header of a safetensors file, padded so that values begin at a multiple of 64 bytes; and where they begin."""
    entries, offset = {}, 0
    for info, length in zip(infos, lengths, strict=True):
        place = [offset, offset + length]
        entries[info.name] = {"dtype": _SAFETENSORS_TYPES[dtype], "shape": list(info.shape), "data_offsets": place}
        offset += length
    text = json.dumps(entries).encode()
    text += b" " * (-(len(text) + 8) % 64)
    return struct.pack("<Q", len(text)) + text, 8 + len(text)


def _read(
    checkpoint: Checkpoint, infos: list[TensorInfo], progress: Callable[[int, int], None]
) -> Iterable[tuple[TensorInfo, np.ndarray]]:
    total = sum(math.prod(info.shape) * NUMPY_TYPES[info.dtype].itemsize for info in infos)
    done = 0
    for info in infos:
        progress(done, total)
        values = checkpoint.tensor(info.name) if info.dtype != "float8_e4m3fn" else _raw(info)
        yield info, values
        done += values.nbytes
    progress(total, total)


def _raw(info: TensorInfo) -> np.ndarray:
    """The values of a weight as they lie in its file."""
    return np.fromfile(info.file, np.uint8, info.length, offset=info.offset).view(NUMPY_TYPES[info.dtype]).reshape(info.shape)
