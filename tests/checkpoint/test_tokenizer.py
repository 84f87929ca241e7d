"""Text becomes the ids that transformers' AutoTokenizer gives; nothing is cut and nothing padded."""

import json

import numpy as np
import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import byte_tokenizer, smollm2_gguf
from tokenizers import processors

from tensorrt_llm_ext.checkpoint import Tokenizer, open_checkpoint
from tensorrt_llm_ext.errors import DamagedCheckpoint, InputError, UnsupportedCheckpoint

TEXTS = [
    "",
    " ",
    "hello",
    "Hello  World\n\n",
    "é 世界 🙂",
    "<s>hi</s>",
    "a<pad>b",
    "x <extra> y",
    "<m><u><c>",
    "\u0000\x7f",
    "1 234 5678",
]


@pytest.fixture
def folder(tmp_path):
    byte_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def change_json(path, change):
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def change_config(folder, **fields):
    change_json(folder / "tokenizer_config.json", lambda config: config.update(fields))


def assert_same_ids(folder, texts=TEXTS):
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer = Tokenizer.load(folder)
    for special_tokens in (True, False):
        wanted = reference(texts, add_special_tokens=special_tokens).input_ids
        assert [ids.tolist() for ids in tokenizer.encode_batch(texts, special_tokens)] == wanted
    assert (tokenizer.bos_id, tokenizer.eos_id) == (reference.bos_token_id, reference.eos_token_id)
    return tokenizer


def plain(folder):
    """The folder as it was saved."""


def with_eos(folder):
    rust = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    rust.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    rust.save(str(folder / "tokenizer.json"))


def with_nothing_added(folder):
    change_json(folder / "tokenizer.json", lambda value: value.update(post_processor=None))


def with_flags_that_transformers_ignores(folder):
    change_config(folder, add_bos_token=False, add_eos_token=True)


def with_flags_and_no_post_processor(folder):
    with_nothing_added(folder)
    change_config(folder, add_bos_token=True, add_eos_token=True)


def with_padding_and_truncation(folder):
    rust = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    rust.enable_truncation(3)
    rust.enable_padding(length=7)
    rust.save(str(folder / "tokenizer.json"))


def with_a_special_token_in_the_config_alone(folder):
    change_config(folder, sep_token="<extra>")


def with_several_tokens_in_the_config_alone(folder):
    change_config(folder, unk_token="<u>", mask_token="<m>", cls_token="<c>", additional_special_tokens=["<extra>"])


def with_another_eos(folder):
    change_config(folder, eos_token="<pad>")


def with_an_added_token_in_the_config_alone(folder):
    token = {"content": "<extra>", "lstrip": True, "rstrip": True, "normalized": False, "single_word": False}
    known = {
        str(i): {**token, "content": name, "lstrip": False, "rstrip": False, "special": True}
        for i, name in enumerate(["<s>", "</s>", "<pad>"])
    }
    change_config(folder, added_tokens_decoder=known | {"259": {**token, "special": False}})


def with_special_tokens_in_their_old_file(folder):
    def move(config):
        for key in ("bos_token", "eos_token", "pad_token", "added_tokens_decoder"):
            config.pop(key, None)

    change_json(folder / "tokenizer_config.json", move)
    old = {"bos_token": {"content": "<s>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}}
    (folder / "special_tokens_map.json").write_text(json.dumps(old | {"eos_token": "</s>"}))


def with_special_tokens_as_text(folder):
    change_config(folder, split_special_tokens=True)


def without_a_config(folder):
    (folder / "tokenizer_config.json").unlink()


VARIANTS = [
    plain,
    with_eos,
    with_nothing_added,
    with_flags_that_transformers_ignores,
    with_flags_and_no_post_processor,
    with_padding_and_truncation,
    with_a_special_token_in_the_config_alone,
    with_another_eos,
    with_several_tokens_in_the_config_alone,
    with_an_added_token_in_the_config_alone,
    with_special_tokens_in_their_old_file,
    with_special_tokens_as_text,
    without_a_config,
]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.__name__)
def test_ids_are_those_of_autotokenizer(folder, variant):
    variant(folder)
    assert_same_ids(folder)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.__name__)
def test_saving_keeps_ids_fingerprint_and_template(folder, tmp_path, variant):
    variant(folder)
    before = Tokenizer.load(folder)
    saved = tmp_path / "saved"
    saved.mkdir()
    before.save(saved)
    after = assert_same_ids(saved)
    assert after.fingerprint() == before.fingerprint() and after.template_hash() == before.template_hash()
    assert (after.bos_id, after.eos_id, after.num_tokens) == (before.bos_id, before.eos_id, before.num_tokens)
    for ids, wanted in zip(after.encode_batch(TEXTS, True), before.encode_batch(TEXTS, True), strict=True):
        assert np.array_equal(ids, wanted)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """The real tokenizer of SmolLM2, ours and transformers', from one folder."""
    folder = tmp_path_factory.mktemp("smollm2")
    with open_checkpoint(smollm2_gguf()) as checkpoint:
        checkpoint.tokenizer().save(folder)
    return Tokenizer.load(folder), transformers.AutoTokenizer.from_pretrained(folder)


@settings(max_examples=200, deadline=None)
@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1, max_size=8),
    special_tokens=st.booleans(),
)
def test_any_unicode_text_gives_the_ids_of_autotokenizer(smollm2, texts, special_tokens):
    ours, reference = smollm2
    got = ours.encode_batch(texts, special_tokens)
    assert [ids.tolist() for ids in got] == reference(texts, add_special_tokens=special_tokens).input_ids
    assert all(ids.dtype == np.int32 for ids in got)


def test_the_fingerprint_changes_with_what_decides_ids_and_not_with_the_template(folder):
    before = Tokenizer.load(folder)
    change_config(folder, chat_template="other")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    other_template = Tokenizer.load(folder)
    assert other_template.fingerprint() == before.fingerprint()
    assert other_template.template_hash() != before.template_hash()
    prints = {before.fingerprint()}
    for variant in (with_eos, with_another_eos, with_a_special_token_in_the_config_alone, with_special_tokens_as_text):
        variant(folder)
        prints.add(Tokenizer.load(folder).fingerprint())
    assert len(prints) == 5


def test_the_vocabulary_is_as_large_as_its_largest_id(folder):
    assert Tokenizer.load(folder).num_tokens == 259
    with_a_special_token_in_the_config_alone(folder)
    assert Tokenizer.load(folder).num_tokens == 260


def test_a_tokenizer_without_special_tokens_has_no_ids_for_them(folder):
    without_a_config(folder)
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.bos_id is None and tokenizer.eos_id is None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a\ud800b", "can't encode character '\\ud800' in position 1"),
        (b"bytes", "a bytes"),
        (None, "a NoneType"),
        (("a", "pair"), "a tuple"),
    ],
)
def test_a_text_that_is_not_unicode_is_named_by_its_place(folder, text, found):
    with pytest.raises(InputError, match="text 2 of the batch is not Unicode text") as error:
        Tokenizer.load(folder).encode_batch(["fine", "é", text, text], special_tokens=True)
    assert error.value.index == 2 and found in error.value.found


def test_an_empty_batch_is_empty(folder):
    assert Tokenizer.load(folder).encode_batch([], True) == []


@pytest.mark.parametrize(("files", "found"), [(["tokenizer.model"], "tokenizer.model"), ([], "no tokenizer files")])
def test_a_folder_without_tokenizer_json_is_refused_and_how_to_write_it_is_named(tmp_path, files, found):
    for name in files:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(UnsupportedCheckpoint, match="has no tokenizer.json") as error:
        Tokenizer.load(tmp_path)
    assert error.value.found == found and "save_pretrained" in error.value.fix


@pytest.mark.parametrize("text", ["{", "{}", '{"model": {"type": "Other"}}'])
def test_a_tokenizer_json_that_cannot_be_read_is_damage(folder, text):
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(DamagedCheckpoint, match="tokenizer.json' cannot be read"):
        Tokenizer.load(folder)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_config_that_is_not_a_json_object_is_damage(folder, text):
    (folder / "tokenizer_config.json").write_text(text)
    with pytest.raises(DamagedCheckpoint, match="tokenizer_config.json' is damaged"):
        Tokenizer.load(folder)


@pytest.mark.parametrize("tokens", [{"x": {"content": "<a>"}}, {"259": {"contents": "<a>"}}, {"259": "<a>"}])
def test_added_tokens_that_cannot_be_read_are_damage(folder, tokens):
    change_config(folder, added_tokens_decoder=tokens)
    with pytest.raises(DamagedCheckpoint, match="the added tokens in tokenizer_config.json cannot be read"):
        Tokenizer.load(folder)


@pytest.mark.parametrize("template", [3, {"default": 3}, [{"name": "default", "template": ["x"]}]])
def test_a_chat_template_that_is_not_text_is_damage(folder, template):
    (folder / "chat_template.jinja").unlink()
    change_config(folder, chat_template=template)
    with pytest.raises(DamagedCheckpoint, match="the chat template in tokenizer_config.json cannot be read"):
        Tokenizer.load(folder)
