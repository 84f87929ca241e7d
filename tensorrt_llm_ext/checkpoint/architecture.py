"""Architecture: the numbers that describe a model, read from a Hugging Face config or GGUF metadata.

Nothing here reads weights. What this package cannot compute exactly is refused by name, never approximated.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from tensorrt_llm_ext.checkpoint.fields import boolean, integer, names, number, settings
from tensorrt_llm_ext.checkpoint.rope import Rope, rope_from_config
from tensorrt_llm_ext.errors import DamagedCheckpoint, UnsupportedCheckpoint

Family = Literal["llama", "mistral", "qwen2", "qwen3"]

SERVED_QUANTISATION = frozenset({"modelopt FP8", "compressed-tensors float-quantized"})
"""Quantisation schemes, as ``quantisation_of`` names them, whose weights this package reads."""

_ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "LlamaModel": "llama",  # saved without its head
    "MistralModel": "mistral",
    "Qwen2Model": "qwen2",
    "Qwen3Model": "qwen3",
}


@dataclass(frozen=True)
class Architecture:
    """The numbers of one decoder. Sizes are in elements, lengths in tokens."""

    family: Family
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope: Rope
    has_qkv_bias: bool
    has_o_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    is_tied: bool
    sliding_window: int | None
    """The shortest active sliding window of any layer, in tokens; None where every layer sees the whole sequence."""

    def to_dict(self) -> dict:
        """The architecture as JSON types: what the contract and the fingerprint hold."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, value: dict) -> Architecture:
        rope = dict(value["rope"])
        rope["parameters"] = tuple((name, tuple(v) if isinstance(v, list) else v) for name, v in rope["parameters"])
        return cls(**{**value, "rope": Rope(**rope)})


@dataclass(frozen=True)
class _Defaults:
    """What transformers' config class of a family assumes for a field that config.json does not have."""

    num_kv_heads: int | None  # None: as many as heads
    max_positions: int
    head_dim: int | None = None  # None: hidden_size // num_heads


_DEFAULTS: dict[Family, _Defaults] = {
    "llama": _Defaults(num_kv_heads=None, max_positions=2048),
    "mistral": _Defaults(num_kv_heads=8, max_positions=131072),
    "qwen2": _Defaults(num_kv_heads=32, max_positions=32768),
    "qwen3": _Defaults(num_kv_heads=32, max_positions=32768, head_dim=128),
}
_DEFAULT_NORM_EPS = 1e-6
_DEFAULT_SLIDING_WINDOW = 4096  # mistral, qwen2, qwen3
_DEFAULT_MAX_WINDOW_LAYERS = 28  # qwen2, qwen3


def architecture_from_config(config: dict[str, Any]) -> Architecture:
    """Read the architecture from the content of a config.json, with every default as transformers has it.

    Raises UnsupportedCheckpoint for a model that is not served, by the name of what is not, and DamagedCheckpoint for
    a missing or impossible value.
    """
    family = _family(config)
    _refuse_unserved_features(config)
    num_layers = integer(config, "num_hidden_layers")
    hidden_size = integer(config, "hidden_size")
    num_heads = integer(config, "num_attention_heads")
    num_kv_heads, head_dim = _head_sizes(config, family, hidden_size, num_heads)
    max_positions = integer(config, "max_position_embeddings", _DEFAULTS[family].max_positions)
    has_bias = family in ("llama", "qwen3") and boolean(config, "attention_bias", False)
    return Architecture(
        family=family,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=integer(config, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=integer(config, "vocab_size"),
        max_positions=max_positions,
        norm_eps=number(config, "rms_norm_eps", _DEFAULT_NORM_EPS),
        rope=rope_from_config(config, head_dim=head_dim, max_positions=max_positions),
        has_qkv_bias=has_bias or family == "qwen2",
        has_o_bias=has_bias,
        has_mlp_bias=family == "llama" and boolean(config, "mlp_bias", False),
        has_qk_norm=family == "qwen3",
        is_tied=boolean(config, "tie_word_embeddings", False),
        sliding_window=_sliding_window(config, family, num_layers),
    )


def quantisation_of(config: dict[str, Any]) -> str | None:
    """Name the quantisation a config declares, for example ``gptq 4`` or ``modelopt FP8``; None for plain weights."""
    declared = settings(config, "quantization_config") or settings(config, "compression_config")
    if not declared:
        return None
    method = declared.get("quant_method") or ("bitsandbytes" if declared.get("_load_in_4bit") else "unnamed")
    scheme = declared.get("quant_algo") or declared.get("format") or declared.get("bits")
    return f"{method} {scheme}" if scheme else str(method)


def _family(config: dict) -> Family:
    declared, model_type = names(config, "architectures"), config.get("model_type")
    if len(declared) == 1 and declared[0] in _ARCHITECTURES:
        return _ARCHITECTURES[declared[0]]
    if not declared and model_type in list(_DEFAULTS):
        return model_type
    found = ", ".join(declared) or f"no 'architectures', model_type {model_type!r}"
    raise UnsupportedCheckpoint(
        f"the architecture is not served: {found}",
        expected=f"one of {', '.join(_ARCHITECTURES)}",
        found=found,
        fix="use a Llama, Mistral, Qwen2 or Qwen3 checkpoint",
    )


def _refuse_unserved_features(config: dict) -> None:
    scheme = quantisation_of(config)
    if scheme is not None and scheme not in SERVED_QUANTISATION:
        raise UnsupportedCheckpoint(
            f"weights quantised with {scheme} are not served",
            expected=" or ".join(["float32, float16 or bfloat16 weights", *sorted(SERVED_QUANTISATION)]),
            found=f"quantization_config of {scheme}",
            fix="use the checkpoint it was quantised from, or a GGUF file",
        )
    activation = config.get("hidden_act", "silu")
    if activation not in ["silu", "swish"]:  # two names of one function
        raise UnsupportedCheckpoint(
            f"the activation '{activation}' is not served",
            expected="hidden_act 'silu'",
            found=f"hidden_act {activation!r}",
            fix="use a checkpoint with SiLU",
        )
    if not config.get("is_causal", True):  # embedding models made of decoders: transformers then drops the mask
        raise UnsupportedCheckpoint(
            "attention that looks at later tokens is not served",
            expected="a causal decoder",
            found=f"is_causal {config['is_causal']!r}",
            fix="use a causal checkpoint",
        )


def _head_sizes(config: dict, family: Family, hidden_size: int, num_heads: int) -> tuple[int, int]:
    """Read the number of key-value heads and the size of a head."""
    defaults = _DEFAULTS[family]
    kv_default = num_heads if "num_key_value_heads" in config else defaults.num_kv_heads or num_heads  # null: as heads
    num_kv_heads = integer(config, "num_key_value_heads", kv_default)
    if num_heads % num_kv_heads:
        raise DamagedCheckpoint(
            "the query heads cannot be shared out among the key-value heads",
            expected="num_attention_heads to be a multiple of num_key_value_heads",
            found=f"{num_heads} heads, {num_kv_heads} key-value heads",
            fix="restore config.json from where the checkpoint came from",
        )
    head_dim = integer(config, "head_dim", defaults.head_dim or max(hidden_size // num_heads, 1))
    if head_dim % 2:
        raise UnsupportedCheckpoint(
            "a head of odd size cannot be rotated",
            expected="an even head_dim",
            found=f"head_dim {head_dim}",
            fix="use a checkpoint with an even head size",
        )
    return num_kv_heads, head_dim


def _sliding_window(config: dict, family: Family, num_layers: int) -> int | None:
    if family == "llama":
        return None
    window = config.get("sliding_window", _DEFAULT_SLIDING_WINDOW)
    window = None if window is None else integer(config, "sliding_window", _DEFAULT_SLIDING_WINDOW)
    if family == "mistral":
        types = names(config, "layer_types")
        if set(types) - {"full_attention" if window is None else "sliding_attention"}:
            raise _unserved_layers(types)
        return window
    window = window if boolean(config, "use_sliding_window", False) else None
    types = names(config, "layer_types")
    if not types:
        first = integer(config, "max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS, minimum=0)
        return window if first < num_layers else None
    if set(types) - {"full_attention", "sliding_attention"}:
        raise _unserved_layers(types)
    if len(types) != num_layers or ("sliding_attention" in types and window is None):
        raise DamagedCheckpoint(
            "'layer_types' contradicts other fields of the config",
            expected=f"{num_layers} layer types, none sliding without an active sliding_window",
            found=f"{len(types)} layer types, sliding window {window}",
            fix="restore config.json from where the checkpoint came from",
        )
    return window if "sliding_attention" in types else None


def _unserved_layers(types: list[str]) -> UnsupportedCheckpoint:
    return UnsupportedCheckpoint(
        "these kinds of layers are not served",
        expected="full attention, or one sliding window for all layers",
        found=f"layer_types {', '.join(sorted(set(types)))}",
        fix="use a checkpoint whose layers are all of one kind",
    )
