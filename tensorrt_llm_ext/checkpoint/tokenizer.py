"""Tokenizer: from text to token ids, over the ``tokenizers`` package.

tokenizer.json is the rule, as its maker trained with it, and transformers' AutoTokenizer gives the same ids. Where
tokenizer_config.json names ``LlamaTokenizer`` beside a SentencePiece vocabulary, transformers 5 puts a rule of its own
in the place of the file's; that rule drops the first of several spaces at the start of a text, and here they stay.

Nothing is ever truncated or padded, whatever the checkpoint's files ask for.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from tensorrt_llm_ext.checkpoint.assistant import assistant_spans
from tensorrt_llm_ext.checkpoint.chat import ChatTemplate
from tensorrt_llm_ext.checkpoint.fields import settings
from tensorrt_llm_ext.errors import DamagedCheckpoint, InputError, UnsupportedCheckpoint
from tensorrt_llm_ext.fingerprint import fingerprint

FILES = ("tokenizer.json", "tokenizer_config.json")
"""What ``Tokenizer.save`` writes."""

# transformers' SPECIAL_TOKENS_ATTRIBUTES
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_COPY_AGAIN = "copy or download the file again"


class Tokenizer:
    """A tokenizer with its special tokens and its chat template."""

    def __init__(
        self,
        rust: tokenizers.Tokenizer,
        *,
        special_tokens: dict[str, str],
        template: str | None,
        options: dict[str, Any] | None = None,
    ) -> None:
        rust.no_truncation()
        rust.no_padding()
        self._rust = rust
        self._special_tokens = special_tokens
        self._template = template
        self._options = options or {}  # further entries of tokenizer_config.json that decide ids

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json, special_tokens_map.json and chat_template.jinja of a folder.

        Raises UnsupportedCheckpoint when there is no tokenizer.json, DamagedCheckpoint when a file cannot be read.
        """
        folder = Path(folder)
        config = _config(folder)
        rust = _rust_tokenizer(folder)
        special_tokens = _special_tokens(config)
        _add_tokens(rust, config, special_tokens)
        rust.encode_special_tokens = bool(config.get("split_special_tokens"))
        options = {"split_special_tokens": True} if rust.encode_special_tokens else {}
        return cls(rust, special_tokens=special_tokens, template=_template(folder, config), options=options)

    def save(self, folder: Path) -> None:
        """Write the files that ``load`` and transformers' AutoTokenizer read."""
        folder = Path(folder)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",  # AutoTokenizer then takes tokenizer.json as it is
            "clean_up_tokenization_spaces": False,
            **self._options,
            **self._special_tokens,
        }
        if self._template is not None:
            config["chat_template"] = self._template
        texts = (self._rust.to_str(), json.dumps(config, indent=2, ensure_ascii=False))
        for name, text in zip(FILES, texts, strict=True):
            (folder / name).write_text(text, encoding="utf-8")

    def encode_batch(self, texts: Sequence[str], special_tokens: bool) -> list[np.ndarray]:
        """Turn each text into its token ids, int32 ``[tokens]``.

        ``special_tokens`` adds what the checkpoint's post-processor adds (BOS, EOS), as ``add_special_tokens`` of
        transformers. Raises InputError for a text that is not Unicode text; its ``index`` says which.
        """
        if not all(isinstance(text, str) for text in texts):  # the library would take two texts for a pair
            _refuse_texts(texts)
        try:
            encodings = self._rust.encode_batch_fast(list(texts), add_special_tokens=special_tokens)
        except Exception:  # the library's error does not say which text
            _refuse_texts(texts)
            raise
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def encode_with_offsets(self, texts: Sequence[str], special_tokens: bool) -> list[tuple[np.ndarray, np.ndarray]]:
        """Token ids as ``encode_batch`` gives them, and which characters each comes from: int64 ``[tokens, 2]``, first and
        one past the last; both 0 for a special token that was added."""
        try:
            encodings = self._rust.encode_batch(list(texts), add_special_tokens=special_tokens)
        except Exception:
            _refuse_texts(texts)
            raise
        return [
            (np.array(encoding.ids, dtype=np.int32), np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2))
            for encoding in encodings
        ]

    def render_chat(
        self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = False, *, now: datetime | None = None
    ) -> str:
        """Render chat messages as text, as transformers' ``apply_chat_template(…, tokenize=False)`` does.

        The text already holds its special tokens: encode it with ``special_tokens=False``. Some templates write
        today's date; ``now`` fixes it. Raises InputError when the template refuses the messages.
        """
        if self._chat is None:
            raise UnsupportedCheckpoint(
                "the checkpoint has no chat template",
                expected="chat_template.jinja, or chat_template in tokenizer_config.json with a default",
                found="none",
                fix="pass text instead of messages, or use an instruction-tuned checkpoint",
            )
        return self._chat.render(messages, add_generation_prompt=add_generation_prompt, now=now)

    def assistant_spans(
        self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = False, *, now: datetime | None = None
    ) -> list[tuple[int, int]]:
        """Where, in the text that ``render_chat`` gives, the assistant's own words lie; see ``checkpoint.assistant``."""
        return assistant_spans(self._chat, messages, add_generation_prompt=add_generation_prompt, now=now)

    @property
    def has_chat_template(self) -> bool:
        """Whether ``render_chat`` can be used."""
        return self._template is not None

    @cached_property
    def num_tokens(self) -> int:
        """The size of the vocabulary: one more than the largest token id."""
        return 1 + max(self._rust.get_vocab(with_added_tokens=True).values(), default=-1)

    @property
    def bos_id(self) -> int | None:
        """The id of the token that begins a text; None where the checkpoint names none."""
        return self._special_id("bos_token")

    @property
    def eos_id(self) -> int | None:
        """The id of the token that ends a text; None where the checkpoint names none."""
        return self._special_id("eos_token")

    def fingerprint(self) -> str:
        """Identity of everything that decides ids; the same after ``save`` and ``load``. The template has its own."""
        return self._fingerprint

    def template_hash(self) -> str | None:
        """Identity of the chat template's text; None without one."""
        return None if self._template is None else fingerprint(self._template)

    @cached_property
    def _fingerprint(self) -> str:
        identity = {"tokenizer": json.loads(self._rust.to_str()), "special_tokens": self._special_tokens}
        return fingerprint({**identity, "options": self._options})

    @cached_property
    def _chat(self) -> ChatTemplate | None:
        return None if self._template is None else ChatTemplate(self._template, self._special_tokens)

    def _special_id(self, name: str) -> int | None:
        token = self._special_tokens.get(name)
        return None if token is None else self._rust.token_to_id(token)


def _rust_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.exists():
        others = [name for name in ("tokenizer.model", "vocab.json", "tekken.json") if (folder / name).exists()]
        raise UnsupportedCheckpoint(
            f"'{folder}' has no tokenizer.json",
            expected="tokenizer.json",
            found=", ".join(others) or "no tokenizer files",
            fix="write one: load the tokenizer with transformers' AutoTokenizer, then save_pretrained",
        )
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise DamagedCheckpoint(
            f"'{path}' cannot be read", expected="a tokenizer of the tokenizers package", found=error, fix=_COPY_AGAIN
        ) from error


def _config(folder: Path) -> dict[str, Any]:
    """Read tokenizer_config.json; special_tokens_map.json counts where it has no added_tokens_decoder."""
    config = _json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= _json(folder / "special_tokens_map.json")
    return config


def _json(path: Path) -> dict[str, Any]:
    """Read an optional JSON file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if not isinstance(value, dict):
            raise ValueError(f"a {type(value).__name__}")
    except ValueError as error:
        raise DamagedCheckpoint(
            f"'{path}' is damaged", expected="a JSON object", found=error, fix=_COPY_AGAIN
        ) from error
    return value


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Name the special tokens, which a template may write, in the order in which transformers numbers new ones."""
    named = {key: _content(value) for key, value in sorted(config.items()) if key.endswith("_token")}
    ordered = {key: named[key] for key in _NAMED_TOKENS if key in named} | named
    return {key: content for key, content in ordered.items() if isinstance(content, str)}


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def _add_tokens(rust: tokenizers.Tokenizer, config: dict[str, Any], special_tokens: dict[str, str]) -> None:
    """Add what tokenizer_config.json names and tokenizer.json lacks, with the ids that transformers gives."""
    known = {repr(token) for token in rust.get_added_tokens_decoder().values()}
    declared = settings(config, "added_tokens_decoder")
    try:
        tokens = [declared[i] for i in sorted(declared, key=int)]
        added = [tokenizers.AddedToken(**{**token, "content": token["content"]}) for token in tokens]
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedCheckpoint(
            "the added tokens in tokenizer_config.json cannot be read",
            expected="token ids, each with content and switches",
            found=f"{type(error).__name__}: {error}",
            fix=_COPY_AGAIN,
        ) from error
    rust.add_tokens([token for token in added if repr(token) not in known])
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    extra = extra.values() if isinstance(extra, dict) else extra
    vocabulary = {token.content for token in rust.get_added_tokens_decoder().values()}
    for token in [*special_tokens.values(), *map(_content, extra)]:
        if token not in vocabulary:
            rust.add_special_tokens([token])


def _template(folder: Path, config: dict[str, Any]) -> str | None:
    """Find the default chat template: a file of its own counts before tokenizer_config.json."""
    file = folder / "chat_template.jinja"
    template = file.read_text(encoding="utf-8", errors="replace") if file.exists() else config.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
    template = template.get("default") if isinstance(template, dict) else template
    if not isinstance(template, str | None):
        raise DamagedCheckpoint(
            "the chat template in tokenizer_config.json cannot be read",
            expected="text, or several texts by name",
            found=f"a {type(template).__name__}",
            fix=_COPY_AGAIN,
        )
    return template


def _refuse_texts(texts: Sequence[str]) -> None:
    """Raise InputError for the first text that the library cannot take."""
    for index, text in enumerate(texts):
        try:
            text.encode("utf-8")
        except (UnicodeEncodeError, AttributeError) as problem:
            error = InputError(
                f"text {index} of the batch is not Unicode text",
                expected="a string without lone surrogates",
                found=f"{problem}" if isinstance(problem, UnicodeEncodeError) else f"a {type(text).__name__}",
                fix="correct the row: decode its bytes as UTF-8",
            )
            error.index = index
            raise error from problem
