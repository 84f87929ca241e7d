"""From GGUF metadata to the config.json that the same model has on Hugging Face."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from tensorrt_llm_ext.checkpoint.fields import boolean, integer, number, positive_number
from tensorrt_llm_ext.checkpoint.gguf_file import GgufFile
from tensorrt_llm_ext.errors import UnsupportedCheckpoint

ROPE_FACTORS = "rope_freqs.weight"
"""llama.cpp's form of a llama3 rope: a float32 tensor of what each inverse frequency is divided by."""

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

_SIZES = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
}

# What a decoder of these families may say about itself. Any other field that is set may change the numbers.
_KNOWN_FIELDS = {
    *_SIZES.values(), "vocab_size", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.layer_norm_rms_epsilon", "rope.dimension_count", "rope.freq_base", "rope.scaling.type",
    "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned", "rope.scaling.attn_factor",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "attention.sliding_window", "attention.causal",
    "pooling_type", "tensor_data_layout",
}  # fmt: skip

_DEFAULT_THETA = 10_000.0
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_ORIGINAL = 1.0, 4.0, 8192  # Llama 3.1, 3.2 and 3.3 differ in the factor alone
_ROPE_FACTOR_TOLERANCE = 1e-5  # relative; the tensor is float32, and converters differ in the last bits


def config_from_gguf(file: GgufFile) -> dict[str, Any]:
    """Write the config.json of a GGUF model.

    Raises UnsupportedCheckpoint for what is not served, by name, and DamagedCheckpoint for a missing field.
    """
    metadata = file.metadata
    name = metadata.get("general.architecture")
    _refuse_other_files(file, name)
    fields = {key.removeprefix(f"{name}."): value for key, value in metadata.items() if key.startswith(f"{name}.")}
    _refuse_unknown_fields(file, name, fields)
    sizes = {hf: integer(fields, key) for hf, key in _SIZES.items()}
    head_dim = integer(fields, "attention.key_length", sizes["hidden_size"] // sizes["num_attention_heads"])
    _refuse_uneven_heads(fields, head_dim)
    embedding = file.tensors.get("token_embd.weight")
    return sizes | {
        "architectures": [_ARCHITECTURES[name]],
        "num_key_value_heads": integer(fields, "attention.head_count_kv", sizes["num_attention_heads"]),
        "head_dim": head_dim,
        "vocab_size": embedding.shape[0] if embedding else integer(fields, "vocab_size"),
        "rms_norm_eps": number(fields, "attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "is_causal": boolean(fields, "attention.causal", True),
        "rope_theta": positive_number(fields, "rope.freq_base", _DEFAULT_THETA),
        "rope_scaling": _rope_scaling(file, fields, head_dim),
    }


def _refuse_other_files(file: GgufFile, name: str | None) -> None:
    """Refuse GGUF files that are not a whole model of a family we serve."""
    kind = file.metadata.get("general.type", "model")
    num_parts = file.metadata.get("split.count", 1)
    if name in _ARCHITECTURES and kind == "model" and num_parts <= 1:
        return
    raise UnsupportedCheckpoint(
        f"'{file.path}' is not a GGUF model that is served",
        expected=f"one file with a model of architecture {', '.join(_ARCHITECTURES)}",
        found=f"architecture '{name}', a {kind}" + (f", part of {num_parts} files" if num_parts > 1 else ""),
        fix="merge the parts with llama-gguf-split --merge" if num_parts > 1 else "name a GGUF file of such a model",
    )


def _refuse_unknown_fields(file: GgufFile, name: str, fields: dict) -> None:
    for key, value in fields.items():
        if key not in _KNOWN_FIELDS and (isinstance(value, str | list | np.ndarray) or value):
            raise UnsupportedCheckpoint(
                f"'{file.path}' says something about its model that is not served: '{name}.{key}'",
                expected="a plain Llama, Mistral, Qwen2 or Qwen3 decoder",
                found=f"'{name}.{key}' = {value!r}",
                fix="use the model's Hugging Face checkpoint",
            )


def _refuse_uneven_heads(fields: dict, head_dim: int) -> None:
    for key in ("attention.value_length", "rope.dimension_count"):
        size = integer(fields, key, head_dim)
        if size != head_dim:
            raise UnsupportedCheckpoint(
                "heads whose keys, values and rotation differ in size are not served",
                expected=f"'{key}' of {head_dim}",
                found=size,
                fix="use another checkpoint",
            )


def _rope_scaling(file: GgufFile, fields: dict, head_dim: int) -> dict[str, Any] | None:
    """Translate the rope settings. llama.cpp's yarn multiplies the paper's attention factor by ``attn_factor``."""
    kind = fields.get("rope.scaling.type", "none")
    has_factors = ROPE_FACTORS in file.tensors
    if kind == "none":
        return _llama3(file, fields.get("rope.freq_base", _DEFAULT_THETA), head_dim) if has_factors else None
    factor = fields.get("rope.scaling.factor")
    if kind == "linear" and not has_factors:
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn" or has_factors:
        raise UnsupportedCheckpoint(
            f"the rope type '{kind}' is not served from a GGUF file",
            expected="none, linear or yarn, or a llama3 rope",
            found=f"rope.scaling.type '{kind}'" + (f" and the tensor '{ROPE_FACTORS}'" if has_factors else ""),
            fix="use the model's Hugging Face checkpoint",
        )
    settings = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": fields.get("rope.scaling.original_context_length"),
        "beta_fast": fields.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": fields.get("rope.scaling.yarn_beta_slow"),
    }
    scale = positive_number(fields, "rope.scaling.attn_factor", 1.0)
    if scale != 1.0:
        settings["attention_factor"] = scale * (0.1 * math.log(positive_number(fields, "rope.scaling.factor")) + 1.0)
    return settings


def _llama3(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Recognise the llama3 rope whose factors the file holds. Raises UnsupportedCheckpoint for any other factors."""
    stored = file.tensors[ROPE_FACTORS]
    count = stored.length // 4 if stored.type == GGMLQuantizationType.F32 else 0
    factors = np.fromfile(file.path, "<f4", count, offset=stored.offset).astype(np.float64)
    factor = float(factors.max(initial=1.0))
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((_LLAMA3_ORIGINAL / wavelengths - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=_ROPE_FACTOR_TOLERANCE, atol=0):
        raise UnsupportedCheckpoint(
            f"the tensor '{ROPE_FACTORS}' of '{file.path}' is not a llama3 rope as Meta released it",
            expected=f"{len(expected)} factors for low {_LLAMA3_LOW}, high {_LLAMA3_HIGH}, original {_LLAMA3_ORIGINAL}",
            found=f"{len(factors)} factors from {factors.min(initial=math.inf)} to {factors.max(initial=0)}",
            fix="use the model's Hugging Face checkpoint, whose config.json has the settings",
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_ORIGINAL,
    }
