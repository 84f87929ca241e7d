"""Identities hash the same on every machine, and differ when anything differs."""

import numpy as np
import pytest

from tensorrt_llm_ext.fingerprint import canonical_json, file_fingerprint, fingerprint, token_hash, token_hashes


def test_the_order_of_keys_does_not_change_a_fingerprint_and_a_value_does():
    assert fingerprint({"a": 1, "b": [2, "é"]}) == fingerprint({"b": [2, "é"], "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": 2})


def test_canonical_json_is_ascii_without_spaces():
    assert canonical_json({"b": "é", "a": [1, 2]}) == '{"a":[1,2],"b":"\\u00e9"}'


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_json_lacks_are_refused(value):
    with pytest.raises(ValueError):
        fingerprint({"scale": value})


def test_a_token_hash_is_over_little_endian_int32_whatever_the_type_it_came_in():
    known = "sha256:" + "4636993d3e1da4e9d6b8f87b79e8f7c6d018580d52661950eabc3845c5897a4d"
    assert token_hash(np.array([1, 2, 3], dtype=np.int64)) == token_hash(np.array([1, 2, 3], dtype=">i4")) == known


@pytest.mark.parametrize("dtype", ["<i4", ">i4", "<i8"])
def test_many_token_hashes_are_those_of_each_sequence(dtype):
    token_ids, offsets = np.arange(12, dtype=dtype), np.array([2, 3, 3, 9])
    assert token_hashes(token_ids, offsets) == [token_hash(token_ids[2:3]), token_hash([]), token_hash(token_ids[3:9])]
    assert token_hashes(token_ids[::2], np.array([0, 6])) == [token_hash(token_ids[::2])]
    assert token_hashes(token_ids[:0], np.array([0])) == []


def test_a_file_fingerprint_is_of_its_bytes(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    assert file_fingerprint(tmp_path / "a").endswith("ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad")
