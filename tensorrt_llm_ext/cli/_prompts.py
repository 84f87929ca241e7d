"""The options that say where prompts are and how they become tokens, the same for every verb that reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from tensorrt_llm_ext.inputs import Fields, LossMask

_OPTIONS = (
    click.option(
        "--format",
        type=click.Choice(["jsonl", "text", "parquet", "arrow"]),
        help="What the input is.  [default: by its extension; standard input is jsonl]",
    ),
    click.option("--text-field", metavar="NAME", help="Field that holds the prompt as text.  [default: text]"),
    click.option(
        "--messages-field", metavar="NAME", help="Field that holds chat messages, for the checkpoint's chat template."
    ),
    click.option("--ids-field", metavar="NAME", help="Field that holds token ids."),
    click.option("--id-field", metavar="NAME", help="Field that holds the request id.  [default: the row number, from 0]"),
    click.option("--prefix", help="Text put before every prompt."),
    click.option("--add-generation-prompt", is_flag=True, help="End chat messages where the assistant's turn begins."),
    click.option(
        "--special-tokens",
        type=click.Choice(["tokenizer", "none"]),
        help="Whether the tokenizer adds its special tokens.  [default: tokenizer; none for messages, whose template has them]",
    ),
    click.option(
        "--max-length", type=click.IntRange(min=1), metavar="N", help="Most tokens.  [default: what the engine takes]"
    ),
    click.option(
        "--too-long",
        type=click.Choice(["refuse", "truncate-left", "truncate-right"]),
        default="refuse",
        help="What to do beyond --max-length: refuse the row, or cut tokens at this side (counted, special tokens kept).",
    ),
)
_LOSS_MASK_OPTIONS = (
    click.option(
        "--loss-mask",
        type=click.Choice(["ones", "assistant"]),
        help="For taps @all: which tokens a trainer learns.  [default: assistant for messages, ones otherwise]",
    ),
    click.option("--loss-mask-field", metavar="NAME", help="Field that holds the loss mask, a list of 0 and 1, one a token."),
)


def prompt_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options, in their order."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def loss_mask_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options that say which tokens of training data are learnt."""
    for option in reversed(_LOSS_MASK_OPTIONS):
        function = option(function)
    return function


def loss_mask_source(asked: str | None, fields: Fields, *, has_states: bool) -> LossMask | None:
    """Where the loss mask comes from, of states; None for others. Raises InputError where one has no meaning."""
    from tensorrt_llm_ext.errors import InputError

    if has_states:
        if asked is not None and fields.loss_mask is not None:
            return asked  # the policy refuses both
        return asked or ("field" if fields.loss_mask else "assistant" if fields.messages else "ones")
    if asked or fields.loss_mask:
        raise InputError(
            "a loss mask has no meaning for taps of one row a request",
            expected="taps @all",
            found="taps @last or @mean",
            fix="leave the loss mask out, or choose taps @all",
        )
    return None
