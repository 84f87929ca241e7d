"""BuildSettings: what a recipe means for one model and the cards that one engine serves, with every choice made."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from tensorrt_llm_ext.checkpoint.architecture import Architecture
from tensorrt_llm_ext.checkpoint.layout import PRODUCTS
from tensorrt_llm_ext.errors import RecipeError, UnsupportedCheckpoint
from tensorrt_llm_ext.fingerprint import fingerprint
from tensorrt_llm_ext.recipes.card import Card
from tensorrt_llm_ext.recipes.contract import Limits
from tensorrt_llm_ext.recipes.recipe import Precision, Recipe
from tensorrt_llm_ext.taps import Tap, parse_taps

LENGTH_BOUND_ROPES = ("dynamic", "longrope")  # beyond the original maximum they depend on the call's length


@dataclass(frozen=True)
class BuildSettings:
    """Everything that decides an engine besides its checkpoint. ``precision`` is the type it computes in."""

    taps: tuple[Tap, ...]
    precision: Precision
    limits: Limits
    backend: str
    platform: str
    compute_capabilities: tuple[str, ...]  # of the cards, lowest first; none on a CPU
    fp8_harm: float | None = None  # None: not fp8, or the products are given
    fp8_kept: tuple[str, ...] | None = None
    is_deterministic: bool = False

    def fingerprint(self) -> str:
        """Identity of the settings; names and titles of recipe and card do not count."""
        return fingerprint(dataclasses.asdict(self))


def settings_from_recipe(recipe: Recipe, cards: Sequence[Card], architecture: Architecture) -> BuildSettings:
    """Make every choice that the recipe leaves open; one engine serves all ``cards``, in whatever order they are named.

    What cards choose is the smallest of theirs, and the first card's first precision that all of them have. Raises
    RecipeError for a recipe of another model, cards that no one engine serves, a precision that a card lacks, the same
    bytes in any batch where the backend cannot promise them, or limits that contradict each other, TapError for a tap
    that the model lacks, UnsupportedCheckpoint for a length the model cannot be run at exactly.
    """
    recipe.check_model(architecture)
    for field in ("backend", "platform"):
        _check_same(cards, field)
    precision = recipe.precision or _first_shared_precision(cards)
    for card in cards:
        card.check_precision(precision)
    if recipe.is_deterministic:
        _check_deterministic(cards)
    capabilities = {card.compute_capability for card in cards if card.compute_capability}
    return BuildSettings(
        taps=parse_taps(recipe.taps, architecture.num_layers),
        precision=precision,
        limits=_limits(recipe, cards, architecture),
        backend=cards[0].backend,
        platform=cards[0].platform,
        compute_capabilities=tuple(sorted(capabilities, key=lambda text: [int(part) for part in text.split(".")])),
        fp8_harm=float(recipe.fp8_harm) if precision == "fp8" and recipe.fp8_kept is None else None,
        fp8_kept=_kept(recipe, architecture) if precision == "fp8" else None,
        is_deterministic=recipe.is_deterministic,
    )


def _check_same(cards: Sequence[Card], field: str) -> None:
    """Raise RecipeError for cards of several backends or hosts, or for no card: an engine belongs to one."""
    if len({getattr(card, field) for card in cards}) != 1:
        raise RecipeError(
            f"no one engine serves these cards: they do not have one {field}",
            expected=f"one or more cards, all of one {field}",
            found=", ".join(f"{card.name} {getattr(card, field)}" for card in cards) or "no card",
            fix="build once for each, into folders of their own",
        )


def _check_deterministic(cards: Sequence[Card]) -> None:
    """Raise RecipeError for cards of another backend than torch."""
    if cards[0].backend != "torch":
        raise RecipeError(
            f"backend {cards[0].backend} cannot promise the same bytes in any batch",
            expected="a card of backend torch",
            found=", ".join(f"{card.name} {card.backend}" for card in cards),
            fix="leave out --deterministic (is_deterministic in a recipe), or build for such a card, as --card h200",
        )


def _first_shared_precision(cards: Sequence[Card]) -> Precision:
    for precision in cards[0].precisions:
        if all(precision in card.precisions for card in cards):
            return precision
    raise RecipeError(
        "no one engine serves these cards: they share no precision",
        expected="one that all of them have",
        found="; ".join(f"{card.name} {', '.join(card.precisions)}" for card in cards),
        fix="build once for each, into folders of their own",
    )


def _kept(recipe: Recipe, architecture: Architecture) -> tuple[str, ...] | None:
    if recipe.fp8_kept is None:
        return None
    known = {f"{layer}.{part}" for layer in range(architecture.num_layers) for part in PRODUCTS}
    for name in recipe.fp8_kept:
        if name not in known:
            raise RecipeError(
                f"the recipe '{recipe.name}' keeps a product that the model does not have: '{name}'",
                expected=f"a layer of 0 to {architecture.num_layers - 1} and one of {', '.join(PRODUCTS)}, as '0.down'",
                found=repr(name),
                fix="correct fp8_kept",
            )
    return tuple(sorted(set(recipe.fp8_kept)))


def longest_exact(architecture: Architecture) -> tuple[int, str]:
    """The longest sequence that the model computes exactly here, in tokens, and what bounds it."""
    bounds = [(architecture.max_positions, "the model's maximum of positions")]
    if architecture.sliding_window is not None:
        bounds.append((architecture.sliding_window, "the model's sliding window"))
    if architecture.rope.type in LENGTH_BOUND_ROPES:
        bounds.append((architecture.rope.original_max_positions, f"the original maximum of {architecture.rope.type} rope"))
    return min(bounds)


def _limits(recipe: Recipe, cards: Sequence[Card], architecture: Architecture) -> Limits:
    longest, bound = longest_exact(architecture)
    max_seq_len = recipe.max_seq_len or min(longest, *(card.default_seq_len or recipe.longest_default for card in cards))
    if max_seq_len > longest:
        raise UnsupportedCheckpoint(
            "the sequences would be longer than the model can be run at exactly",
            expected=f"max_seq_len of at most {longest} tokens: {bound}",
            found=f"max_seq_len of {max_seq_len} tokens",
            fix=f"build with max_seq_len {longest} or less",
        )
    opt_num_tokens = recipe.opt_num_tokens or min(card.opt_num_tokens for card in cards)
    max_num_tokens = recipe.max_num_tokens or max(opt_num_tokens, max_seq_len)
    max_batch_size = recipe.max_batch_size or min(card.max_batch_size for card in cards)
    padded = max(2 * opt_num_tokens, max_num_tokens)
    if cards[0].backend == "torch":  # it pads nothing: no bound but that of the other limits
        padded = max(max_batch_size * max_seq_len, max_num_tokens)
    limits = Limits(
        max_num_tokens=max_num_tokens,
        max_batch_size=max_batch_size,
        max_seq_len=max_seq_len,
        max_padded_tokens=recipe.max_padded_tokens or padded,
        opt_num_tokens=min(opt_num_tokens, max_num_tokens),
    )
    for name in ("max_num_tokens", "max_padded_tokens"):
        if getattr(limits, name) < max_seq_len:
            raise RecipeError(
                f"{name} is too small for one sequence of max_seq_len",
                expected=f"{name} of at least {max_seq_len} tokens",
                found=f"{name} of {getattr(limits, name)} tokens",
                fix=f"raise {name}, or lower max_seq_len",
            )
    return limits
