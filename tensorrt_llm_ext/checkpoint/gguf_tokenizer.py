"""From GGUF metadata to a tokenizer: the vocabulary of the file, split and merged as the model was trained.

The rule that splits text before BPE is in the file only as a name (``tokenizer.ggml.pre``). Names whose rule is not
known here are refused: another rule gives other tokens, which nobody would notice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import tokenizers
from gguf import TokenType
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from tensorrt_llm_ext.checkpoint.fields import boolean, integer, names
from tensorrt_llm_ext.checkpoint.gguf_file import GgufFile
from tensorrt_llm_ext.checkpoint.tokenizer import Tokenizer
from tensorrt_llm_ext.errors import DamagedCheckpoint, UnsupportedCheckpoint

_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}

# The split of Llama 3 and of Qwen2, which differ in how many digits stay together.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_SPLIT = _WORDS + r"\p{N}{1,3}" + _REST
_QWEN2_SPLIT = _WORDS + r"\p{N}" + _REST


@dataclass(frozen=True)
class _ByteLevel:
    """How a byte-level BPE prepares text. ``ignore_merges``: a word that is in the vocabulary is one token."""

    split: pre_tokenizers.PreTokenizer
    normalizer: normalizers.Normalizer | None = None
    ignore_merges: bool = False
    add_bos: bool = False  # where the file does not say


def _split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)  # its own split is GPT-2's
_LLAMA3 = _ByteLevel(_split_by(_LLAMA3_SPLIT), ignore_merges=True, add_bos=True)
_BYTE_LEVEL = {
    "gpt-2": _ByteLevel(_GPT2),
    "smollm": _ByteLevel(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _GPT2])),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _ByteLevel(_split_by(_QWEN2_SPLIT), normalizer=normalizers.NFC()),
}


def tokenizer_from_gguf(file: GgufFile) -> Tokenizer:
    """Build the tokenizer of a GGUF model.

    Raises UnsupportedCheckpoint for a kind of tokenizer, or of splitting, that is not known, by name; and
    DamagedCheckpoint for metadata that contradicts itself.
    """
    fields = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in file.metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    vocab = _vocabulary(file, fields)
    special_tokens = _special_tokens(file, fields)
    kind = fields.get("model")
    if kind == "gpt2":
        rust, add_bos = _byte_level(file, fields, vocab)
    elif kind == "llama":
        rust, add_bos = _sentencepiece(file, fields, vocab, special_tokens.get("unk_token")), True
    else:
        raise UnsupportedCheckpoint(
            f"the kind of tokenizer in '{file.path}' is not served",
            expected="tokenizer.ggml.model 'gpt2' or 'llama'",
            found=f"'{kind}'",
            fix="use the model's Hugging Face checkpoint",
        )
    _add_tokens(rust, fields)
    _set_post_processor(file, rust, fields, special_tokens, add_bos)
    template = file.metadata.get("tokenizer.chat_template")
    return Tokenizer(rust, special_tokens=special_tokens, template=template)


def _vocabulary(file: GgufFile, fields: dict[str, Any]) -> dict[str, int]:
    """Number the tokens; unused entries, which pad the vocabulary to a round size, are left out."""
    tokens = names(fields, "tokens", minimum=1)
    types = _one_per_token(file, fields, "token_type")
    used = [(token, i) for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind != TokenType.UNUSED]
    vocab = dict(used)
    if len(vocab) != len(used):
        twice = next(token for token, i in used if vocab[token] != i)
        raise _contradiction(file, "each token once", f"the token '{twice}' twice")
    return vocab


def _one_per_token(file: GgufFile, fields: dict[str, Any], key: str) -> np.ndarray:
    values = fields.get(key, np.empty(0))
    if not isinstance(values, np.ndarray) or len(values) != len(fields["tokens"]):
        found = f"{len(values)} of them" if isinstance(values, np.ndarray) else repr(values)[:40]
        raise _contradiction(file, f"one {key} for each of {len(fields['tokens'])} tokens", found)
    return values


def _byte_level(file: GgufFile, fields: dict[str, Any], vocab: dict[str, int]) -> tuple[tokenizers.Tokenizer, bool]:
    """BPE over bytes, each written as a printable letter (GPT-2, Llama 3, Qwen, SmolLM)."""
    kind = _BYTE_LEVEL.get(str(fields.get("pre")))
    if kind is None:
        raise UnsupportedCheckpoint(
            f"how '{file.path}' splits text before BPE is not known",
            expected=f"tokenizer.ggml.pre of {', '.join(_BYTE_LEVEL)}",
            found=f"'{fields['pre']}'" if "pre" in fields else "no tokenizer.ggml.pre",
            fix="use the model's Hugging Face checkpoint, or convert it again with a current llama.cpp",
        )
    merges = [tuple(merge.split(" ", 1)) for merge in names(fields, "merges")]
    rust = _model(file, vocab=vocab, merges=merges, ignore_merges=kind.ignore_merges)
    if kind.normalizer:
        rust.normalizer = kind.normalizer
    rust.pre_tokenizer = kind.split
    rust.decoder = decoders.ByteLevel()
    return rust, kind.add_bos


def _sentencepiece(
    file: GgufFile, fields: dict[str, Any], vocab: dict[str, int], unknown: str | None
) -> tokenizers.Tokenizer:
    """SentencePiece BPE with byte fallback (Llama 2, Mistral): a space is U+2581, and one is put before each text."""
    scores = _one_per_token(file, fields, "scores")
    merges = _merges_by_score(vocab, scores, fields["token_type"])
    rust = _model(file, vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    has_prefix = boolean(fields, "add_space_prefix", True)
    prefix = [normalizers.Prepend("\u2581")] if has_prefix else []
    rust.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "\u2581")])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    rust.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return rust


def _merges_by_score(vocab: dict[str, int], scores: np.ndarray, types: np.ndarray) -> list[tuple[str, str]]:
    """List every pair of tokens that makes a token, best score first, as Hugging Face converts SentencePiece models."""
    pairs = []
    for token, i in vocab.items():
        if types[i] in (TokenType.NORMAL, TokenType.USER_DEFINED):
            for left, right in ((token[:cut], token[cut:]) for cut in range(1, len(token))):
                if left in vocab and right in vocab:
                    pairs.append((-scores[i], i, vocab[left], vocab[right]))
    token_of = {i: token for token, i in vocab.items()}
    return [(token_of[left], token_of[right]) for _, _, left, right in sorted(pairs)]


def _model(file: GgufFile, **settings: Any) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(models.BPE(**settings))
    except Exception as error:  # the library raises plain Exception: a merge of tokens that are not in the vocabulary
        raise _contradiction(file, "merges of tokens in the vocabulary", error) from error


def _special_tokens(file: GgufFile, fields: dict[str, Any]) -> dict[str, str]:
    named = {name: integer(fields, key, minimum=0) for name, key in _SPECIAL.items() if key in fields}
    for name, i in named.items():
        if i >= len(fields["tokens"]):
            raise _contradiction(file, f"a {name} among {len(fields['tokens'])} tokens", f"token id {i}")
    return {name: fields["tokens"][i] for name, i in named.items()}


def _add_tokens(rust: tokenizers.Tokenizer, fields: dict[str, Any]) -> None:
    """Let control tokens and those the maker defined be found whole in a text, before it is split."""
    for kind, is_special in ((TokenType.CONTROL, True), (TokenType.UNKNOWN, True), (TokenType.USER_DEFINED, False)):
        tokens = [fields["tokens"][i] for i in np.flatnonzero(fields["token_type"] == kind)]
        rust.add_tokens([tokenizers.AddedToken(token, normalized=False, special=is_special) for token in tokens])


def _set_post_processor(
    file: GgufFile, rust: tokenizers.Tokenizer, fields: dict[str, Any], special_tokens: dict[str, str], add_bos: bool
) -> None:
    """Add BOS and EOS as the file says; ``add_bos`` is for a file that does not."""

    def added(name: str, is_default: bool) -> list[str]:
        if not boolean(fields, f"add_{name}", is_default):
            return []
        if name not in special_tokens:
            raise _contradiction(file, f"a {_SPECIAL[name]}, since {name} is added to every text", "none")
        return [special_tokens[name]]

    bos, eos = added("bos_token", add_bos), added("eos_token", False)
    if bos or eos:
        ids = [(token, rust.token_to_id(token)) for token in dict.fromkeys(bos + eos)]
        rust.post_processor = processors.TemplateProcessing(single=[*bos, "$A", *eos], special_tokens=ids)


def _contradiction(file: GgufFile, expected: object, found: object) -> DamagedCheckpoint:
    return DamagedCheckpoint(
        f"the tokenizer in '{file.path}' contradicts itself",
        expected=expected,
        found=found,
        fix="convert the model again with a current llama.cpp",
    )
