"""Every row becomes a work item or a refusal with a stable code; nothing is renumbered and nothing disappears."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import BOS, EOS, LIMITS, VOCAB_SIZE, byte_tokenizer
from tensorrt_llm_ext.fingerprint import token_hash
from tensorrt_llm_ext.inputs import AcceptedRow, Fields, RefusedRow, items, token_policy, work_items
from tensorrt_llm_ext.inputs.lines import _parsed
from tensorrt_llm_ext.inputs.rows import Row

CHAT = Fields(messages="chat")


def codes_of(rows):
    return [row.refusal.code if isinstance(row, RefusedRow) else None for row in rows]


def tokens_of(row):
    assert isinstance(row, AcceptedRow), row.refusal
    return row.item.token_ids.tolist()


def test_a_row_becomes_a_work_item_with_its_identity(read, jsonl, tokenizer):
    first, second = read(jsonl('{"text": "hello"}', '{"text": "hé"}'))
    (expected,) = tokenizer.encode_batch(["hé"], True)
    assert (first.number, second.number) == (0, 1)
    assert second.item.request_id == "1" and second.item.work_item_id == "prompts.jsonl#1"
    assert np.array_equal(second.item.token_ids, expected) and second.item.token_ids.dtype == np.int32
    assert second.item.token_hash == token_hash(expected) and second.item.truncated_from is None
    with pytest.raises(ValueError, match="read-only"):
        second.item.token_ids[0] = 5


BAD_ROWS = [  # (what the line holds, the code of its refusal)
    ('{"id": "a", "text": "good"}', None),
    ("", "empty_row"),
    ("{not json", "not_json"),
    ('["a", "list"]', "not_an_object"),
    ('{"id": "b"}', "missing_field"),
    ('{"id": "b", "text": null}', "missing_field"),
    ('{"text": "no id"}', "missing_field"),
    ('{"id": "b", "text": 5}', "not_text"),
    ('{"id": "b", "text": ["a"]}', "not_text"),
    ('{"id": "b", "text": ""}', "empty_prompt"),
    ('{"id": "b", "text": "lone \\ud800 surrogate"}', "lone_surrogate"),
    ('{"id": "\\udfff", "text": "a"}', "lone_surrogate"),
    (json.dumps({"id": "b", "text": "x" * 64}), "too_long"),  # 65 tokens with the first special one
    ('{"id": "", "text": "a"}', "bad_request_id"),
    ('{"id": true, "text": "a"}', "bad_request_id"),
    ('{"id": 1.5, "text": "a"}', "bad_request_id"),
    ('{"id": {}, "text": "a"}', "bad_request_id"),
    ('{"id": "a", "text": "good"}', "duplicate_id"),
    ('{"id": "a", "text": "other"}', "conflicting_id"),
    (b'{"id": "b", "text": "\xff"}', "not_utf8"),
    ('{"id": "b", "text": "good, and the refused rows did not take its id"}', None),
    (json.dumps({"id": 7, "text": "x" * 63}), None),
]


def test_every_bad_row_of_one_file_is_refused_with_its_line_and_moves_no_other(read, jsonl):
    rows = read(jsonl(*(line for line, _ in BAD_ROWS)), Fields(request_id="id"))
    assert codes_of(rows) == [code for _, code in BAD_ROWS]
    assert [row.number for row in rows] == list(range(len(BAD_ROWS)))
    for row in rows:
        if isinstance(row, RefusedRow):
            assert row.line == row.number + 1
            assert row.refusal.what and row.refusal.expected and row.refusal.found and row.refusal.fix
    assert [row.item.request_id for row in rows if isinstance(row, AcceptedRow)] == ["a", "b", "7"]


@pytest.mark.parametrize(
    "ids, code",
    [
        ("[5, 6]", None),
        ("[]", "empty_prompt"),
        ("5", "bad_ids"),
        ('"5"', "bad_ids"),
        ("[5.0]", "bad_ids"),
        ("[true]", "bad_ids"),
        ("[null]", "bad_ids"),
        ("[[5]]", "bad_ids"),
        ("[-1]", "outside_vocabulary"),
        (f"[{VOCAB_SIZE}]", "outside_vocabulary"),
        (f"[0, {VOCAB_SIZE - 1}]", None),
        ("[1e3]", "bad_ids"),
        (f"[{2**31}]", "outside_vocabulary"),
        (f"[{2**70}]", "outside_vocabulary"),
        (str([5] * 64), None),
        (str([5] * 65), "too_long"),
    ],
)
def test_token_ids_are_checked(read, jsonl, ids, code):
    (row,) = read(jsonl(f'{{"ids": {ids}}}'), Fields(ids="ids"))
    assert codes_of([row]) == [code]
    if code is None:
        assert tokens_of(row) == json.loads(ids)


@pytest.mark.parametrize(
    "chat, code",
    [
        ([{"role": "user", "content": "hi"}], None),
        ([], "bad_messages"),
        ("hi", "bad_messages"),
        ({"role": "user", "content": "hi"}, "bad_messages"),
        (["hi"], "bad_messages"),
        ([{"content": "hi"}], "bad_messages"),
        ([{"role": "user"}], "bad_messages"),
        ([{"role": "user", "content": None}], "bad_messages"),
        ([{"role": "user", "content": 5}], "bad_messages"),
        ([{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "bad_messages"),
        ([{"role": "user", "content": "hi"}, {"role": 1, "content": "hi"}], "bad_messages"),
        ([{"role": "nobody", "content": "hi"}], "template_failed"),
        ([{"role": "user", "content": "\ud800"}], "lone_surrogate"),
    ],
)
def test_messages_are_checked(read, jsonl, chat, code):
    assert codes_of(read(jsonl(json.dumps({"chat": chat})), CHAT)) == [code]


def test_which_message_is_wrong_is_said(read, jsonl):
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": 5}]
    (row,) = read(jsonl(json.dumps({"chat": chat})), CHAT)
    assert row.refusal.found.endswith("as message 1")


def test_messages_become_what_the_template_renders_without_further_special_tokens(read, jsonl, tokenizer):
    chat = [{"role": "user", "content": "hi"}]
    (row,) = read(jsonl(json.dumps({"chat": chat})), CHAT)
    (expected,) = tokenizer.encode_batch(["<s>user\nhi</s>\n"], False)
    assert tokens_of(row) == expected.tolist() and tokens_of(row).count(BOS) == 1
    (prompted,) = read(jsonl(json.dumps({"chat": chat})), CHAT, add_generation_prompt=True)
    assert len(tokens_of(prompted)) == len(expected) + len("assistant\n") + 1


def test_a_template_that_writes_the_date_writes_the_policy_s(jsonl):
    tokenizer = byte_tokenizer(template="{{ strftime_now('%Y-%m-%d') }}")
    policy = token_policy(CHAT, tokenizer, LIMITS)
    policy = type(policy)(**{**policy.to_dict(), "template_date": "2020-02-29"})
    rows = [Row(0, 1, {"chat": [{"role": "user", "content": "hi"}]})]
    (row,) = work_items(rows, CHAT, tokenizer, policy, vocab_size=VOCAB_SIZE, source="x")
    (expected,) = tokenizer.encode_batch(["2020-02-29"], False)
    assert tokens_of(row) == expected.tolist()


def test_a_prefix_and_no_special_tokens(read, jsonl, tokenizer):
    (row,) = read(jsonl('{"text": "hello"}'), prefix="query: ", special_tokens="none")
    (expected,) = tokenizer.encode_batch(["query: hello"], False)
    assert tokens_of(row) == expected.tolist()


def test_an_empty_text_is_refused_even_where_a_prefix_or_a_special_token_would_stand(read, jsonl):
    assert codes_of(read(jsonl('{"text": ""}'), prefix="query: ")) == ["empty_prompt"]


@pytest.mark.parametrize(
    "ends, too_long, kept",
    [
        ("<s> $A </s>", "truncate-left", [BOS, "c", "d", EOS]),
        ("<s> $A </s>", "truncate-right", [BOS, "a", "b", EOS]),
        ("$A", "truncate-left", ["a", "b", "c", "d"]),
        ("<s> $A", "truncate-right", [BOS, "a", "b", "c"]),
        ("$A </s>", "truncate-left", ["b", "c", "d", EOS]),
    ],
)
def test_a_truncation_is_counted_and_keeps_the_special_tokens_at_the_ends(read, jsonl, ends, too_long, kept):
    tokenizer = byte_tokenizer(ends=ends)
    letters = {letter: int(tokenizer.encode_batch([letter], False)[0][0]) for letter in "abcd"}
    (row,) = read(jsonl('{"text": "abcd"}'), tokenizer=tokenizer, max_length=4, too_long=too_long)
    assert tokens_of(row) == [letters.get(token, token) for token in kept]
    is_cut = ends != "$A"
    assert row.item.truncated_from == (4 + ends.count("s>") if is_cut else None)
    assert row.item.token_hash == token_hash(row.item.token_ids)


def test_token_ids_are_truncated_at_the_side_asked_for(read, jsonl):
    path = jsonl('{"ids": [5, 6, 7]}')
    for too_long, kept in (("truncate-left", [6, 7]), ("truncate-right", [5, 6])):
        (row,) = read(path, Fields(ids="ids"), max_length=2, too_long=too_long)
        assert tokens_of(row) == kept and row.item.truncated_from == 3


def test_nothing_is_truncated_unless_asked(read, jsonl):
    (row,) = read(jsonl('{"text": "abcd"}'), max_length=4)
    assert row.refusal.code == "too_long"
    assert (row.refusal.expected, row.refusal.found) == ("at most 4 tokens", "5 tokens")


def test_a_text_of_which_nothing_would_be_left_is_too_long(read, jsonl):
    tokenizer = byte_tokenizer(ends="<s> $A </s>")
    rows = read(jsonl('{"text": "ab"}'), tokenizer=tokenizer, max_length=2, too_long="truncate-left")
    assert codes_of(rows) == ["too_long"]


def test_the_grouping_for_the_tokenizer_changes_nothing(read, jsonl, monkeypatch):
    path = jsonl(*(json.dumps({"id": i % 50, "text": "x" * (i % 100)}) for i in range(300)))
    whole = read(path, Fields(request_id="id"))
    monkeypatch.setattr(items, "_BATCH_ROWS", 7)
    monkeypatch.setattr(items, "_BATCH_CHARACTERS", 100)
    grouped = read(path, Fields(request_id="id"))
    assert codes_of(grouped) == codes_of(whole)
    assert {"duplicate_id", "conflicting_id", "too_long", "empty_prompt"} < set(codes_of(whole))
    assert [tokens_of(row) for row in grouped if isinstance(row, AcceptedRow)] == [
        tokens_of(row) for row in whole if isinstance(row, AcceptedRow)
    ]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content"]), inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(st.sampled_from(["id", "text", "chat", "ids"]), json_values).map(json.dumps)
lines = objects | st.text().filter(lambda line: "\n" not in line) | st.binary().map(lambda line: line.decode("latin-1"))
field_choices = st.sampled_from(
    [Fields(), CHAT, Fields(ids="ids"), Fields(request_id="id"), Fields(ids="ids", request_id="id")]
)


@settings(deadline=None)
@given(st.lists(lines, max_size=12), field_choices)
def test_arbitrary_lines_never_crash_and_every_row_comes_back_once_in_order(lines, fields):
    tokenizer = byte_tokenizer()
    policy = token_policy(fields, tokenizer, LIMITS)
    rows = [Row(number, number + 1, _parsed(line)) for number, line in enumerate(lines)]
    judged = list(work_items(rows, fields, tokenizer, policy, vocab_size=VOCAB_SIZE, source="x"))
    assert [row.number for row in judged] == list(range(len(lines)))
    accepted = [row.item for row in judged if isinstance(row, AcceptedRow)]
    assert len({item.request_id for item in accepted}) == len(accepted)
    for item in accepted:
        assert 1 <= len(item.token_ids) <= LIMITS.max_seq_len
        assert 0 <= item.token_ids.min() and item.token_ids.max() < VOCAB_SIZE
        item.request_id.encode()
    for row in judged:
        if isinstance(row, RefusedRow):
            json.dumps(row.refusal.to_dict())
