"""A payload is readable alone and anywhere, gives the same record back, and a damaged one is refused."""

import json
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load, save

from tensorrt_llm_ext.errors import StoreError
from tensorrt_llm_ext.fingerprint import fingerprint
from tensorrt_llm_ext.results import Origin, Record, State, payload_from_record, record_from_payload, row_hashes, rows_hash
from tensorrt_llm_ext.taps import Tap

NUM_LAYERS, HIDDEN_SIZE, NUM_TOKENS = 4, 6, 3
LAST, PRE_ALL, MIDDLE = Tap(4, "post", "last"), Tap(4, "pre", "all"), Tap(2, "pre", "mean")
ORIGIN = Origin(
    "tiny",
    "sha256:c",
    NUM_LAYERS,
    HIDDEN_SIZE,
    "sha256:t",
    "tokenizer",
    None,
    None,
    "sha256:e",
    "ort",
    "prefix_sum",
    "0.1",
)


def state(tap, dtype="float32", seed=0):
    num_rows = NUM_TOKENS if tap.rows == "all" else 1
    rows = np.random.default_rng(seed).normal(size=(num_rows, HIDDEN_SIZE)).astype(np.dtype(dtype))
    return State(tap, rows, computed_dtype="bfloat16", payload_hash=rows_hash(rows))


def a_record(*states, **changed):
    fields = dict(
        request_id="r-1", work_item_id="row 1", token_hash="sha256:h", num_tokens=NUM_TOKENS, truncated_from=None,
        states=states or (state(LAST), state(PRE_ALL, "float16"), state(MIDDLE, "bfloat16")), origin=ORIGIN,
    )  # fmt: skip
    return Record(**{**fields, **changed})


def with_header(payload, **changed):
    """The same container with metadata fields replaced, or removed where None, and hashed again."""
    length = int.from_bytes(payload[:8], "little")
    header = json.loads(payload[8 : 8 + length])
    fields = {k: v for k, v in {**header["__metadata__"], **changed}.items() if v is not None and k != "header_hash"}
    header["__metadata__"] = {**fields, "header_hash": fingerprint(fields)}
    written = json.dumps(header).encode()
    return len(written).to_bytes(8, "little") + written + payload[8 + length :]


def assert_same(one, other):
    assert replace(one, states=()) == replace(other, states=())
    assert len(one.states) == len(other.states) > 0
    for left, right in zip(one.states, other.states):
        assert (left.tap, left.computed_dtype, left.payload_hash) == (
            right.tap,
            right.computed_dtype,
            right.payload_hash,
        )
        assert left.rows.dtype == right.rows.dtype and left.rows.tobytes() == right.rows.tobytes()


@pytest.mark.parametrize(
    "record",
    [
        a_record(),
        a_record(state(MIDDLE), state(LAST)),
        a_record(
            truncated_from=99, request_id="ключ ✓", origin=replace(ORIGIN, template_hash="sha256:x", prefix="query: ")
        ),
        a_record(request_id="", work_item_id="null", origin=replace(ORIGIN, prefix="")),
    ],
    ids=["three dtypes", "tap order", "optional fields", "empty text"],
)
def test_a_record_survives_its_payload(record):
    assert_same(record_from_payload(payload_from_record(record)), record)


def test_the_rows_that_are_read_cannot_be_written_to():
    rows = record_from_payload(payload_from_record(a_record())).states[0].rows
    assert not rows.flags.writeable


def test_plain_safetensors_reads_rows_and_header(tmp_path):
    record = a_record(state(LAST), state(PRE_ALL))
    path = tmp_path / "record.safetensors"
    path.write_bytes(payload_from_record(record))
    with safe_open(path, framework="np") as file:
        assert sorted(file.keys()) == ["final_post_last", "final_pre_all"]
        assert np.array_equal(file.get_tensor("final_pre_all"), record.states[1].rows)
        header = file.metadata()
    assert (
        header["request_id"] == "r-1" and header["engine_fingerprint"] == "sha256:e" and header["format_version"] == "1"
    )
    assert json.loads(header["states"])[0] == {
        "column": "final_post_last",
        "tap": {"layer": 4, "norm": "post", "rows": "last"},
        "computed_dtype": "bfloat16",
        "payload_hash": record.states[0].payload_hash,
    }


def test_torch_reads_bfloat16_rows(tmp_path):
    record = a_record(state(LAST, "bfloat16"))
    path = tmp_path / "record.safetensors"
    path.write_bytes(payload_from_record(record))
    with safe_open(path, framework="pt") as file:
        rows = file.get_tensor("final_post_last").float().numpy()
    assert np.array_equal(rows, record.states[0].rows.astype(np.float32))


@settings(max_examples=300)
@given(st.data())
def test_no_damaged_byte_of_a_payload_is_read_as_a_record(data):
    record = a_record()
    payload = bytearray(payload_from_record(record))
    at = data.draw(st.integers(0, len(payload) - 1))
    payload[at] ^= data.draw(st.integers(1, 255))
    try:
        read = record_from_payload(bytes(payload))
    except StoreError:
        return
    assert_same(read, record)  # white space between the header's fields


@pytest.mark.parametrize("cut", [0, 4, 100, -1])
def test_a_truncated_payload_is_refused(cut):
    with pytest.raises(StoreError, match="not a whole safetensors container"):
        record_from_payload(payload_from_record(a_record())[:cut])


def test_a_header_that_was_edited_is_refused_by_its_hash():
    payload = payload_from_record(a_record()).replace(b'"r-1"', b'"r-2"')
    with pytest.raises(StoreError, match="header is not the one that was hashed"):
        record_from_payload(payload)


def test_flipped_rows_are_refused_by_their_hash():
    payload = bytearray(payload_from_record(a_record()))
    payload[-1] ^= 1
    with pytest.raises(StoreError, match="are not those that were hashed"):
        record_from_payload(bytes(payload))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"format_version": "2"}, "format_version 2"),
        ({"format": None}, "not a record payload"),
        ({"request_id": None}, "lacks a field"),
        ({"num_tokens": "three"}, "lacks a field or holds another type"),
        ({"num_tokens": "4"}, "not the state its header describes"),
        ({"hidden_size": "5"}, "not the state its header describes"),
        ({"num_layers": "5"}, "not the state its header describes"),
        ({"states": "{"}, "lacks a field or holds another type"),
        ({"states": "[]"}, "tensors its header does not name"),
    ],
)
def test_a_header_that_does_not_describe_the_rows_is_refused(changed, words):
    with pytest.raises(StoreError, match=words):
        record_from_payload(with_header(payload_from_record(a_record()), **changed))


def test_another_safetensors_file_is_refused_as_what_it_is():
    with pytest.raises(StoreError, match="not a record payload"):
        record_from_payload(save({"weight": np.ones((2, 2))}))


def test_a_state_of_an_integer_type_is_refused():
    payload = payload_from_record(a_record(state(LAST)))
    length = int.from_bytes(payload[:8], "little")
    header = payload[8 : 8 + length].replace(b'"F32"', b'"I32"')
    with pytest.raises(StoreError, match="dtype I32"):
        record_from_payload(payload[:8] + header + payload[8 + length :])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_the_hashes_of_many_rows_are_those_of_each_row(dtype):
    rows = np.random.default_rng(0).normal(size=(5, 10)).astype(dtype)
    for many in (rows, rows[1:], rows[:, ::2], rows[:0]):
        assert row_hashes(many) == [rows_hash(many[i : i + 1]) for i in range(len(many))]


def test_two_records_with_the_same_bytes_in_another_dtype_have_other_hashes():
    bits = np.arange(4, dtype=np.uint16).reshape(1, 4)
    assert rows_hash(bits.view(np.float16)) != rows_hash(bits.view(ml_dtypes.bfloat16))
    assert load(payload_from_record(a_record(state(LAST)))).keys() == {"final_post_last"}
