"""The tokenizer of a GGUF file gives the ids that its model was trained with, or is refused by name."""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import smollm2_gguf
from tokenizers import models, normalizers, pre_tokenizers, trainers

from tensorrt_llm_ext.checkpoint import Tokenizer, open_checkpoint
from tensorrt_llm_ext.checkpoint.gguf_file import GgufFile
from tensorrt_llm_ext.checkpoint.gguf_tokenizer import tokenizer_from_gguf
from tensorrt_llm_ext.errors import DamagedCheckpoint, UnsupportedCheckpoint

TEXTS = [
    "another hen jumps over this lazy brown hill, where the dogs quickly hover",
    "Hello world! 123",
    "It's 2024, I'LL pay $1,234.50 (or 12%) — naïve café №5 Ⅷ",
    "  two  spaces\n\n\tand a tab \r\n end  ",
    "e\u0301 = é, 한국어, 世界, 🙂👩‍🚀",
    "",
    "def f(x):\n    return x**2  # comment",
]
CORPUS = TEXTS * 4 + ["the quick brown fox jumps over the lazy dog's 1000 hills, it's 12:34"] * 8

# The ids that the original Hugging Face tokenizer of SmolLM2 gives.
SMOLLM2_IDS = {
    "Hello, we can use": [19556, 28, 392, 416, 722],
    "The capital of France is": [504, 3575, 282, 4649, 314],
    "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
    "Café déjà vu.": [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30],
    "  multiple   spaces": [216, 2701, 256, 5600],
    "\n": [198],
    "<|im_start|>user": [1, 4093],
}


def file_of(**fields):
    """A GGUF file with nothing but a tokenizer; a field of None is not there."""
    fields = {key: value for key, value in fields.items() if value is not None}
    fields |= {key: np.array(fields[key]) for key in ("token_type", "scores") if key in fields}
    return GgufFile(Path("model.gguf"), {f"tokenizer.ggml.{key}": value for key, value in fields.items()}, {})


@pytest.fixture(scope="module")
def byte_level():
    """Vocabulary and merges of a byte-level BPE trained on a little text, with digits that merge."""
    rust = tokenizers.Tokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    rust.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=420, initial_alphabet=sorted(alphabet), show_progress=False)
    )
    model = json.loads(rust.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def byte_level_file(byte_level, **changes):
    vocab, merges = byte_level
    tokens = ["<s>", "</s>", "<tool>", *sorted(vocab, key=vocab.get), "[PAD0]"]
    types = [3, 3, 4] + [1] * len(vocab) + [5]
    fields = {"model": "gpt2", "tokens": tokens, "token_type": types, "merges": [" ".join(merge) for merge in merges]}
    return file_of(**{**fields, "bos_token_id": 0, "eos_token_id": 1, **changes})


def reference_of(byte_level, pre):
    """The tokenizer that transformers builds for the model family from the same vocabulary and merges."""
    vocab, merges = byte_level
    vocab = {token: 3 + i for token, i in vocab.items()}
    if pre == "qwen2":
        return transformers.Qwen2Tokenizer(
            vocab=vocab, merges=merges, eos_token=None, unk_token=None, pad_token=None
        ).backend_tokenizer
    rust = transformers.GPT2Tokenizer(
        vocab=vocab, merges=merges, eos_token=None, unk_token=None, bos_token=None
    ).backend_tokenizer
    if pre == "smollm":
        rust.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), rust.pre_tokenizer]
        )
    if pre == "llama-bpe":
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS as SPLITS

        split = pre_tokenizers.Split(tokenizers.Regex(SPLITS["llama-bpe"]), behavior="isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        rust.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
        rust.model = models.BPE(vocab=vocab, merges=merges, ignore_merges=True)
    return rust


def ids_of(tokenizer, texts, special_tokens=False):
    return [ids.tolist() for ids in tokenizer.encode_batch(texts, special_tokens)]


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_each_kind_of_splitting_gives_the_ids_of_its_family(byte_level, pre):
    got = ids_of(tokenizer_from_gguf(byte_level_file(byte_level, pre=pre)), TEXTS)
    assert got == [encoding.ids for encoding in reference_of(byte_level, pre).encode_batch(TEXTS)]


def test_the_kinds_of_splitting_differ_on_these_texts(byte_level):
    kinds = [
        ids_of(tokenizer_from_gguf(byte_level_file(byte_level, pre=pre)), TEXTS)
        for pre in ("gpt-2", "smollm", "llama-bpe", "qwen2")
    ]
    assert all(a != b for i, a in enumerate(kinds) for b in kinds[:i])


def test_a_word_of_the_vocabulary_that_no_merge_makes_is_one_token_in_llama3_alone(byte_level):
    vocab, merges = byte_level
    with_word = ({**vocab, "zebra": len(vocab)}, merges)
    lengths = [
        len(ids_of(tokenizer_from_gguf(byte_level_file(with_word, pre=pre)), ["zebra"])[0])
        for pre in ("llama-bpe", "qwen2")
    ]
    assert lengths[0] == 1 < lengths[1]


def test_the_real_vocabulary_of_smollm2_gives_the_ids_of_its_original_tokenizer():
    tokenizer = open_checkpoint(smollm2_gguf()).tokenizer()
    assert ids_of(tokenizer, list(SMOLLM2_IDS), special_tokens=True) == list(SMOLLM2_IDS.values())
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.num_tokens) == (1, 2, 49152)


def test_control_and_user_defined_tokens_are_found_whole_and_unused_ones_are_not(byte_level):
    tokenizer = tokenizer_from_gguf(byte_level_file(byte_level, pre="gpt-2"))
    assert ids_of(tokenizer, ["<s></s><tool>"]) == [[0, 1, 2]]
    (padding,) = ids_of(tokenizer, ["[PAD0]"])
    assert len(padding) > 1 and tokenizer.num_tokens == 3 + len(byte_level[0])


@pytest.mark.parametrize(
    ("fields", "before", "after"),
    [
        ({"pre": "gpt-2"}, [], []),
        ({"pre": "llama-bpe"}, [0], []),
        ({"pre": "llama-bpe", "add_bos_token": False}, [], []),
        ({"pre": "gpt-2", "add_bos_token": True}, [0], []),
        ({"pre": "gpt-2", "add_eos_token": True}, [], [1]),
        ({"pre": "qwen2", "add_bos_token": True, "add_eos_token": True, "eos_token_id": 0}, [0], [0]),
    ],
)
def test_bos_and_eos_are_added_as_the_file_says(byte_level, fields, before, after):
    tokenizer = tokenizer_from_gguf(byte_level_file(byte_level, **fields))
    (plain,), (added,) = ids_of(tokenizer, ["hello"]), ids_of(tokenizer, ["hello"], special_tokens=True)
    assert added == before + plain + after


def test_the_chat_template_is_that_of_the_file(byte_level):
    file = byte_level_file(byte_level, pre="gpt-2")
    assert not tokenizer_from_gguf(file).has_chat_template
    file.metadata["tokenizer.chat_template"] = "{{ bos_token }}{{ messages[0].content }}"
    assert tokenizer_from_gguf(file).render_chat([{"role": "user", "content": "hi"}]) == "<s>hi"


@pytest.fixture(scope="module")
def sentencepiece():
    """A SentencePiece-like BPE trained on a little text: the tokenizer, and its vocabulary in the order of merging."""
    rust = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    rust.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=special, limit_alphabet=60, show_progress=False)
    rust.train_from_iterator(" ".join(CORPUS).replace("é", "e").split(), trainer)
    value = json.loads(rust.to_str())
    value["added_tokens"] = [token for token in value["added_tokens"] if token["id"] < 3]
    rust = tokenizers.Tokenizer.from_str(json.dumps(value))
    vocab = rust.get_vocab()
    return rust, sorted(vocab, key=vocab.get)


def sentencepiece_file(sentencepiece, **changes):
    _, tokens = sentencepiece
    types = [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259)
    fields = {
        "model": "llama",
        "tokens": tokens,
        "token_type": types,
        "scores": [-float(i) for i in range(len(tokens))],
    }
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return file_of(**{**fields, **ids, **changes})


def test_merges_are_recovered_from_the_scores_of_a_sentencepiece_vocabulary(sentencepiece):
    rust, _ = sentencepiece
    tokenizer = tokenizer_from_gguf(sentencepiece_file(sentencepiece))
    assert ids_of(tokenizer, TEXTS) == [encoding.ids for encoding in rust.encode_batch(TEXTS)]
    scores = np.array([float(i) for i in range(len(sentencepiece[1]))])
    other_order = tokenizer_from_gguf(sentencepiece_file(sentencepiece, scores=scores))
    assert ids_of(other_order, TEXTS) != ids_of(tokenizer, TEXTS)


def test_a_sentencepiece_text_begins_with_bos_and_a_space_and_unknown_letters_become_bytes(sentencepiece):
    _, tokens = sentencepiece
    tokenizer = tokenizer_from_gguf(sentencepiece_file(sentencepiece))
    (ids,) = ids_of(tokenizer, ["𝄞"], special_tokens=True)
    assert [tokens[i] for i in ids] == ["<s>", "▁", "<0xF0>", "<0x9D>", "<0x84>", "<0x9E>"]
    assert 2 in ids_of(tokenizer, ["a</s>b"])[0]
    without = tokenizer_from_gguf(sentencepiece_file(sentencepiece, add_space_prefix=False, add_bos_token=False))
    assert [tokens[i] for i in ids_of(without, ["𝄞"], special_tokens=True)[0]][0] == "<0xF0>"


def test_transformers_agrees_on_sentencepiece_text_that_does_not_begin_with_a_space(sentencepiece):
    from transformers.integrations.gguf.gguf_tokenizer_mapping import sentencepiece_tokenizer

    file = sentencepiece_file(sentencepiece)
    fields = {key.removeprefix("tokenizer.ggml."): value for key, value in file.metadata.items()}
    reference = sentencepiece_tokenizer({"tokens": fields["tokens"], "scores": list(fields["scores"])})
    texts = [text.strip() for text in TEXTS if text]
    assert ids_of(tokenizer_from_gguf(file), texts) == reference(texts, add_special_tokens=False).input_ids


@settings(max_examples=50, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_decoding_gives_the_text_back(byte_level, sentencepiece, tmp_path_factory, text):
    for file in (byte_level_file(byte_level, pre="gpt-2"), sentencepiece_file(sentencepiece)):
        folder = tmp_path_factory.mktemp("saved")
        tokenizer_from_gguf(file).save(folder)
        rust = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        ids = rust.encode(text, add_special_tokens=False).ids
        if not set(ids) & {0, 1, 2}:  # a special token of the text is not text
            assert rust.decode(ids) == text


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_what_is_saved_is_read_by_transformers_and_gives_the_same_ids(tmp_path, byte_level, sentencepiece, kind):
    file = byte_level_file(byte_level, pre="llama-bpe") if kind == "byte_level" else sentencepiece_file(sentencepiece)
    tokenizer = tokenizer_from_gguf(file)
    tokenizer.save(tmp_path)
    texts = [*TEXTS, " leading", "a</s> b"]
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert ids_of(tokenizer, texts, True) == ids_of(loaded, texts, True) == reference(texts).input_ids
    assert loaded.fingerprint() == tokenizer.fingerprint()


@pytest.mark.parametrize(
    ("fields", "words", "found"),
    [
        ({"model": "bert"}, "the kind of tokenizer in 'model.gguf' is not served", "'bert'"),
        ({"model": None}, "the kind of tokenizer in 'model.gguf' is not served", "'None'"),
        ({"pre": "tekken"}, "how 'model.gguf' splits text before BPE is not known", "'tekken'"),
        ({"pre": "default"}, "how 'model.gguf' splits text before BPE is not known", "'default'"),
        ({"pre": None}, "how 'model.gguf' splits text before BPE is not known", "no tokenizer.ggml.pre"),
    ],
)
def test_a_kind_that_is_not_known_is_refused_by_name(byte_level, fields, words, found):
    with pytest.raises(UnsupportedCheckpoint, match=words) as error:
        tokenizer_from_gguf(byte_level_file(byte_level, **fields))
    assert error.value.found == found


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"token_type": [1, 1]}, "one token_type for each of 4"),
        ({"token_type": None}, "one token_type for each of 4"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "each token once"),
        ({"merges": ["never seen"]}, "merges of tokens in the vocabulary"),
        ({"bos_token_id": 10_000}, "a bos_token among"),
        ({"bos_token_id": None, "add_bos_token": True}, "a bos_token_id, since bos_token is added to every text"),
    ],
)
def test_a_tokenizer_that_contradicts_itself_is_damage(byte_level, fields, expected):
    with pytest.raises(DamagedCheckpoint, match="the tokenizer in 'model.gguf' contradicts itself") as error:
        tokenizer_from_gguf(byte_level_file(byte_level, **{"pre": "gpt-2", "merges": [], **fields}))
    assert expected in error.value.expected


def test_a_sentencepiece_vocabulary_without_scores_is_damage(sentencepiece):
    with pytest.raises(DamagedCheckpoint, match="contradicts itself") as error:
        tokenizer_from_gguf(sentencepiece_file(sentencepiece, scores=[0.0]))
    assert error.value.expected.startswith("one scores for each of 4") and error.value.found == "1 of them"


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"tokens": None}, "tokens"),
        ({"tokens": 3}, "tokens"),
        ({"merges": 3}, "merges"),
        ({"bos_token_id": "x"}, "bos_token_id"),
    ],
)
def test_a_field_of_the_wrong_type_is_damage(byte_level, fields, key):
    with pytest.raises(DamagedCheckpoint, match=f"the field '{key}' cannot be used"):
        tokenizer_from_gguf(byte_level_file(byte_level, **{"pre": "gpt-2", **fields}))
