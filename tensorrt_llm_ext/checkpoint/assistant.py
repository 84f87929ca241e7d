"""What the assistant wrote: the characters of a rendered chat that a trainer learns from.

Two ways to know. The template's own ``{% generation %}`` marks, where it has them, are the answer. The borders of the
messages are the other: an assistant's turn is what follows the generation prompt, up to the end of the turn without the
white space after it (its end-of-turn token is learnt). Where both are there they must agree: each marked stretch lies within
one turn, and every turn is marked.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from tensorrt_llm_ext.checkpoint.chat import ChatTemplate
from tensorrt_llm_ext.errors import InputError

_MARKS = "\ufdd0", "\ufdd1"  # characters that Unicode promises never to use
_GIVE_FIELD = "give the mask in a field of the input, or ask for a mask of all ones"

Spans = list[tuple[int, int]]


def assistant_spans(
    template: ChatTemplate, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool, now: datetime | None
) -> Spans:
    """The stretches of the rendered text that the assistant wrote: first character and one past the last, in order.

    Raises InputError where neither way gives an answer, and where the two disagree.
    """

    def rendered(messages: Sequence[dict[str, Any]], prompt: bool, marks: tuple[str, str] = ("", "")) -> str:
        return template.render(messages, add_generation_prompt=prompt, now=now, marks=marks)

    text = rendered(messages, add_generation_prompt)
    turns = _turns(rendered, messages, text)
    if not template.has_generation_marks:
        if turns is None:
            raise InputError(
                "the chat template does not show where the assistant's turns begin and end",
                expected="{% generation %} marks, or a rendering in which each turn follows the ones before it unchanged",
                found="neither",
                fix=_GIVE_FIELD,
            )
        return turns
    marked = _marked(rendered(messages, add_generation_prompt, _MARKS), text)
    if turns is not None and not _agree(marked, turns):
        raise InputError(
            "the chat template's generation marks are not where the assistant's turns are",
            expected=f"marks within the characters {turns}, at least one each",
            found=f"marks at {marked}",
            fix=_GIVE_FIELD,
        )
    return marked


def _turns(rendered, messages: Sequence[dict[str, Any]], text: str) -> Spans | None:
    """The assistant's turns by the borders of the messages; None where the template's text does not show them."""
    spans = []
    for place, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        try:
            before, prompted = rendered(messages[:place], False), rendered(messages[:place], True)
            turn = rendered(messages[: place + 1], False)
        except InputError:  # the template does not take the messages before alone
            return None
        if prompted == before or not (turn.startswith(prompted) and text.startswith(turn)):
            return None
        spans.append((len(prompted), len(turn.rstrip())))
    return spans


def _marked(marked: str, text: str) -> Spans:
    """Take the marks out of a text and say where they were."""
    spans, start, num_marks = [], None, 0
    for place, character in enumerate(marked):
        if character in _MARKS:
            if character == _MARKS[0]:
                start = place - num_marks
            elif start is not None:
                spans.append((start, place - num_marks))
            num_marks += 1
    bare = marked.replace(_MARKS[0], "").replace(_MARKS[1], "")
    if bare != text or any(mark in text for mark in _MARKS):
        raise InputError(
            "the chat template changes its text around its generation marks",
            expected="the same text with the marks and without",
            found="another text",
            fix=_GIVE_FIELD,
        )
    return [span for span in spans if span[0] < span[1]]


def _agree(marked: Spans, turns: Spans) -> bool:
    def inside(mark: tuple[int, int], turn: tuple[int, int]) -> bool:
        return turn[0] <= mark[0] and mark[0] < turn[1]

    return all(any(inside(mark, turn) for turn in turns) for mark in marked) and all(
        any(inside(mark, turn) for mark in marked) for turn in turns
    )
