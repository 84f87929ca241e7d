"""Work items and answers as they travel: what is written is read back; anything else is refused with its numbers."""

import dataclasses
import json
import random

import numpy as np
import pytest
from toy_engines import VOCAB_SIZE
from toy_streams import items

from tensorrt_llm_ext.errors import Refusal, StoreError
from tensorrt_llm_ext.results import Failure
from tensorrt_llm_ext.worker.broker import Delivery
from tensorrt_llm_ext.worker.messages import (
    Outcome,
    answer_from_delivery,
    message_from_answer,
    message_from_work,
    request_id_of,
    work_from_body,
)
from fuzzed import fuzzed_bodies

ITEM = items(1)[0]


def value_of(wanted, item=ITEM, **changed):
    return {**json.loads(message_from_work(item, wanted, "normal").body), **changed}


def refused(value, wanted):
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    with pytest.raises(Refusal) as caught:
        work_from_body(body, wanted)
    return caught.value


def delivered(message, sequence=1):
    return Delivery(message.subject, message.body, message.headers, sequence, 1, "reply")


def same(one, other):
    assert np.array_equal(one.token_ids, other.token_ids) and one.token_ids.dtype == other.token_ids.dtype
    for name in ("request_id", "work_item_id", "token_hash", "truncated_from"):
        assert getattr(one, name) == getattr(other, name)


@pytest.mark.parametrize("request_id", ["r0", "grüße 字", "a\r\nNats-Msg-Id: b", "x" * 500, "*.>"])
def test_a_work_item_comes_back_whole_whatever_its_id(wanted, request_id):
    item = dataclasses.replace(ITEM, request_id=request_id, truncated_from=77)
    message = message_from_work(item, wanted, "high")
    back = work_from_body(message.body, wanted)
    same(back, item)
    assert not back.token_ids.flags.writeable
    assert message.subject.isascii() and message.subject.startswith("work.high.") and message.is_first


def test_the_subject_says_priority_and_kind_of_length(wanted):
    assert (wanted.policy.max_length, wanted.long_tokens) == (32, 9)
    long = dataclasses.replace(ITEM, token_ids=np.arange(9, dtype=np.int32))
    short = dataclasses.replace(ITEM, token_ids=np.arange(8, dtype=np.int32))
    assert message_from_work(long, wanted, "low").subject.startswith("work.low.long.")
    assert message_from_work(short, wanted, "low").subject.startswith("work.low.short.")


@pytest.mark.parametrize(
    "change, code, numbers",
    [
        ({"token_ids": list(range(33))}, "too_long", ("at most 32 tokens", "33 tokens")),
        ({"token_ids": []}, "empty_prompt", ("at least one token", "no token")),
        ({"token_ids": [5, VOCAB_SIZE]}, "outside_vocabulary", (f"0 to {VOCAB_SIZE - 1}", f"{VOCAB_SIZE} at position 1")),
        ({"token_ids": [5, -1]}, "outside_vocabulary", (f"0 to {VOCAB_SIZE - 1}", "-1 at position 1")),
        ({"token_ids": [1 << 40]}, "outside_vocabulary", ("", str(1 << 40))),
        ({"token_ids": [1.5]}, "bad_ids", ("a list of integers", "float 1.5")),
        ({"token_ids": [True]}, "bad_ids", ("a list of integers", "bool True")),
        ({"token_ids": "5 6"}, "bad_ids", ("a list of integers", "str")),
        ({"token_ids": [5, 6]}, "token_hash", ("sha256:", "sha256:")),
        ({"contract_version": "sha256:other"}, "wrong_contract", ("sha256:", "sha256:other")),
        ({"request_id": ""}, "bad_request_id", ("a string that is not empty", "''")),
        ({"request_id": ["a"]}, "bad_request_id", ("a string that is not empty", "list")),
        ({"request_id": "\ud800"}, "lone_surrogate", ("no lone surrogate", "character 0")),
        ({"work_item_id": "\ud800"}, "lone_surrogate", ("no lone surrogate", "character 0")),
        ({"work_item_id": 7}, "bad_field", ("a string", "int")),
        ({"truncated_from": "7"}, "bad_field", ("a whole number", "'7'")),
        ({"format_version": 2}, "wrong_format", ("tensorrt_llm_ext.work 1", "2")),
        ({"token_hash": None}, "missing_field", ("token_hash", "token_hash")),
        ({"prompt": "hello"}, "unknown_field", ("token_ids", "prompt")),
    ],
)
def test_an_item_that_cannot_be_served_is_refused_with_its_numbers(wanted, change, code, numbers):
    refusal = refused(value_of(wanted, **change), wanted)
    assert refusal.code == code and numbers[0] in refusal.expected and numbers[1] in refusal.found


@pytest.mark.parametrize(
    "body, code",
    [
        (b"", "not_json"),
        (b"\xff\xfe", "not_utf8"),
        (b"[1]", "not_an_object"),
        (b"{}", "wrong_format"),
        (b'{"a": NaN}', "not_json"),
        (b"[" * 30000, "not_json"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not_json"),
        (b" " * ((1 << 16) + 1), "too_large"),
    ],
)
def test_bytes_that_are_no_item_are_refused(wanted, body, code):
    refusal = refused(body, wanted)
    assert refusal.code == code
    assert request_id_of(body, wanted.settings.max_message_bytes) is None


def test_a_refused_item_keeps_its_request_id_where_it_has_one(wanted):
    body = json.dumps(value_of(wanted, token_ids=[])).encode()
    assert request_id_of(body, 1 << 16) == "r0"


def test_500_fuzzed_messages_are_each_read_or_refused_and_nothing_else(wanted):
    codes = {refused(body, wanted).code for body in fuzzed_bodies(wanted, 500, random.Random(1))}
    assert len(codes) >= 10, codes  # the fuzzing reaches most of the checks


def test_an_answer_comes_back_whole(wanted, session):
    (record,) = session.submit([ITEM]).wait()
    message = message_from_answer(record, 12, wanted)
    answer = answer_from_delivery(delivered(message))
    assert (answer.sequence, answer.contract_version) == (12, wanted.version)
    assert answer.content.origin == record.origin and answer.content.token_hash == ITEM.token_hash
    assert all(np.array_equal(a.rows, b.rows) for a, b in zip(answer.content.states, record.states, strict=True))
    assert message.message_id == "id:r0@12" and message.subject == f"results.{wanted.partition_of('r0')}.record"


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome.of_refusal(Refusal("too_long", "long", expected="8", found="9", fix="cut"), "r1", "file#1"),
        Outcome.of_refusal(Refusal("not_json", "what", expected="8", found="\ud800", fix="cut"), None),
        Outcome.of_failure(Failure("r\n2", "file#2", "not_finite", "2 of 9 values")),
    ],
)
def test_an_outcome_without_a_record_comes_back_whole(wanted, outcome):
    message = message_from_answer(outcome, 3, wanted)
    assert answer_from_delivery(delivered(message)).content == outcome
    assert "\n" not in message.message_id and message.message_id.endswith("@3")


def test_two_request_ids_never_share_a_message_id(wanted):
    ids = ["a", "id:a", "a\n", "a ", "", None, "sha256:a", "x" * 200, "x" * 201]
    made = {message_from_answer(Outcome("failed", i, None, "c", "w"), 1, wanted).message_id for i in ids}
    assert len(made) == len(ids)


@pytest.mark.parametrize("body, headers", [(b"x", {}), (b"x", "own"), (b"{}", "refusal"), (b'{"format": 1}', "refusal"), (b"[]", "refusal")])
def test_a_result_that_is_no_answer_is_an_error(wanted, body, headers):
    own = message_from_answer(Outcome("failed", "a", None, "c", "w"), 1, wanted).headers
    named = {"own": {**own, "Extract-Format": "tensorrt_llm_ext.record"}, "refusal": own}
    with pytest.raises(StoreError):
        answer_from_delivery(Delivery("results.0.record", body, named[headers] if headers else {}, 1, 1, ""))


def test_a_loss_mask_travels_where_the_stream_s_policy_makes_one(wanted):
    masked = dataclasses.replace(wanted, policy=dataclasses.replace(wanted.policy, loss_mask="field"))
    mask = (np.arange(len(ITEM.token_ids)) % 3 == 0).astype(np.uint8)
    value = value_of(masked, dataclasses.replace(ITEM, loss_mask=mask))
    back = work_from_body(json.dumps(value).encode(), masked)
    assert back.loss_mask.tolist() == mask.tolist() and back.loss_mask.dtype == np.uint8
    digits = value["loss_mask"]
    for wrong in (digits[1:], digits + "0", "2" + digits[1:], None, 0, [0] * len(digits), "٠" + digits[1:]):
        refusal = refused({**value, "loss_mask": wrong}, masked)
        assert refusal.code == "bad_loss_mask" and f"text of {len(digits)} digits" in refusal.expected
    assert refused({**value_of(wanted), "loss_mask": digits}, wanted).code == "bad_loss_mask"
    assert work_from_body(json.dumps(value_of(wanted)).encode(), wanted).loss_mask is None


@pytest.mark.parametrize("name", ["request_id", "work_item_id"])
def test_an_id_that_no_answer_could_repeat_is_refused_and_not_repeated(wanted, name):
    value = value_of(wanted, **{name: "é" * 5000})
    refusal = refused(value, wanted)
    assert refusal.code == "id_too_long" and refusal.found.startswith("5,000 characters") and len(refusal.found) < 100
    request_id = request_id_of(json.dumps(value).encode(), wanted.settings.max_message_bytes)
    assert request_id == (None if name == "request_id" else ITEM.request_id)
