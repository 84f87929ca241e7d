"""Recipe: the data that says how to build an engine for one model. Every default is written here, and only here."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tensorrt_llm_ext.checkpoint.architecture import Architecture, Family
from tensorrt_llm_ext.errors import RecipeError
from tensorrt_llm_ext.recipes import toml_file
from tensorrt_llm_ext.recipes.toml_file import within
from tensorrt_llm_ext.taps import DEFAULT_TAPS

Precision = Literal["float32", "float16", "bfloat16", "fp8"]


@dataclass(frozen=True)
class ModelMatch:
    """What a checkpoint must be for the recipe to fit. Fields are the architecture's; an absent one may be anything."""

    family: Family | None = None
    num_layers: int | None = within(1, default=None)
    hidden_size: int | None = within(1, default=None)
    intermediate_size: int | None = within(1, default=None)
    num_heads: int | None = within(1, default=None)
    num_kv_heads: int | None = within(1, default=None)
    head_dim: int | None = within(1, default=None)
    vocab_size: int | None = within(1, default=None)


@dataclass(frozen=True)
class Recipe:
    """How to build an engine. Lengths and counts are in tokens; None leaves the choice to the card or the model."""

    name: str = "default"
    model: ModelMatch = ModelMatch()
    taps: str = DEFAULT_TAPS
    precision: Precision | None = None
    """None: the first that the card names."""
    max_seq_len: int | None = within(1, default=None)
    """None: what the model was trained for, and at most ``longest_default``."""
    longest_default: int = within(1, default=8192)
    """Attention's scores take heads x length^2 values; a longer default would promise memory that few machines have."""
    opt_num_tokens: int | None = within(1, default=None)
    """Tokens of the batches that run fastest. None: the card's."""
    max_num_tokens: int | None = within(1, default=None)
    """None: the larger of ``opt_num_tokens`` and ``max_seq_len``, so that the longest prompt fits alone."""
    max_batch_size: int | None = within(1, default=None)
    """None: the card's."""
    max_padded_tokens: int | None = within(1, default=None)
    """None: twice ``opt_num_tokens``, and at least ``max_num_tokens``."""
    fp8_harm: float = within(0, 2, default=1e-3)
    """How far FP8 may move the states of the highest tap, as the mean of 1 - cosine that calibration measures: the
    products that harm most for their size stay in bfloat16 until the others are within it."""
    fp8_kept: tuple[str, ...] | None = None
    """Products that stay in bfloat16 in an fp8 engine, as ``11.down``: the layer from 0, then qkv, o, gate_up
    or down. None: what calibration measures by ``fp8_harm``. Given, nothing is measured."""
    is_deterministic: bool = False
    """Backend torch alone: the same sequence gives the same bytes in any batch. An H200 does so anyway in FP8 and bfloat16, whose
    products one algorithm computes. Full batches pay next to nothing there (README's card table, the rows ``deterministic``);
    small ones are computed in more rows."""

    def __post_init__(self) -> None:
        toml_file.check_ranges(self)

    def check_model(self, architecture: Architecture) -> None:
        """Raise RecipeError when the recipe is for another model."""
        wanted = {name: value for name, value in dataclasses.asdict(self.model).items() if value is not None}
        found = {name: getattr(architecture, name) for name in wanted}
        if wanted != found:
            other = [name for name in wanted if wanted[name] != found[name]]
            raise RecipeError(
                f"the recipe '{self.name}' is for another model than this checkpoint",
                expected=", ".join(f"{name} {wanted[name]}" for name in other),
                found=", ".join(f"{name} {found[name]}" for name in other),
                fix="name the recipe of this model, or build without one",
            )


def load_recipe(name_or_path: str | Path) -> Recipe:
    """Read a recipe by its name in ``build_recipes/`` or by the path of a TOML file."""
    return toml_file.read(toml_file.find(name_or_path, toml_file.DATA, "recipe"), Recipe)
