"""Messages: work items and answers as they travel. Data only: JSON, and safetensors for rows; nothing is ever executed.

A **work item** is one JSON object: ``format``, ``format_version``, ``request_id``, ``work_item_id``, ``token_ids``,
``token_hash``, ``contract_version`` (of what the stream asks for), ``truncated_from`` where tokens were cut, and
``loss_mask``, text of a 0 or 1 for each token, where the stream's token policy makes one.

An **answer** is a record's payload (``results.payload``), a **reference** to one that is too large for a message
(``reference``), or a **refusal**, one JSON object that says why there is no record. Its headers name the work item's
sequence, the contract version and the format.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np

from tensorrt_llm_ext.errors import ExtractionError, Refusal, StoreError
from tensorrt_llm_ext.fingerprint import fingerprint, token_hash
from tensorrt_llm_ext.inputs import Fields, Row
from tensorrt_llm_ext.inputs.fields import request_id_of_row, token_ids_of_row, unicode_checked
from tensorrt_llm_ext.results import Failure, Record, WorkItem, payload_from_record, record_from_payload
from tensorrt_llm_ext.results.payload import FORMAT as RECORD_FORMAT
from tensorrt_llm_ext.worker import reference
from tensorrt_llm_ext.worker.broker import Delivery, Message, reference_subject, results_subject, work_subject
from tensorrt_llm_ext.worker.reference import Reference, reference_from_json
from tensorrt_llm_ext.worker.wanted import Wanted

WORK_FORMAT = "tensorrt_llm_ext.work"
REFUSAL_FORMAT = "tensorrt_llm_ext.refusal"
FORMAT_VERSION = 1

SEQUENCE_HEADER = "Extract-Work-Sequence"
VERSION_HEADER = "Extract-Contract-Version"
FORMAT_HEADER = "Extract-Format"

_FIELDS = Fields(ids="token_ids", request_id="request_id")
_REQUIRED = ("format", "format_version", "request_id", "work_item_id", "token_ids", "token_hash", "contract_version")
_KNOWN = {*_REQUIRED, "truncated_from", "loss_mask"}
_PLAIN_ID_CHARACTERS = 128
_MAX_ID_CHARACTERS = 4096  # of a request id and of a work item's id: every answer and every refusal repeats them


@dataclass(frozen=True)
class Outcome:
    """Why a work item has no record: ``refused`` before it ran, or ``failed`` when it did."""

    kind: str
    request_id: str | None  # None where the message does not say it
    work_item_id: str | None
    code: str
    what: str
    expected: str = ""
    found: str = ""
    fix: str = ""

    @classmethod
    def of_refusal(cls, refusal: Refusal, request_id: str | None, work_item_id: str | None = None) -> Outcome:
        error = ExtractionError.to_dict(refusal)
        del error["error"]
        return cls("refused", request_id, work_item_id, refusal.code, **error)

    @classmethod
    def of_failure(cls, failure: Failure) -> Outcome:
        return cls("failed", failure.request_id, failure.work_item_id, failure.code, failure.reason)


@dataclass(frozen=True)
class Answer:
    """What a partition's writer reads: a record, or where it lies, or the reason for none; and the work item it answers."""

    sequence: int
    contract_version: str
    content: Record | Reference | Outcome
    num_bytes: int = 0  # of the message, and of the rows it refers to


def message_from_work(item: WorkItem, wanted: Wanted, priority: str) -> Message:
    """Write a work item for a stream."""
    value = {
        "format": WORK_FORMAT,
        "format_version": FORMAT_VERSION,
        "request_id": item.request_id,
        "work_item_id": item.work_item_id,
        "token_ids": item.token_ids.tolist(),
        "token_hash": item.token_hash,
        "contract_version": wanted.version,
    }
    if item.truncated_from is not None:
        value["truncated_from"] = item.truncated_from
    if item.loss_mask is not None:
        value["loss_mask"] = "".join("1" if learnt else "0" for learnt in item.loss_mask)
    lane = wanted.lane_of(len(item.token_ids), priority)
    body = json.dumps(value, separators=(",", ":")).encode()
    return Message(work_subject(lane, item.request_id), body, {FORMAT_HEADER: WORK_FORMAT}, is_first=True)


def work_from_body(body: bytes, wanted: Wanted) -> WorkItem:
    """Read a work item. Raises Refusal with a code and the numbers for anything that is not one this stream serves."""
    value = _object(body, wanted.settings.max_message_bytes)
    _check_fields(value, wanted)
    row = Row(0, None, value)
    request_id = request_id_of_row(row, _FIELDS)
    check_ids(request_id, value["work_item_id"])
    token_ids = token_ids_of_row(row, _FIELDS.ids)
    _check_tokens(token_ids, wanted)
    token_ids = token_ids.astype(np.int32)
    token_ids.flags.writeable = False
    if (found := token_hash(token_ids)) != value["token_hash"]:
        raise _refusal("token_hash", "the token ids are not those that were hashed", value["token_hash"], found)
    loss_mask = _loss_mask(value.get("loss_mask"), len(token_ids), wanted)
    return WorkItem(request_id, value["work_item_id"], token_ids, found, value.get("truncated_from"), loss_mask)


def request_id_of(body: bytes, max_bytes: int) -> str | None:
    """The request id of a message that was refused, where it says one that can be repeated."""
    try:
        request_id = request_id_of_row(Row(0, None, _object(body, max_bytes)), _FIELDS)
        check_ids(request_id)
    except Refusal:
        return None
    return request_id


def check_ids(*ids: str) -> None:
    """Raise Refusal for an id too long to be repeated in every message about it."""
    for text in ids:
        if len(text) > _MAX_ID_CHARACTERS:
            found = f"{len(text):,} characters: {text[:40]!r}…"
            raise _refusal("id_too_long", "an id is too long", f"at most {_MAX_ID_CHARACTERS:,} characters", found)


def message_from_answer(content: Record | Reference | Outcome, sequence: int, wanted: Wanted) -> Message:
    """Write an answer. Its message id is the request id and the work item's sequence: one answer for one work item.

    A reference's is that and its first chunk: its rows may be gone, and then another to the same item's must get through.
    """
    partition = partition_of_answer(content.request_id, sequence, wanted)
    message_id = f"{_header_safe(content.request_id)}@{sequence}"
    if isinstance(content, Record):
        subject, format, body = results_subject(partition, "record"), RECORD_FORMAT, payload_from_record(content)
    elif isinstance(content, Reference):
        subject, format, body = reference_subject(partition, sequence), reference.FORMAT, content.to_json()
        message_id += f"@{content.chunks[0]}"
    else:
        subject, format, body = results_subject(partition, "refusal"), REFUSAL_FORMAT, _outcome_body(content)
    headers = {FORMAT_HEADER: format, SEQUENCE_HEADER: str(sequence), VERSION_HEADER: wanted.version}
    return Message(subject, body, headers, message_id=message_id)


def partition_of_answer(request_id: str | None, sequence: int, wanted: Wanted) -> int:
    """The partition that settles a work item: by its request id; by its sequence where nothing says the id."""
    return wanted.partition_of(str(sequence) if request_id is None else request_id)


def answer_from_delivery(delivery: Delivery) -> Answer:
    """Read an answer. Raises StoreError when it is damaged or is none."""
    try:
        sequence = int(delivery.headers[SEQUENCE_HEADER])
        if not 0 < sequence < 1 << 63:
            raise ValueError(f"{SEQUENCE_HEADER} {sequence}")
        version, format = delivery.headers[VERSION_HEADER], delivery.headers[FORMAT_HEADER]
        if format == RECORD_FORMAT:
            return Answer(sequence, version, record_from_payload(delivery.body), len(delivery.body))
        if format == reference.FORMAT:
            content = reference_from_json(delivery.body)
            return Answer(sequence, version, content, len(delivery.body) + content.num_bytes)
        value = json.loads(delivery.body)
        if (found := (value.pop("format"), value.pop("format_version"))) != (REFUSAL_FORMAT, FORMAT_VERSION):
            raise ValueError(f"format {found}")
        return Answer(sequence, version, Outcome(**value), len(delivery.body))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise StoreError(
            "a message among the results is not an answer",
            expected=f"a {RECORD_FORMAT}, a {reference.FORMAT} or a {REFUSAL_FORMAT}, with the headers {SEQUENCE_HEADER} and {VERSION_HEADER}",
            found=f"{type(error).__name__}: {error}"[:500],
            fix="only workers of this release may publish results",
        ) from error


def _object(body: bytes, max_bytes: int) -> dict:
    if len(body) > max_bytes:
        raise _refusal("too_large", "the message is too large", f"at most {max_bytes:,} bytes", f"{len(body):,} bytes")
    try:
        value = json.loads(body.decode(), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise _refusal("not_utf8", "the message is not UTF-8 text", "UTF-8", str(error)[:200]) from error
    except (ValueError, RecursionError) as error:  # ValueError: a number of thousands of digits, too
        raise _refusal("not_json", "the message is not JSON", "one JSON object", str(error)[:200]) from error
    if not isinstance(value, dict):
        raise _refusal("not_an_object", "the message is not a JSON object", "an object", type(value).__name__)
    return value


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _check_fields(value: dict, wanted: Wanted) -> None:
    found = (value.get("format"), value.get("format_version"))
    if found != (WORK_FORMAT, FORMAT_VERSION):
        raise _refusal("wrong_format", "the message is not a work item", f"{WORK_FORMAT} {FORMAT_VERSION}", repr(found)[:200])
    for name in _REQUIRED:
        if value.get(name) is None:
            raise _refusal("missing_field", f"the work item has no '{name}'", ", ".join(_REQUIRED), ", ".join(value)[:500])
    if unknown := sorted(value.keys() - _KNOWN):
        raise _refusal("unknown_field", "the work item has fields nobody reads", ", ".join(sorted(_KNOWN)), repr(unknown)[:200])
    for name in ("work_item_id", "token_hash", "contract_version"):
        if not isinstance(value[name], str):
            raise _refusal("bad_field", f"'{name}' is not text", "a string", type(value[name]).__name__)
    unicode_checked(value["work_item_id"], "work_item_id")
    cut_from = value.get("truncated_from")
    if cut_from is not None and (type(cut_from) is not int or not 0 < cut_from < 1 << 31):
        raise _refusal("bad_field", "'truncated_from' is not a number of tokens", "a whole number", repr(cut_from)[:80])
    if value["contract_version"] != wanted.version:
        raise _refusal("wrong_contract", "the item was made for another contract", wanted.version, value["contract_version"][:100])


def _check_tokens(token_ids: np.ndarray, wanted: Wanted) -> None:
    limit, vocab_size = wanted.policy.max_length, wanted.contract.architecture.vocab_size
    if not len(token_ids):
        raise _refusal("empty_prompt", "the prompt is empty", "at least one token", "no token")
    if len(token_ids) > limit:
        raise _refusal("too_long", "the prompt is too long", f"at most {limit:,} tokens", f"{len(token_ids):,} tokens")
    outside = np.flatnonzero((token_ids < 0) | (token_ids >= vocab_size))
    if len(outside):
        found = f"{token_ids[outside[0]]} at position {outside[0]}"
        raise _refusal("outside_vocabulary", "a token id is outside the model's vocabulary", f"0 to {vocab_size - 1}", found)


def _loss_mask(text: object, num_tokens: int, wanted: Wanted) -> np.ndarray | None:
    """The loss mask that the stream's token policy makes, uint8 [tokens]."""
    if wanted.policy.loss_mask is None and text is None:
        return None
    is_mask = isinstance(text, str) and len(text) == num_tokens and not set(text) - {"0", "1"}
    if wanted.policy.loss_mask is None or not is_mask:
        expected = "none" if wanted.policy.loss_mask is None else f"text of {num_tokens} digits, each 0 or 1"
        raise _refusal("bad_loss_mask", "'loss_mask' is not what the stream's token policy makes", expected, repr(text)[:80])
    return np.array([digit == "1" for digit in text], np.uint8)


def _refusal(code: str, what: str, expected: str, found: str) -> Refusal:
    return Refusal(code, what, expected=expected, found=found, fix="correct the item and submit it under a new request id")


def _outcome_body(outcome: Outcome) -> bytes:
    return json.dumps({"format": REFUSAL_FORMAT, "format_version": FORMAT_VERSION, **vars(outcome)}).encode()


def _header_safe(request_id: str | None) -> str:
    """The request id as a header can carry it: a long one, or one of other characters, by its hash."""
    if request_id is None:
        return ""
    is_plain = request_id.isascii() and request_id.isprintable() and " " not in request_id
    return f"id:{request_id}" if is_plain and len(request_id) <= _PLAIN_ID_CHARACTERS else fingerprint(request_id)
