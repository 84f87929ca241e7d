"""GgufCheckpoint: a GGUF file of a Llama, Mistral, Qwen2 or Qwen3 model (llama.cpp calls Mistral ``llama``).

Tensors carry Hugging Face's names. llama.cpp interleaves the rows of q and k in its ``llama`` architecture; they are
put back into halves here. Quantised blocks are de-quantised to float32, exactly as the ``gguf`` package does, a few
rows at a time.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType

from tensorrt_llm_ext.checkpoint.architecture import Architecture, architecture_from_config
from tensorrt_llm_ext.checkpoint.fields import integer
from tensorrt_llm_ext.checkpoint.gguf_file import GgufFile, GgufTensor, read_gguf
from tensorrt_llm_ext.checkpoint.gguf_metadata import config_from_gguf
from tensorrt_llm_ext.checkpoint.gguf_tokenizer import tokenizer_from_gguf
from tensorrt_llm_ext.checkpoint.layout import HEAD, check_layers, check_shape, decoder_shapes, missing_tensor
from tensorrt_llm_ext.checkpoint.protocol import TensorInfo
from tensorrt_llm_ext.checkpoint.tokenizer import Tokenizer
from tensorrt_llm_ext.errors import DamagedCheckpoint, UnsupportedCheckpoint
from tensorrt_llm_ext.fingerprint import file_fingerprint, fingerprint

_PLAIN = {
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}
_PIECE_VALUES = 1 << 17  # values de-quantised at a time: their copies on the way stay in the cache

_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_INTERLEAVED = re.compile(r"\.(q_proj|k_proj)\.(weight|bias)$")


class GgufCheckpoint:
    """A GGUF file, opened. See ``Checkpoint`` for what each method promises."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._file = read_gguf(self.path.resolve())
        self.name = str(self._file.metadata.get("general.name") or self.path.stem)
        self.architecture = architecture_from_gguf(self._file)
        self._stored = _decoder_tensors(self._file, self.architecture)
        self._fingerprint: str | None = None

    def tensors(self) -> Iterator[TensorInfo]:
        return map(self.info, self._stored)

    def info(self, name: str) -> TensorInfo:
        stored = self._found(name)
        dtype = str(_PLAIN.get(stored.type, np.dtype(np.float32)))
        if stored.type not in _PLAIN or self._num_interleaved_heads(name):
            return TensorInfo(name, dtype, stored.shape)
        return TensorInfo(name, dtype, stored.shape, self._file.path, stored.offset, stored.length)

    def tensor(self, name: str) -> np.ndarray:
        stored = self._found(name)
        values = _read(self._file.path, stored)
        num_heads = self._num_interleaved_heads(name)
        if num_heads:  # rows (head, pair, half) -> (head, half, pair)
            pairs = values.reshape(num_heads, -1, 2, *stored.shape[1:])
            values = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(stored.shape)
        return values

    def fp8_scales(self, linear: str) -> None:
        """None: GGUF has no FP8."""

    def tokenizer(self) -> Tokenizer:
        return tokenizer_from_gguf(self._file)

    def fingerprint(self) -> str:
        """Hash the whole file once (the object remembers it), with the architecture; its path does not count."""
        if self._fingerprint is None:
            weights = [file_fingerprint(self._file.path)]
            self._fingerprint = fingerprint({"architecture": self.architecture.to_dict(), "weights": weights})
        return self._fingerprint

    def close(self) -> None:
        """Do nothing: no file stays open between calls."""

    def __enter__(self) -> GgufCheckpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _found(self, name: str) -> GgufTensor:
        if name not in self._stored:
            raise missing_tensor(self.path, name, self._stored)
        return self._stored[name]

    def _num_interleaved_heads(self, name: str) -> int:
        """How many heads' rows llama.cpp interleaved in this tensor; zero for none."""
        interleaved = _INTERLEAVED.search(name) if self.architecture.family == "llama" else None
        if not interleaved:
            return 0
        return self.architecture.num_heads if interleaved[1] == "q_proj" else self.architecture.num_kv_heads


def architecture_from_gguf(file: GgufFile) -> Architecture:
    """Read the architecture from GGUF metadata; biases and the head are known by the tensors that are there."""
    architecture = architecture_from_config(config_from_gguf(file))

    def has(name: str) -> bool:
        return f"blk.0.{name}.bias" in file.tensors

    return dataclasses.replace(
        architecture,
        has_qkv_bias=has("attn_q"),
        has_o_bias=has("attn_output"),
        has_mlp_bias=has("ffn_gate"),
        sliding_window=integer(file.metadata, f"{architecture.family}.attention.sliding_window", 0, minimum=0) or None,
    )


def _decoder_tensors(file: GgufFile, architecture: Architecture) -> dict[str, GgufTensor]:
    """Find every tensor of the decoder, and the head if there is one, by Hugging Face's name; refuse what is wrong."""
    found = {_hf_name(file.path, name): tensor for name, tensor in file.tensors.items() if name not in _NOT_WEIGHTS}
    check_layers(architecture, found, file.path)
    shapes = decoder_shapes(architecture)
    if HEAD in found:
        shapes[HEAD] = (architecture.vocab_size, architecture.hidden_size)
    for name in found.keys() - shapes.keys():
        raise _unaccounted(file.path, name)
    for name, shape in shapes.items():
        if name not in found:
            raise missing_tensor(file.path, name, found)
        check_shape(name, found[name].shape, shape, file.path)
    for type_ in {found[name].type for name in shapes} - _PLAIN.keys():
        _refuse_unknown_blocks(file.path, type_)
    return {name: found[name] for name in shapes}


_NOT_WEIGHTS = {"rope_freqs.weight"}  # read with the metadata


def _hf_name(path: Path, name: str) -> str:
    """Translate llama.cpp's name of a tensor."""
    stem, _, kind = name.rpartition(".")
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if layer and layer[2] in _LAYER_NAMES:
        return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{kind}"
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{kind}"
    raise _unaccounted(path, name)


def _unaccounted(path: Path, name: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(
        f"'{path}' has a tensor that its metadata does not account for: '{name}'",
        expected="the tensors of a Llama, Mistral, Qwen2 or Qwen3 decoder",
        found=f"'{name}'",
        fix="convert the model again with a current llama.cpp",
    )


def _refuse_unknown_blocks(path: Path, type_: GGMLQuantizationType) -> None:
    _, block_bytes = gguf.GGML_QUANT_SIZES[type_]
    try:
        gguf.dequantize(np.zeros((1, block_bytes), dtype=np.uint8), type_)
    except NotImplementedError as error:
        raise UnsupportedCheckpoint(
            f"weights of type {type_.name} are not served",
            expected="F32, F16, BF16 or a type that the installed gguf package de-quantises",
            found=f"{type_.name} in '{path}'",
            fix="install a newer gguf package, or convert the model to another type",
        ) from error


def _read(path: Path, stored: GgufTensor) -> np.ndarray:
    if stored.type in _PLAIN:
        return _bytes(path, stored.offset, stored.length).view(_PLAIN[stored.type]).reshape(stored.shape)
    values = np.empty(stored.shape, dtype=np.float32)
    rows = values.reshape(-1, stored.shape[-1])
    row_bytes = stored.length // len(rows)
    step = max(1, _PIECE_VALUES // stored.shape[-1])
    for first in range(0, len(rows), step):
        piece = rows[first : first + step]
        blocks = _bytes(path, stored.offset + first * row_bytes, len(piece) * row_bytes)
        piece[:] = gguf.dequantize(blocks.reshape(len(piece), row_bytes), stored.type)
    return values


def _bytes(path: Path, offset: int, count: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    read = np.fromfile(path, np.uint8, count, offset=offset)
    if len(read) != count:
        raise DamagedCheckpoint(
            f"'{path}' became shorter while it was open",
            expected=f"{count} bytes at byte {offset}",
            found=f"{len(read)} bytes",
            fix="copy or download the file again",
        )
    return read
