"""Chat messages become the text that transformers' ``apply_chat_template`` renders, or an error that says why not."""

import json
from datetime import datetime

import pytest
import transformers
from tiny import byte_tokenizer, smollm2_gguf

from tensorrt_llm_ext.checkpoint import Tokenizer, open_checkpoint
from tensorrt_llm_ext.errors import DamagedCheckpoint, InputError, UnsupportedCheckpoint

CONVERSATION = [
    {"role": "system", "content": "Be <brief> & kind.\n"},
    {"role": "user", "content": "  What is 1 < 2?  "},
    {"role": "assistant", "content": "é 世界 🙂"},
    {"role": "user", "content": "Thanks"},
]

IDIOMS = {
    "loop and special tokens": (
        "{% for m in messages %}{{ bos_token }}{{ m.role }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"
    ),
    "unset special token": "[{{ cls_token }}][{{ unk_token is defined }}]",
    "block trimming": "{% for m in messages %}\n    {% if loop.first %}\n  first\n    {% endif %}\n  x\n{% endfor %}\n",
    "whitespace control": "{%- for m in messages -%}\n  {{- m.content | trim -}}\n{%- endfor -%}",
    "namespace": (
        "{% set ns = namespace(system='none', n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
        "{% if m.role == 'system' %}{% set ns.system = m.content %}{% endif %}{% endfor %}{{ ns.system }}{{ ns.n }}"
    ),
    "break and continue": (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}"
        "{% if m.role == 'assistant' %}{% break %}{% endif %}{% endfor %}"
    ),
    "tojson": (
        "{{ messages | tojson }}{{ messages[1] | tojson(indent=2) }}{{ {'b': 1, 'a': '<'} | tojson(sort_keys=True) }}"
    ),
    "slices and strings": (
        "{{ messages[1:]|length }}{{ messages[-1].content.upper() }}{{ messages[2]['content'].split(' ')[0] }}"
        "{{ messages[0].content.strip() + '!' }}{{ 'x' if add_generation_prompt else 'y' }}"
    ),
    "alternation": (
        "{% for m in messages[1:] %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
    ),
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    ),
    "tools and documents": (
        "{% if not tools and not documents %}none{% endif %}{{ tools is none }}{{ documents is none }}"
    ),
    "macro": (
        "{% macro show(m, sep='|') %}{{ m.role }}{{ sep }}{% endmacro %}"
        "{% for m in messages %}{{ show(m) }}{% endfor %}"
    ),
    "dict": "{{ dict(a=1).a }}{{ messages[0].items() | list | length }}",
    "strftime_now": "{{ strftime_now('%Y') if strftime_now is defined else 'no clock' }}",
}


@pytest.fixture
def folder(tmp_path):
    byte_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def set_template(folder, template):
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))


def assert_same_text(folder, conversations=(CONVERSATION,)):
    ours, reference = Tokenizer.load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for messages in conversations:
        for prompt in (False, True):
            wanted = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
            assert ours.render_chat(messages, prompt) == wanted
    assert wanted


@pytest.mark.parametrize("template", IDIOMS.values(), ids=IDIOMS)
def test_every_idiom_renders_as_in_transformers(folder, template):
    set_template(folder, template)
    assert_same_text(folder)


def test_the_template_of_a_real_model_renders_as_in_transformers(tmp_path):
    with open_checkpoint(smollm2_gguf()) as checkpoint:
        checkpoint.tokenizer().save(tmp_path)
    assert_same_text(tmp_path, [CONVERSATION, CONVERSATION[1:], CONVERSATION[1:2]])


def test_a_file_of_its_own_counts_before_the_config(folder):
    set_template(folder, "from the config")
    (folder / "chat_template.jinja").write_text("from the file")
    assert Tokenizer.load(folder).render_chat(CONVERSATION) == "from the file"
    assert_same_text(folder)


@pytest.mark.parametrize("as_list", [True, False])
def test_of_several_templates_the_default_is_taken(folder, as_list):
    templates = {"tool_use": "tools", "default": "{{ messages[0].role }}"}
    set_template(folder, [{"name": k, "template": v} for k, v in templates.items()] if as_list else templates)
    assert_same_text(folder)


def test_null_fields_are_dropped_and_reasoning_has_every_name(folder):
    set_template(folder, "{% for m in messages %}{{ m }}{{ m.reasoning_content }}{{ m.thinking }}|{% endfor %}")
    messages = [
        {"role": "user", "content": "x", "name": None},
        {"role": "assistant", "content": "y", "reasoning": "because"},
        {"role": "assistant", "content": "y", "reasoning_content": None, "thinking": "so"},
    ]
    assert_same_text(folder, [messages])


def test_structured_content_reaches_the_template(folder):
    set_template(folder, "{% for p in messages[0].content %}{{ p.text if p.type == 'text' else '?' }}{% endfor %}")
    assert_same_text(folder, [[{"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "image"}]}]])


def test_the_date_can_be_fixed(folder):
    set_template(folder, "{{ strftime_now('%d %b %Y') }}")
    assert Tokenizer.load(folder).render_chat(CONVERSATION, now=datetime(2024, 7, 26)) == "26 Jul 2024"


def test_rendering_leaves_the_messages_as_they_were(folder):
    messages = [{"role": "user", "content": "x", "name": None, "thinking": "so"}]
    Tokenizer.load(folder).render_chat(messages)
    assert messages == [{"role": "user", "content": "x", "name": None, "thinking": "so"}]


@pytest.mark.parametrize("template", [None, [{"name": "tool_use", "template": "x"}]], ids=["none", "no default"])
def test_without_a_default_template_there_is_no_chat(folder, template):
    set_template(folder, template)
    tokenizer = Tokenizer.load(folder)
    assert not tokenizer.has_chat_template and tokenizer.template_hash() is None
    with pytest.raises(UnsupportedCheckpoint, match="the checkpoint has no chat template"):
        tokenizer.render_chat(CONVERSATION)


def test_a_template_that_is_not_jinja_is_damage(folder):
    set_template(folder, "line one\n{% for m in messages %}")
    with pytest.raises(DamagedCheckpoint, match="the chat template of the checkpoint cannot be read") as error:
        Tokenizer.load(folder).render_chat(CONVERSATION)
    assert error.value.found.startswith("line 2: ")


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("{{ raise_exception('roles must alternate') }}", "TemplateError: roles must alternate"),
        ("{{ messages[0].content.missing.field }}", "UndefinedError"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ],
)
def test_messages_that_the_template_refuses_are_an_input_error(folder, template, found):
    set_template(folder, template)
    with pytest.raises(InputError, match="the chat template cannot render these messages") as error:
        Tokenizer.load(folder).render_chat(CONVERSATION)
    assert found in error.value.found


@pytest.mark.parametrize(
    "template", ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{{ raise_exception.__globals__.os }}"]
)
def test_a_template_cannot_leave_the_sandbox(folder, template):
    set_template(folder, template)
    with pytest.raises(UnsupportedCheckpoint, match="the chat template does what the sandbox forbids"):
        Tokenizer.load(folder).render_chat(CONVERSATION)


@pytest.mark.parametrize("messages", [[], "hi", {"role": "user"}, ["hi"], None])
def test_what_is_not_a_list_of_messages_is_an_input_error(folder, messages):
    with pytest.raises(InputError, match="these are not chat messages"):
        Tokenizer.load(folder).render_chat(messages)
