"""The token policy is settled once, and what cannot be is refused before the first row."""

import pytest

from fakes import LIMITS, byte_tokenizer
from tensorrt_llm_ext.errors import InputError
from tensorrt_llm_ext.inputs import Fields, TokenPolicy, token_policy

TEXT, CHAT, IDS = Fields(), Fields(messages="chat"), Fields(ids="ids")


@pytest.mark.parametrize("fields, expected", [(TEXT, "tokenizer"), (CHAT, "none"), (IDS, "given")])
def test_special_tokens_follow_the_kind_of_prompt(tokenizer, fields, expected):
    assert token_policy(fields, tokenizer, LIMITS).special_tokens == expected


def test_an_asked_policy_is_kept(tokenizer):
    assert token_policy(CHAT, tokenizer, LIMITS, special_tokens="tokenizer").special_tokens == "tokenizer"
    assert token_policy(TEXT, tokenizer, LIMITS, special_tokens="none", prefix="query: ").prefix == "query: "


def test_the_template_is_named_only_where_it_is_applied(tokenizer):
    assert token_policy(CHAT, tokenizer, LIMITS).template_hash == tokenizer.template_hash()
    assert token_policy(TEXT, tokenizer, LIMITS).template_hash is None


def test_the_length_is_by_default_what_the_engine_takes(tokenizer):
    assert token_policy(TEXT, tokenizer, LIMITS).max_length == 64
    assert token_policy(TEXT, tokenizer, LIMITS, max_length=10).max_length == 10


@pytest.mark.parametrize("max_length", [0, -1, 65])
def test_a_length_that_the_engine_cannot_take_is_refused(tokenizer, max_length):
    with pytest.raises(InputError, match="--max-length is beyond what the engine takes") as caught:
        token_policy(TEXT, tokenizer, LIMITS, max_length=max_length)
    assert caught.value.expected == "1 to 64 tokens"


@pytest.mark.parametrize(
    "fields, options, option",
    [
        (CHAT, {"prefix": "query: "}, "--prefix"),
        (IDS, {"prefix": "query: "}, "--prefix"),
        (IDS, {"special_tokens": "none"}, "--special-tokens"),
        (TEXT, {"add_generation_prompt": True}, "--add-generation-prompt"),
    ],
)
def test_an_option_without_a_meaning_is_refused(tokenizer, fields, options, option):
    with pytest.raises(InputError, match=f"{option} has no meaning here"):
        token_policy(fields, tokenizer, LIMITS, **options)


def test_messages_need_a_chat_template():
    with pytest.raises(InputError, match="no chat template"):
        token_policy(CHAT, byte_tokenizer(template=None), LIMITS)


def test_a_prefix_of_lone_surrogates_is_refused(tokenizer):
    with pytest.raises(InputError, match="the prefix is not Unicode text"):
        token_policy(TEXT, tokenizer, LIMITS, prefix="\ud800")


def test_a_policy_survives_its_own_dictionary(tokenizer):
    policy = token_policy(CHAT, tokenizer, LIMITS, too_long="truncate-left")
    assert TokenPolicy.from_dict(policy.to_dict()) == policy
