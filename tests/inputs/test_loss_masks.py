"""The loss mask: what the assistant wrote, by marks and by borders; a field; all ones. A mask that cannot be known is refused."""

import json

import numpy as np
import pytest
import tiny
import transformers

from fakes import TEMPLATE, byte_tokenizer
from tensorrt_llm_ext.checkpoint import Tokenizer, open_checkpoint
from tensorrt_llm_ext.errors import InputError
from tensorrt_llm_ext.inputs import Fields
from tensorrt_llm_ext.inputs.items import _tokens_within

CHAT = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "ça va?"},
    {"role": "assistant", "content": "oui, 世界"},
    {"role": "user", "content": "and"},
    {"role": "assistant", "content": "end\n"},
]
MARKED = (
    "{% for message in messages %}<s>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}</s>{% endgeneration %}"
    "{% else %}{{ message['content'] }}</s>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
FIELDS = Fields(messages="chat")


def read_chat(read, jsonl, template, chat=CHAT, **options):
    tokenizer = byte_tokenizer(template)
    path = jsonl(json.dumps({"chat": chat}))
    (row,) = read(path, FIELDS, tokenizer=tokenizer, loss_mask="assistant", **options)
    return tokenizer, row


@pytest.mark.parametrize("template", [TEMPLATE, MARKED])
def test_the_assistant_s_words_and_its_end_of_turn_are_learnt_and_nothing_else(read, jsonl, template):
    tokenizer, row = read_chat(read, jsonl, template, chat=CHAT[1:3])
    learnt = "oui, 世界".encode() + b"</s>"
    (expected,) = tokenizer.encode_batch([learnt.decode()], False)
    assert row.item.token_ids[row.item.loss_mask == 1].tolist() == expected.tolist()
    assert row.item.loss_mask.dtype == np.uint8 and 0 < row.item.loss_mask.sum() < len(row.item.token_ids)


def test_several_turns_and_a_generation_prompt(read, jsonl):
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bb"}] * 2
    tokenizer, row = read_chat(read, jsonl, TEMPLATE, chat, add_generation_prompt=True)
    (one,) = tokenizer.encode_batch(["bb</s>"], False)
    assert row.item.token_ids[row.item.loss_mask == 1].tolist() == [*one, *one]


def test_marks_are_those_of_transformers(tmp_path):
    tokenizer = tiny.byte_tokenizer()
    tokenizer.chat_template = MARKED
    tokenizer.save_pretrained(tmp_path)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = loaded.apply_chat_template(CHAT, return_assistant_tokens_mask=True, return_dict=True, tokenize=True)
    ours = Tokenizer.load(tmp_path)
    text = ours.render_chat(CHAT)
    ((ids, offsets),) = ours.encode_with_offsets([text], False)
    assert ids.tolist() == expected["input_ids"]
    assert _tokens_within(offsets, ours.assistant_spans(CHAT)).tolist() == expected["assistant_masks"]


def test_a_real_template_by_its_borders():
    with open_checkpoint(tiny.smollm2_gguf()) as checkpoint:
        tokenizer = checkpoint.tokenizer()
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there"}]
    text = tokenizer.render_chat(chat)
    assert [text[start:end] for start, end in tokenizer.assistant_spans(chat)] == ["Hello there<|im_end|>"]


BROKEN = {
    "no prompt": TEMPLATE.replace("{% if add_generation_prompt %}<s>assistant\n{% endif %}", ""),
    "earlier turns change": TEMPLATE.replace(
        "{{ message['content'] }}", "{{ message['content'] }}{{ ' (old)' if not loop.last else '' }}"
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_template_that_does_not_show_its_turns_is_refused(read, jsonl, name):
    chat = [*CHAT[1:3], {"role": "user", "content": "x"}]
    _, row = read_chat(read, jsonl, BROKEN[name], chat)
    assert row.refusal.code == "no_loss_mask" and "does not show" in row.refusal.what


def test_marks_that_are_not_where_the_turns_are_are_refused(read, jsonl):
    template = MARKED.replace("== 'assistant' %}{% generation", "== 'user' %}{% generation")
    _, row = read_chat(read, jsonl, template, CHAT[1:3])
    assert row.refusal.code == "no_loss_mask" and "not where the assistant's turns are" in row.refusal.what


def test_a_template_that_works_on_the_marked_text_is_refused(read, jsonl):
    template = (
        "{% for message in messages %}{% set text %}{% generation %} {{ message['content'] }} {% endgeneration %}{% endset %}"
        "{{ text | trim }}{% endfor %}"
    )
    _, row = read_chat(read, jsonl, template, CHAT[1:3])
    assert row.refusal.code == "no_loss_mask" and "around its generation marks" in row.refusal.what


def test_a_mask_is_cut_with_its_tokens(read, jsonl):
    path = jsonl(json.dumps({"text": "abcdef", "mask": [0, 0, 1, 0, 1, 1, 0]}))
    fields = Fields(text="text", loss_mask="mask")
    options = {"loss_mask": "field", "max_length": 4}
    (right,) = read(path, fields, too_long="truncate-right", **options)
    (left,) = read(path, fields, too_long="truncate-left", **options)
    assert right.item.loss_mask.tolist() == [0, 0, 1, 0]  # the first token is special, and stays at either side
    assert left.item.loss_mask.tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize(
    "mask, code",
    [([0, 1, 1], None), ([0, 1], "bad_loss_mask"), ([0, 2, 1], "bad_loss_mask"), ("011", "bad_loss_mask"), (None, "missing_field")],
)
def test_a_field_s_mask_has_one_0_or_1_a_token(read, jsonl, mask, code):
    (row,) = read(jsonl(json.dumps({"ids": [4, 5, 6], "mask": mask})), Fields(ids="ids", loss_mask="mask"), loss_mask="field")
    assert (row.item.loss_mask.tolist() == mask) if code is None else row.refusal.code == code


def test_ones_are_ones_and_without_a_policy_there_is_no_mask(read, jsonl):
    path = jsonl(json.dumps({"ids": [4, 5, 6]}))
    (row,) = read(path, Fields(ids="ids"), loss_mask="ones")
    assert row.item.loss_mask.tolist() == [1, 1, 1]
    (row,) = read(path, Fields(ids="ids"))
    assert row.item.loss_mask is None


@pytest.mark.parametrize(
    "fields, options",
    [
        (Fields(ids="ids"), {"loss_mask": "assistant"}),
        (Fields(messages="chat"), {"loss_mask": "assistant", "special_tokens": "tokenizer"}),
        (Fields(ids="ids"), {"loss_mask": "field"}),
        (Fields(ids="ids", loss_mask="mask"), {"loss_mask": "ones"}),
    ],
)
def test_a_source_that_cannot_be_is_refused_at_the_door(read, jsonl, fields, options):
    with pytest.raises(InputError, match="loss mask"):
        read(jsonl("{}"), fields, **options)
