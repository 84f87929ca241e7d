"""ChatTemplate: from chat messages to text, exactly as transformers' ``apply_chat_template`` renders them.

Templates are code from whoever made the checkpoint, so they run in jinja2's immutable sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from tensorrt_llm_ext.errors import DamagedCheckpoint, InputError, UnsupportedCheckpoint

_MARK_START, _MARK_END = "_generation_start", "_generation_end"
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")  # what a message may call its reasoning


class ChatTemplate:
    """A compiled chat template with the special tokens it may write."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        self.source = source
        self._special_tokens = special_tokens
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise DamagedCheckpoint(
                "the chat template of the checkpoint cannot be read",
                expected="a jinja2 template",
                found=f"line {error.lineno}: {error.message}",
                fix="restore chat_template.jinja or tokenizer_config.json from where the checkpoint came from",
            ) from error

    @property
    def has_generation_marks(self) -> bool:
        """Whether the template marks what the assistant wrote."""
        return "endgeneration" in self.source

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        now: datetime | None,
        marks: tuple[str, str] = ("", ""),
    ) -> str:
        """Render messages as text; ``marks`` are written around what ``{% generation %}`` blocks enclose.

        Raises InputError when the template refuses them, UnsupportedCheckpoint when it does what the sandbox forbids.
        """
        variables = {
            _MARK_START: marks[0],
            _MARK_END: marks[1],
            **self._special_tokens,
            "messages": [_normalised(message) for message in _checked(messages)],
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            "strftime_now": lambda form: (now or datetime.now()).strftime(form),
        }
        try:
            return self._template.render(variables)
        except jinja2.sandbox.SecurityError as error:
            raise UnsupportedCheckpoint(
                "the chat template does what the sandbox forbids",
                expected="a template that only reads its messages",
                found=error,
                fix="do not use this checkpoint's chat template: pass text instead of messages",
            ) from error
        except Exception as error:  # a template is a program: it may fail in any way on messages it did not expect
            raise InputError(
                "the chat template cannot render these messages",
                expected="messages as the checkpoint's template wants them",
                found=f"{type(error).__name__}: {error}",
                fix="change the messages (roles, their order, the type of their content)",
            ) from error


class _Generation(jinja2.ext.Extension):
    """``{% generation %} … {% endgeneration %}`` encloses what the assistant wrote, and, where asked for, is marked."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        start, end = (jinja2.nodes.Output([jinja2.nodes.Name(name, "load")]) for name in (_MARK_START, _MARK_END))
        return jinja2.nodes.Scope([start, *body, end], lineno=line)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Jinja's own filter escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _checked(messages: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    is_list = isinstance(messages, list | tuple)
    if not is_list or not messages or not all(isinstance(message, dict) for message in messages):
        raise InputError(
            "these are not chat messages",
            expected='a list of at least one object, as in [{"role": "user", "content": "…"}]',
            found=repr(messages)[:200],
            fix="correct the row",
        )
    return messages


def _normalised(message: dict[str, Any]) -> dict[str, Any]:
    """Drop fields that are null (templates would write "None") and give reasoning every name that templates read."""
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[name] for name in _REASONING_FIELDS if name in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}
