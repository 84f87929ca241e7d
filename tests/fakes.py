"""Stand-ins for tests of everything around the engine: a byte-level tokenizer, and later a session without a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from tensorrt_llm_ext.checkpoint.tokenizer import Tokenizer
from tensorrt_llm_ext.fingerprint import fingerprint
from tensorrt_llm_ext.recipes.contract import Limits

VOCAB_SIZE = 263
BOS, EOS = 0, 1
LIMITS = Limits(max_num_tokens=256, max_batch_size=8, max_seq_len=64, max_padded_tokens=512)

TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'nobody' %}{{ raise_exception('no such role') }}{% endif %}"
    "<s>{{ message['role'] }}\n{{ message['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def falsify_contract(engine: Path, change: Callable[[dict], None]) -> None:
    """Change an engine's contract.json, its hash too: a lie that only numbers can uncover."""
    path = engine / "contract.json"
    value = json.loads(path.read_text())
    del value["contract_hash"]
    change(value)
    path.write_text(json.dumps({**value, "contract_hash": fingerprint(value)}))


def byte_tokenizer(template: str | None = TEMPLATE, ends: str = "<s> $A") -> Tokenizer:
    """A tokenizer of one token a byte; ``ends`` says which special tokens it adds."""
    return _tokenizer(sorted(pre_tokenizers.ByteLevel.alphabet()), template, ends)


def letter_tokenizer() -> Tokenizer:
    """A tokenizer of lower-case letters, digits and the space, for toy models of 97 tokens."""
    return _tokenizer([*"abcdefghijklmnopqrstuvwxyz0123456789-", "Ġ", "Ċ"], TEMPLATE, "<s> $A")


def _tokenizer(alphabet: list[str], template: str | None, ends: str) -> Tokenizer:
    vocab = {"<s>": BOS, "</s>": EOS, "<pad>": 2} | {letter: 3 + i for i, letter in enumerate(alphabet)}
    rust = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    rust.add_special_tokens(["<s>", "</s>", "<pad>"])
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rust.decoder = decoders.ByteLevel()
    rust.post_processor = processors.TemplateProcessing(single=ends, special_tokens=[("<s>", BOS), ("</s>", EOS)])
    return Tokenizer(rust, special_tokens={"bos_token": "<s>", "eos_token": "</s>"}, template=template)
