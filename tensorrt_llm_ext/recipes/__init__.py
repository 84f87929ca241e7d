"""Recipes and cards say what to build; a contract says what was built."""

from tensorrt_llm_ext.recipes.card import Card, load_card
from tensorrt_llm_ext.recipes.contract import Contract, Limits, TensorSpec, read_contract
from tensorrt_llm_ext.recipes.publish import published, write_contract
from tensorrt_llm_ext.recipes.recipe import ModelMatch, Recipe, load_recipe
from tensorrt_llm_ext.recipes.settings import BuildSettings, settings_from_recipe

__all__ = [
    "BuildSettings",
    "Card",
    "Contract",
    "Limits",
    "ModelMatch",
    "Recipe",
    "TensorSpec",
    "load_card",
    "load_recipe",
    "published",
    "read_contract",
    "settings_from_recipe",
    "write_contract",
]
