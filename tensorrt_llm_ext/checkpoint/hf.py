"""HfCheckpoint: a Hugging Face folder with config.json, safetensors and a tokenizer.

Headers are checked when the folder is opened: every tensor that the decoder needs is there, of its shape, in a type
that is served. Weights are read only on demand, one tensor at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tensorrt_llm_ext.checkpoint.architecture import Architecture, architecture_from_config
from tensorrt_llm_ext.checkpoint.fields import settings
from tensorrt_llm_ext.checkpoint.layout import HEAD, check_layers, check_shape, decoder_shapes, missing_tensor
from tensorrt_llm_ext.checkpoint.protocol import Fp8Scales, TensorInfo
from tensorrt_llm_ext.checkpoint.safetensors_file import StoredTensor, stored_tensors
from tensorrt_llm_ext.checkpoint.tokenizer import Tokenizer
from tensorrt_llm_ext.errors import DamagedCheckpoint, UnsupportedCheckpoint, nearest_name
from tensorrt_llm_ext.fingerprint import file_fingerprint, fingerprint

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
FP8_TYPE = "F8_E4M3"
SCALES = (".weight_scale", ".input_scale")  # of a linear; the same names in ModelOpt's and compressed-tensors' checkpoints
_CACHE_SCALES = (".k_scale", ".v_scale")  # of a key-value cache, which there is none of here
_FP8_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)  # by code: faster than a cast
_PIECE = 1 << 16  # values widened at once: their indices, eight bytes each, stay in the cache
_COPY_AGAIN = "copy or download the file again"


class HfCheckpoint:
    """A Hugging Face folder, opened. See ``Checkpoint`` for what each method promises."""

    def __init__(self, folder: Path) -> None:
        self.path = Path(folder)
        self.name = _model_name(self.path)
        _refuse_adapter(self.path)
        self.architecture = architecture_from_config(read_config(self.path))
        self._files = _weight_files(self.path)
        self._stored, self._scales = _decoder_tensors(self.path, self._files, self.architecture)
        self._fingerprint: str | None = None

    def tensors(self) -> Iterator[TensorInfo]:
        return map(self.info, self._stored)

    def info(self, name: str) -> TensorInfo:
        stored = self._found(name)
        if stored.dtype == FP8_TYPE:
            return TensorInfo(name, "float32", stored.shape)
        return TensorInfo(name, _DTYPES[stored.dtype], stored.shape, stored.file, stored.offset, stored.length)

    def tensor(self, name: str) -> np.ndarray:
        values = _values(name, self._found(name))
        scales = self.fp8_scales(name.removesuffix(".weight"))
        if scales is None:
            return values
        return _widened(values.view(np.uint8), scales.weight)

    def fp8_scales(self, linear: str) -> Fp8Scales | None:
        stored = self._stored.get(f"{linear}.weight")
        if stored is None or stored.dtype != FP8_TYPE:
            return None
        weight, activation = (self._scale(f"{linear}.{kind}_scale") for kind in ("weight", "input"))
        if activation is not None and len(activation) != 1:
            raise _wrong_scale(f"{linear}.input_scale", "one value for the whole tensor", f"{len(activation)} values")
        values = TensorInfo(f"{linear}.weight", "float8_e4m3fn", stored.shape, stored.file, stored.offset, stored.length)
        fixed = None if activation is None else float(activation[0])
        return Fp8Scales(np.broadcast_to(weight, stored.shape[:1]), fixed, values)

    def _scale(self, name: str) -> np.ndarray | None:
        """The values of a scale, float32 ``[values]``; None where the checkpoint has none."""
        if name not in self._scales:
            return None
        values = _values(name, self._scales[name]).astype(np.float32).reshape(-1)
        if not (np.isfinite(values) & (values > 0)).all():
            raise _wrong_scale(name, "positive, finite numbers", f"{values.min():g} to {values.max():g}")
        return values

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.path)

    def fingerprint(self) -> str:
        """Hash every weight file once (the object remembers it), with the architecture; paths do not count."""
        if self._fingerprint is None:
            hashes = sorted(file_fingerprint(file) for file in self._files)
            self._fingerprint = fingerprint({"architecture": self.architecture.to_dict(), "weights": hashes})
        return self._fingerprint

    def close(self) -> None:
        """Do nothing: no file stays open between calls."""

    def __enter__(self) -> HfCheckpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _found(self, name: str) -> StoredTensor:
        if name not in self._stored:
            raise missing_tensor(self.path, name, self._stored)
        return self._stored[name]


def _values(name: str, stored: StoredTensor) -> np.ndarray:
    """Read a tensor in the type it is stored in."""
    dtype = np.dtype({"F32": "<f4", "F16": "<f2", "BF16": "<u2", FP8_TYPE: "u1"}[stored.dtype])
    count = stored.length // dtype.itemsize
    values = np.fromfile(stored.file, dtype, count, offset=stored.offset)  # one copy: file to array
    if len(values) != count:
        raise DamagedCheckpoint(
            f"'{stored.file}' became shorter while it was open",
            expected=f"{count} values of '{name}' at byte {stored.offset}",
            found=f"{len(values)} values",
            fix=_COPY_AGAIN,
        )
    narrow = {"BF16": ml_dtypes.bfloat16, FP8_TYPE: ml_dtypes.float8_e4m3fn}.get(stored.dtype)
    return (values if narrow is None else values.view(narrow)).reshape(stored.shape)


def _widened(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """FP8 codes ``[out, in]`` times the scales ``[out]``, float32."""
    wide = np.empty(codes.shape, np.float32)
    num_rows = max(1, _PIECE // codes.shape[1])
    for start in range(0, len(codes), num_rows):
        piece = slice(start, start + num_rows)
        np.take(_FP8_VALUES, codes[piece], out=wide[piece], mode="clip")  # every code is in range; to say so saves a copy
        wide[piece] *= scales[piece, None]
    return wide


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json, with ModelOpt's separate quantisation file folded in. Raises DamagedCheckpoint."""
    config = _json(folder / CONFIG)
    separate = folder / "hf_quant_config.json"
    if separate.exists() and not config.get("quantization_config"):
        quantisation = {"quant_method": "modelopt", **settings(_json(separate), "quantization")}
        config = {**config, "quantization_config": quantisation}
    return config


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError(f"a {type(value).__name__}")
    except FileNotFoundError as error:
        raise DamagedCheckpoint(
            f"'{path}' is missing", expected=f"the file {path.name}", found="no such file", fix=_COPY_AGAIN
        ) from error
    except ValueError as error:
        raise DamagedCheckpoint(
            f"'{path}' is damaged", expected="a JSON object", found=error, fix=_COPY_AGAIN
        ) from error
    return value


def _model_name(folder: Path) -> str:
    """The folder's name; for a snapshot in the hub's cache (models--owner--name/snapshots/hash), owner/name."""
    parts = folder.resolve().parts
    if len(parts) > 3 and parts[-2] == "snapshots" and parts[-3].startswith("models--"):
        return parts[-3].removeprefix("models--").replace("--", "/", 1)
    return parts[-1]


def _refuse_adapter(folder: Path) -> None:
    if (folder / "adapter_config.json").exists():  # transformers would add it to the weights
        raise UnsupportedCheckpoint(
            f"'{folder}' holds an adapter (LoRA) that is not merged into weights",
            expected="a checkpoint with all its weights",
            found="adapter_config.json",
            fix="merge it (peft: merge_and_unload, then save_pretrained), or remove the adapter's files",
        )


def _weight_files(folder: Path) -> dict[Path, dict[str, StoredTensor]]:
    """Read the header of each weight file: model.safetensors, or the shards that the index names."""
    single, index = folder / SINGLE, folder / INDEX
    if single.exists():
        return {single.resolve(): stored_tensors(single.resolve())}
    if not index.exists():
        others = sorted(
            p.name for p in folder.iterdir() if p.suffix in (".bin", ".safetensors", ".pt", ".pth", ".gguf")
        )
        raise UnsupportedCheckpoint(
            f"'{folder}' has no weights in a form that is served",
            expected=f"{SINGLE}, or shards with {INDEX}",
            found=", ".join(others) or "no weight files",
            fix="convert it to safetensors: load it with transformers, then save_pretrained",
        )
    shard_of = _json(index).get("weight_map")
    if not isinstance(shard_of, dict) or not all(isinstance(shard, str) for shard in shard_of.values()):
        raise DamagedCheckpoint(
            f"'{index}' has no weight_map",
            expected="tensor names and their shards",
            found=repr(shard_of),
            fix=_COPY_AGAIN,
        )
    return _shards(folder, shard_of)


def _shards(folder: Path, shard_of: dict[str, str]) -> dict[Path, dict[str, StoredTensor]]:
    files = {}
    for shard in sorted(set(shard_of.values())):
        path = folder / shard
        if not path.exists():
            raise DamagedCheckpoint(
                f"the shard '{path}' is missing",
                expected=f"every shard that {INDEX} names",
                found="no such file",
                fix="download the missing shard",
            )
        files[path.resolve()] = stored_tensors(path.resolve())
    for name, shard in shard_of.items():
        if name not in files[(folder / shard).resolve()]:
            raise DamagedCheckpoint(
                f"the shard '{folder / shard}' lacks a tensor that the index places there",
                expected=f"the tensor '{name}'",
                found=nearest_name(name, files[(folder / shard).resolve()]),
                fix=f"download {shard} and {INDEX} again, from one revision",
            )
    return files


def _decoder_tensors(
    folder: Path, files: dict[Path, dict[str, StoredTensor]], architecture: Architecture
) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
    """Find every tensor of the decoder, and the head if it is untied, by canonical name, and the scales of those that are
    stored in FP8; refuse what is wrong."""
    found: dict[str, StoredTensor] = {}
    for file, tensors in files.items():
        for name in tensors.keys() & found.keys():
            raise DamagedCheckpoint(
                f"the tensor '{name}' is stored twice",
                expected="each tensor in one shard",
                found=f"in {found[name].file.name} and {file.name}",
                fix="download the checkpoint again, from one revision",
            )
        found |= tensors
    if "embed_tokens.weight" in found:  # saved from the bare model, without its head
        found = {f"model.{name}": tensor for name, tensor in found.items()}
    check_layers(architecture, found, folder)
    shapes = decoder_shapes(architecture)
    in_fp8 = [name for name in shapes if name in found and found[name].dtype == FP8_TYPE and _is_linear(name, shapes[name])]
    scales = _scales_of(folder, in_fp8, found)
    found = {name: stored for name, stored in found.items() if name not in scales and not name.endswith(_CACHE_SCALES)}
    _refuse_unexpected(folder, found, shapes, in_fp8, architecture)
    if HEAD in found and not architecture.is_tied:
        shapes[HEAD] = (architecture.vocab_size, architecture.hidden_size)
    for name, shape in shapes.items():
        if name not in found:
            raise missing_tensor(folder, name, found)
        check_shape(name, found[name].shape, shape, found[name].file)
        if found[name].dtype not in _DTYPES and name not in in_fp8:
            raise _unserved_dtype(name, found[name])
    return {name: found[name] for name in shapes}, scales


def _is_linear(name: str, shape: tuple[int, ...]) -> bool:
    return ".layers." in name and len(shape) == 2


def _scales_of(folder: Path, in_fp8: list[str], found: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Find the scales of weights in FP8. Raises DamagedCheckpoint for a weight that has none, or one of another shape than
    one value, or one a row."""
    scales = {}
    for name in in_fp8:
        linear, rows = name.removesuffix(".weight"), found[name].shape[0]
        if f"{linear}{SCALES[0]}" not in found:
            raise missing_tensor(folder, f"{linear}{SCALES[0]}", found)
        for suffix in SCALES:
            stored = found.get(linear + suffix)
            if stored is None:
                continue
            if stored.shape not in [(), (1,), (rows,), (rows, 1)] or stored.dtype not in _DTYPES:
                raise _wrong_scale(linear + suffix, f"one value, or {rows}: one a row", f"{stored.dtype} {list(stored.shape)}")
            scales[linear + suffix] = stored
    return scales


def _wrong_scale(name: str, expected: str, found: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(
        f"the FP8 scale '{name}' is not one that is served",
        expected=expected,
        found=found,
        fix="quantise with scales of a tensor or of its rows (ModelOpt FP8, compressed-tensors float-quantized)",
    )


def _refuse_unexpected(folder: Path, found: dict, shapes: dict, in_fp8: list[str], architecture: Architecture) -> None:
    """Refuse a tensor inside the decoder that it does not use: leaving it out would change the numbers, silently."""
    inside = [name for name in found if name.startswith("model.") and not name.endswith("rotary_emb.inv_freq")]
    for name in inside:
        if found[name].dtype not in _DTYPES and name not in in_fp8:
            raise _unserved_dtype(name, found[name])
    for name in inside:
        if name not in shapes:
            raise DamagedCheckpoint(
                f"'{folder}' has a tensor that its config does not account for: '{name}'",
                expected=f"the tensors of {architecture.num_layers} {architecture.family} layers",
                found=f"'{name}', {found[name].dtype} {list(found[name].shape)}",
                fix="check that config.json belongs to these weights",
            )


def _unserved_dtype(name: str, stored: StoredTensor) -> UnsupportedCheckpoint:
    return UnsupportedCheckpoint(
        f"weights of type {stored.dtype} are not served",
        expected=f"one of {', '.join(_DTYPES)}",
        found=f"{stored.dtype} in the tensor '{name}' of '{stored.file}'",
        fix="use the checkpoint it was quantised or converted from",
    )
