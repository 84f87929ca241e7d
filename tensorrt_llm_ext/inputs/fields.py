"""A row's request id and prompt, read from its fields; each function raises Refusal for what is not there or not right."""

from __future__ import annotations

import reprlib

import numpy as np

from tensorrt_llm_ext.errors import Refusal, nearest_name
from tensorrt_llm_ext.inputs.rows import Fields, Row

_REPR = reprlib.Repr()  # short, and safe for values nested a thousand deep
_REPR.maxstring = _REPR.maxother = 80


def request_id_of_row(row: Row, fields: Fields) -> str:
    """The row's request id: the field's string, an integer as text, or without such a field the row number."""
    if fields.request_id is None:
        return str(row.number)
    value = _value(row, fields.request_id)
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise Refusal(
            "bad_request_id",
            f"the field '{fields.request_id}' is not a request id",
            expected="a string that is not empty, or an integer",
            found=_shown(value),
            fix="give each row an id, or leave --id-field out: the row number is the default",
        )
    return unicode_checked(str(value), fields.request_id)


def text_of_row(row: Row, name: str) -> str:
    """The row's text. An empty text is refused, whatever tokens a prefix or the tokenizer would put around it."""
    value = _value(row, name)
    if not isinstance(value, str):
        raise Refusal(
            "not_text",
            f"the field '{name}' is not text",
            expected="a string",
            found=_shown(value),
            fix="write the text as a string, or name another field with --text-field",
        )
    if value == "":
        raise Refusal(
            "empty_prompt", "the prompt is empty", expected="at least one token", found='""', fix="remove the row or fill it"
        )
    return unicode_checked(value, name)


def messages_of_row(row: Row, name: str) -> list[dict]:
    """The row's chat messages. Content must be text: a template would write anything else as Python prints it."""
    messages = _value(row, name)
    is_list = isinstance(messages, list) and len(messages) > 0
    for place, message in enumerate(messages if is_list else [messages]):
        if not (is_list and _is_message(message)):
            raise Refusal(
                "bad_messages",
                f"the field '{name}' does not hold chat messages",
                expected='a list of at least one {"role": "…", "content": "…"}, both strings',
                found=f"{_shown(message)}{f' as message {place}' if is_list else ''}",
                fix="correct the row, or give the rendered text with --text-field",
            )
    return messages


def token_ids_of_row(row: Row, name: str) -> np.ndarray:
    """The row's token ids, int32 ``[tokens]``; whether the model knows them is checked with the other tokens.

    A reader that has found integers of 32 bits gives them as an array.
    """
    value = _value(row, name)
    if isinstance(value, np.ndarray):
        return value
    if not isinstance(value, list) or not {int}.issuperset(map(type, value)):  # a bool is not a token
        wrong = next((token for token in value if type(token) is not int), None) if isinstance(value, list) else value
        raise Refusal(
            "bad_ids",
            f"the field '{name}' does not hold token ids",
            expected="a list of integers",
            found=_shown(wrong) + (" in the list" if isinstance(value, list) else ""),
            fix="write the ids as whole numbers",
        )
    try:
        return np.array(value, dtype=np.int32)
    except OverflowError as error:
        raise Refusal(
            "outside_vocabulary",
            "a token id is outside every vocabulary",
            expected="0 to the model's vocabulary",
            found=f"{min(value)} to {max(value)}",
            fix="tokenise with this model's tokenizer",
        ) from error


def loss_mask_of_row(row: Row, name: str) -> np.ndarray:
    """The row's loss mask, uint8 ``[tokens]``."""
    value = _value(row, name)
    if not isinstance(value, list) or any(type(token) not in (int, bool) or token not in (0, 1) for token in value):
        raise Refusal(
            "bad_loss_mask",
            f"the field '{name}' does not hold a loss mask",
            expected="a list of 0 and 1",
            found=_shown(value),
            fix="write 1 where the trainer learns and 0 elsewhere",
        )
    return np.array(value, dtype=np.uint8)


def unicode_checked(text: str, name: str) -> str:
    """The text itself, once it is sure that it can be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Refusal(
            "lone_surrogate",
            f"the field '{name}' is not Unicode text",
            expected="no lone surrogate (U+D800 to U+DFFF)",
            found=f"{text[error.start]!r} at character {error.start}",
            fix="decode the source as UTF-16 pairs, or remove the character",
        ) from error
    return text


def _value(row: Row, name: str) -> object:
    if row.fields.get(name) is None:  # a null, in JSON and in tables, says the same as nothing
        raise Refusal(
            "missing_field",
            f"the row has no field '{name}'" if name not in row.fields else f"the field '{name}' is null",
            expected=f"a value in '{name}'",
            found=f"the fields {', '.join(map(repr, row.fields))}"[:500],
            fix="correct the row" if name in row.fields or not row.fields else nearest_name(name, row.fields),
        )
    return row.fields[name]


def _is_message(message: object) -> bool:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    content = message.get("content")
    return isinstance(content, str) or (content is None and isinstance(message.get("tool_calls"), list))


def _shown(value: object) -> str:
    return f"{type(value).__name__} {_REPR.repr(value)}"
