"""Rope: the settings of rotary position embedding, read from a config, and the cosine and sine tables they give.

Both spellings of a Hugging Face config are read: ``rope_theta`` beside ``rope_scaling`` (with ``type`` or
``rope_type``), and ``rope_parameters``. What transformers derives from other fields (the original length, attention
factors) is resolved here, so equal models have equal settings whatever the spelling.

The tables repeat transformers' arithmetic, float32 step by float32 step: at position 8000 the last bit of an inverse
frequency is already 5e-4 of an angle.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from tensorrt_llm_ext.checkpoint.fields import boolean, integer, number, positive_number, positive_numbers, settings
from tensorrt_llm_ext.errors import DamagedCheckpoint, UnsupportedCheckpoint, nearest_name

if TYPE_CHECKING:
    from tensorrt_llm_ext.checkpoint.architecture import Architecture

RopeType = Literal["default", "linear", "llama3", "yarn", "dynamic", "longrope"]

_DEFAULT_THETA = 10_000.0
_KNOWN_SETTINGS = {
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings",
    "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "short_factor",
    "long_factor", "low_freq_factor", "high_freq_factor",
    "finetuned",  # a note of YaRN checkpoints; no number depends on it
}  # fmt: skip


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding, in the terms of Hugging Face's ``rope_parameters``.

    ``parameters`` holds the settings of a scaled rope as sorted (name, value) pairs, so that the value is hashable;
    ``original_max_positions`` is the length the unscaled model was trained on.
    """

    type: RopeType
    theta: float
    original_max_positions: int
    parameters: tuple[tuple[str, float | int | bool | tuple[float, ...]], ...] = ()


def rope_from_config(config: dict, *, head_dim: int, max_positions: int) -> Rope:
    """Read the rope settings of a Hugging Face config, in either spelling.

    Raises UnsupportedCheckpoint for a type or setting that is not served, DamagedCheckpoint for a missing or
    impossible value.
    """
    scaling = settings(config, "rope_scaling") or settings(config, "rope_parameters")
    _refuse_unserved_settings(scaling, config)
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    if rope_type not in list(get_args(RopeType)):
        raise UnsupportedCheckpoint(
            f"the rope type '{rope_type}' is not served",
            expected=f"one of {', '.join(get_args(RopeType))}",
            found=f"rope type '{rope_type}'",
            fix="use a checkpoint with one of these rope types",
        )
    theta = positive_number(config | scaling, "rope_theta", _DEFAULT_THETA)
    original = max_positions
    if rope_type in ("llama3", "yarn", "longrope"):  # the others scale from max_position_embeddings
        # Here, unlike rope_theta, the config's own field wins.
        original = integer(scaling | config, "original_max_position_embeddings", max_positions, minimum=2)
    parameters = _parameters(rope_type, scaling, original, max_positions, head_dim)
    return Rope(rope_type, theta, original, tuple(sorted(parameters.items())))


def rope_tables(architecture: Architecture, max_seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Compute the cosines and sines of positions ``0 .. max_seq_len - 1``, float32 ``[max_seq_len, head_dim // 2]``.

    The attention scaling of yarn and longrope is folded in. The formulas are those of transformers'
    ``modeling_rope_utils``. Dynamic NTK and longrope choose their frequencies by the length of the call, and a packed
    batch shares one table: raises UnsupportedCheckpoint when ``max_seq_len`` is beyond the original maximum.
    """
    rope = architecture.rope
    if rope.type in ("dynamic", "longrope") and max_seq_len > rope.original_max_positions:
        raise UnsupportedCheckpoint(
            f"rope type '{rope.type}' depends on the length of the call beyond the original maximum",
            expected=f"max_seq_len of at most {rope.original_max_positions} tokens",
            found=f"max_seq_len of {max_seq_len} tokens",
            fix=f"build with max_seq_len {rope.original_max_positions} or less",
        )
    inverse_frequencies, scaling = _FREQUENCIES[rope.type](architecture)
    positions = np.arange(max_seq_len, dtype=np.float32)
    angles = positions[:, None] * inverse_frequencies[None, :]  # [max_seq_len, head_dim // 2]
    return _scaled(np.cos, angles, scaling), _scaled(np.sin, angles, scaling)


def _scaled(wave: np.ufunc, angles: np.ndarray, scaling: float) -> np.ndarray:
    table = wave(angles, out=np.empty_like(angles), dtype=np.float64, casting="same_kind")  # rounded once, to float32
    table *= np.float32(scaling)
    return table


def _refuse_unserved_settings(scaling: dict, config: dict) -> None:
    """Refuse what would change the numbers: rope per layer type, a partial rotation, a setting we do not know."""
    per_layer = [key for key, value in scaling.items() if isinstance(value, dict)]
    if per_layer:
        raise UnsupportedCheckpoint(
            "rope settings per layer type are not served",
            expected="one rope for all layers",
            found=f"settings for {', '.join(per_layer)}",
            fix="use a checkpoint whose layers share one rope",
        )
    partial = number(config | scaling, "partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise UnsupportedCheckpoint(
            "a rotation of only a part of each head is not served",
            expected="partial_rotary_factor 1",
            found=f"partial_rotary_factor {partial}",
            fix="use a checkpoint that rotates whole heads",
        )
    unknown = sorted(scaling.keys() - _KNOWN_SETTINGS)
    if unknown:
        raise UnsupportedCheckpoint(
            f"the rope setting '{unknown[0]}' is not known",
            expected=nearest_name(unknown[0], _KNOWN_SETTINGS),
            found=f"'{unknown[0]}' = {scaling[unknown[0]]!r}",
            fix="if no number depends on it, remove it from config.json",
        )


def _parameters(rope_type: str, scaling: dict, original: int, max_positions: int, head_dim: int) -> dict:
    """Resolve the settings that a scaled rope needs, as transformers does."""
    if rope_type == "default":
        return {}
    if rope_type in ("linear", "dynamic"):
        return {"factor": positive_number(scaling, "factor")}
    if rope_type == "llama3":
        return _llama3_parameters(scaling)
    factor = positive_number(scaling, "factor", max_positions / original)
    if rope_type == "yarn":
        return {
            "factor": factor,
            "attention_factor": positive_number(scaling, "attention_factor", _yarn_attention_factor(scaling, factor)),
            "beta_fast": number(scaling, "beta_fast", 32.0) or 32.0,  # zero means unset, as in transformers
            "beta_slow": number(scaling, "beta_slow", 1.0) or 1.0,
            "truncate": boolean(scaling, "truncate", True),
        }
    attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return {
        "attention_factor": positive_number(scaling, "attention_factor", attention_factor),
        "short_factor": positive_numbers(scaling, "short_factor", head_dim // 2),
        "long_factor": positive_numbers(scaling, "long_factor", head_dim // 2),
    }


def _llama3_parameters(scaling: dict) -> dict:
    parameters = {name: positive_number(scaling, name) for name in ("factor", "low_freq_factor", "high_freq_factor")}
    if parameters["high_freq_factor"] <= parameters["low_freq_factor"]:
        raise DamagedCheckpoint(
            "the wavelengths of a llama3 rope leave no room to interpolate",
            expected="high_freq_factor above low_freq_factor",
            found=f"{parameters['high_freq_factor']} and {parameters['low_freq_factor']}",
            fix="restore config.json from where the checkpoint came from",
        )
    return parameters


def _yarn_attention_factor(scaling: dict, factor: float) -> float:
    """YaRN, https://arxiv.org/abs/2309.00071, section 3.4, with DeepSeek's two scales where both are given."""

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    weight, weight_all_dim = number(scaling, "mscale", 0.0), number(scaling, "mscale_all_dim", 0.0)
    return scale(weight) / scale(weight_all_dim) if weight and weight_all_dim else scale(1.0)


def _period_powers(theta: float, head_dim: int) -> np.ndarray:
    """``theta ** (2i / head_dim)``, float32 ``[head_dim // 2]``."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return np.power(np.float64(np.float32(theta)), exponents.astype(np.float64)).astype(np.float32)


def _default(architecture: Architecture) -> tuple[np.ndarray, float]:
    """RoFormer, https://arxiv.org/abs/2104.09864; ``LlamaRotaryEmbedding.compute_default_rope_parameters``."""
    return np.float32(1) / _period_powers(architecture.rope.theta, architecture.head_dim), 1.0


def _linear(architecture: Architecture) -> tuple[np.ndarray, float]:
    """Position interpolation, https://arxiv.org/abs/2306.15595; ``_compute_linear_scaling_rope_parameters``."""
    return _default(architecture)[0] / np.float32(dict(architecture.rope.parameters)["factor"]), 1.0


def _dynamic(architecture: Architecture) -> tuple[np.ndarray, float]:
    """NTK-aware scaling at a length within the original maximum; ``_compute_dynamic_ntk_parameters``."""
    factor, dim = dict(architecture.rope.parameters)["factor"], architecture.head_dim
    theta = architecture.rope.theta * (factor * 1.0 - (factor - 1)) ** (dim / (dim - 2))
    return np.float32(1) / _period_powers(theta, dim), 1.0


def _llama3(architecture: Architecture) -> tuple[np.ndarray, float]:
    """Llama 3.1, https://arxiv.org/abs/2407.21783; ``_compute_llama3_parameters``.

    Long wavelengths are divided by ``factor``, short ones kept, those between interpolated.
    """
    parameters = dict(architecture.rope.parameters)
    factor, low, high = (np.float32(parameters[n]) for n in ("factor", "low_freq_factor", "high_freq_factor"))
    original = architecture.rope.original_max_positions
    frequencies, _ = _default(architecture)
    wavelengths = np.float32(2 * math.pi) / frequencies
    longest_kept = np.float32(original / parameters["high_freq_factor"])
    shortest_divided = np.float32(original / parameters["low_freq_factor"])
    scaled = np.where(wavelengths > shortest_divided, frequencies / factor, frequencies)
    smooth = (np.float32(original) / wavelengths - low) / np.float32(
        parameters["high_freq_factor"] - parameters["low_freq_factor"]
    )
    smoothed = (np.float32(1) - smooth) * scaled / factor + smooth * scaled
    between = ~(wavelengths < longest_kept) & ~(wavelengths > shortest_divided)
    return np.where(between, smoothed, scaled), 1.0


def _yarn(architecture: Architecture) -> tuple[np.ndarray, float]:
    """YaRN, https://arxiv.org/abs/2309.00071; ``_compute_yarn_parameters``.

    Dimensions that turn more than ``beta_fast`` times within the original length are kept, those that turn less than
    ``beta_slow`` times are interpolated, with a linear ramp between.
    """
    parameters, dim, theta = dict(architecture.rope.parameters), architecture.head_dim, architecture.rope.theta
    periods = _period_powers(theta, dim)

    def dimension_of(turns: float) -> float:
        return dim * math.log(architecture.rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dimension_of(parameters["beta_fast"]), dimension_of(parameters["beta_slow"])
    if parameters["truncate"]:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first if last != first else 0.001
    ramp = (np.arange(dim // 2, dtype=np.float32) - np.float32(first)) / np.float32(width)
    kept = np.float32(1) - np.clip(ramp, 0, 1)
    extrapolated, interpolated = np.float32(1) / periods, np.float32(1) / (np.float32(parameters["factor"]) * periods)
    return interpolated * (np.float32(1) - kept) + extrapolated * kept, parameters["attention_factor"]


def _longrope(architecture: Architecture) -> tuple[np.ndarray, float]:
    """LongRoPE, https://arxiv.org/abs/2402.13753, within the original maximum; ``_compute_longrope_parameters``."""
    parameters = dict(architecture.rope.parameters)
    short = np.array(parameters["short_factor"], dtype=np.float32)
    periods = _period_powers(architecture.rope.theta, architecture.head_dim)
    return np.float32(1) / (short * periods), parameters["attention_factor"]


_FREQUENCIES = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
