"""The options that say where prompts are and how they become tokens, the same for every verb that reads them."""

from __future__ import annotations

from collections.abc import Callable

import click

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


def prompt_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options, in their order."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function
