"""Card: one kind of machine that engines are built for, a GPU or any CPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tensorrt_llm_ext.errors import RecipeError
from tensorrt_llm_ext.recipes import toml_file
from tensorrt_llm_ext.recipes.recipe import Precision
from tensorrt_llm_ext.recipes.toml_file import within


@dataclass(frozen=True)
class Card:
    """What a card can do, and the batches it runs fastest (in tokens)."""

    name: str
    title: str
    backend: Literal["ort", "trt", "torch"]
    precisions: tuple[Precision, ...]  # the first is the default
    opt_num_tokens: int = within(1)
    max_batch_size: int = within(1)
    platform: str = "any"  # the host's: "any", or for example "linux-x86_64"
    compute_capability: str | None = None  # for example "12.0"; None on a CPU
    memory_gb: int | None = within(1, default=None)  # as the vendor states it
    default_seq_len: int | None = within(1, default=None)
    """Tokens of the longest sequence, where neither the recipe nor the caller says. None: the recipe's own default."""

    def check_precision(self, precision: Precision) -> None:
        """Raise RecipeError when the card cannot compute in ``precision``."""
        if precision not in self.precisions:
            raise RecipeError(
                f"the card '{self.name}' ({self.title}) cannot build {precision} engines",
                expected=f"one of {', '.join(self.precisions)}",
                found=precision,
                fix="choose one of these precisions, or another card",
            )


def load_card(name_or_path: str | Path) -> Card:
    """Read a card by its name in ``build_recipes/cards/`` or by the path of a TOML file."""
    return toml_file.read(toml_file.find(name_or_path, toml_file.DATA / "cards", "card"), Card)
