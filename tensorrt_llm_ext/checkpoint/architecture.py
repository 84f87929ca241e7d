"""Architecture: the numbers that describe a model, read from a Hugging Face config or GGUF metadata.

Nothing here reads weights. What this package cannot compute exactly is refused by name, never approximated.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

Family = Literal["llama", "mistral", "qwen2", "qwen3"]
RopeType = Literal["default", "linear", "llama3", "yarn", "dynamic", "longrope"]


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
