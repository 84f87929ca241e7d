"""TokenPolicy: how a prompt becomes token ids, fixed before the first row and stored with the results."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from tensorrt_llm_ext.checkpoint.tokenizer import Tokenizer
from tensorrt_llm_ext.errors import InputError
from tensorrt_llm_ext.inputs.rows import Fields
from tensorrt_llm_ext.recipes.contract import Limits
from tensorrt_llm_ext.results.record import Tokenisation

SpecialTokens = Literal["tokenizer", "none", "given"]
TooLong = Literal["refuse", "truncate-left", "truncate-right"]
LossMask = Literal["ones", "assistant", "field"]


@dataclass(frozen=True)
class TokenPolicy:
    """Everything but the row and the tokenizer that decides a row's token ids. ``token_policy`` makes it."""

    prompt: Literal["text", "messages", "ids"]
    special_tokens: SpecialTokens  # "given" for token ids that came ready-made
    prefix: str | None
    add_generation_prompt: bool
    template_hash: str | None  # of the chat template, where messages are rendered
    template_date: str | None  # what a template that writes today's date writes, on every day the run goes on
    max_length: int  # tokens
    too_long: TooLong
    loss_mask: LossMask | None = None  # where it comes from; None where none is made

    def tokenisation(self) -> Tokenisation:
        """What a session writes into the origin of its records."""
        return Tokenisation(self.special_tokens, self.template_hash, self.prefix)

    def to_dict(self) -> dict:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, value: dict) -> TokenPolicy:
        return cls(**value)


def token_policy(
    fields: Fields,
    tokenizer: Tokenizer,
    limits: Limits,
    *,
    special_tokens: Literal["tokenizer", "none"] | None = None,
    prefix: str | None = None,
    add_generation_prompt: bool = False,
    max_length: int | None = None,
    too_long: TooLong = "refuse",
    loss_mask: LossMask | None = None,
) -> TokenPolicy:
    """Settle the policy for these fields and this engine.

    Special tokens: by default the tokenizer adds its own to text, and none to messages, whose template writes them.
    ``max_length`` is by default the longest sequence the engine takes. Raises InputError for what cannot be.
    """
    prompt = "text" if fields.text else "messages" if fields.messages else "ids"
    _check_options(prompt, tokenizer, special_tokens, prefix, add_generation_prompt)
    _check_loss_mask(loss_mask, prompt, special_tokens, fields)
    is_chat = prompt == "messages"
    return TokenPolicy(
        prompt=prompt,
        special_tokens="given" if prompt == "ids" else special_tokens or ("none" if is_chat else "tokenizer"),
        prefix=prefix or None,
        add_generation_prompt=add_generation_prompt,
        template_hash=tokenizer.template_hash() if is_chat else None,
        template_date=datetime.now().date().isoformat() if is_chat else None,
        max_length=_max_length(max_length, limits),
        too_long=too_long,
        loss_mask=loss_mask,
    )


def _check_options(
    prompt: str, tokenizer: Tokenizer, special_tokens: str | None, prefix: str | None, add_generation_prompt: bool
) -> None:
    is_text, is_chat = prompt == "text", prompt == "messages"
    rules = (
        (not prefix or is_text, "--prefix", "text", "put it into the messages or the ids"),
        (not add_generation_prompt or is_chat, "--add-generation-prompt", "messages", "leave it out"),
        (special_tokens is None or prompt != "ids", "--special-tokens", "text or messages", "put them into the ids"),
    )
    for is_kept, option, wanted, fix in rules:
        if not is_kept:
            raise InputError(f"{option} has no meaning here", expected=f"a prompt of {wanted}", found=prompt, fix=fix)
    if is_chat and not tokenizer.has_chat_template:
        raise InputError(
            "this checkpoint has no chat template",
            expected="a chat template, which --messages-field needs",
            found="none beside the tokenizer",
            fix="give the prompts as text, or build the engine from a checkpoint that has one",
        )
    try:
        (prefix or "").encode()
    except UnicodeEncodeError as error:
        raise InputError("the prefix is not Unicode text", expected="UTF-8", found=error, fix="correct --prefix") from error


def _check_loss_mask(loss_mask: str | None, prompt: str, special_tokens: str | None, fields: Fields) -> None:
    if loss_mask == "assistant" and (prompt != "messages" or special_tokens == "tokenizer"):
        raise InputError(
            "a loss mask of the assistant's turns needs chat messages, rendered by their template alone",
            expected="--messages-field, and no special tokens of the tokenizer around it",
            found=f"a prompt of {prompt}, special tokens: {special_tokens or 'by default'}",
            fix="give the mask in a field (--loss-mask-field), or leave it all ones",
        )
    if (loss_mask == "field") != (fields.loss_mask is not None):
        raise InputError(
            "the loss mask's field and its source do not belong together",
            expected="a field's name with the source 'field', and only with it",
            found=f"source {loss_mask}, field {fields.loss_mask}",
            fix="name the field with --loss-mask-field, and leave --loss-mask out",
        )


def _max_length(asked: int | None, limits: Limits) -> int:
    longest = min(limits.max_seq_len, limits.max_num_tokens, limits.max_padded_tokens)
    if asked is not None and not 1 <= asked <= longest:
        raise InputError(
            "--max-length is beyond what the engine takes",
            expected=f"1 to {longest} tokens",
            found=f"{asked} tokens",
            fix=f"say at most {longest}, or build an engine with a larger max_seq_len",
        )
    return asked if asked is not None else longest
