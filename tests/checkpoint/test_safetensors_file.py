"""A safetensors header says where each tensor lies, or that the file is broken."""

import json
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from tensorrt_llm_ext.checkpoint.safetensors_file import stored_tensors
from tensorrt_llm_ext.errors import CheckpointError, DamagedCheckpoint


def written(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def test_the_place_of_a_tensor_holds_its_bytes(tmp_path):
    tensors = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.arange(4, dtype=np.float16)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    stored = stored_tensors(tmp_path / "x.safetensors")
    assert stored.keys() == tensors.keys()
    content = (tmp_path / "x.safetensors").read_bytes()
    for name, tensor in tensors.items():
        place = stored[name]
        assert place.shape == tensor.shape
        assert content[place.offset : place.offset + place.length] == tensor.tobytes()


@pytest.mark.parametrize("size", [0, 4, 8, 20, -1], ids=["empty", "no length", "no header", "half header", "half data"])
def test_a_truncated_file_is_damage(tmp_path, size):
    save_file({"a": np.arange(4, dtype=np.float16)}, tmp_path / "x.safetensors")
    content = (tmp_path / "x.safetensors").read_bytes()
    (tmp_path / "x.safetensors").write_bytes(content[:size])
    with pytest.raises(DamagedCheckpoint, match="is truncated"):
        stored_tensors(tmp_path / "x.safetensors")


def test_a_file_with_more_than_its_header_says_is_damage(tmp_path):
    path = written(tmp_path / "x", {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"\0" * 5)
    with pytest.raises(DamagedCheckpoint, match="is longer than its header says") as error:
        stored_tensors(path)
    size = path.stat().st_size
    assert (error.value.expected, error.value.found) == (f"{size - 1} bytes", f"{size} bytes")


@pytest.mark.parametrize("header", [b"{", b"[]", b"\xff\xff"])
def test_a_header_that_is_not_a_json_object_is_damage(tmp_path, header):
    with pytest.raises(DamagedCheckpoint, match="the header of .* is damaged"):
        stored_tensors(written(tmp_path / "x", header))


@pytest.mark.parametrize(
    "entry", [{"dtype": "F32", "shape": [1]}, {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}, 3]
)
def test_an_entry_without_its_fields_is_damage(tmp_path, entry):
    with pytest.raises(DamagedCheckpoint, match="does not describe the tensor 'a'"):
        stored_tensors(written(tmp_path / "x", {"a": entry}, b"\0" * 4))


@pytest.mark.parametrize("offsets", [[0, 8], [-4, 0]])
def test_an_entry_that_contradicts_itself_is_damage(tmp_path, offsets):
    with pytest.raises(DamagedCheckpoint, match="contradicts itself about the tensor 'a'"):
        stored_tensors(
            written(tmp_path / "x", {"a": {"dtype": "F32", "shape": [1], "data_offsets": offsets}}, b"\0" * 8)
        )


@settings(max_examples=200, deadline=None)
@given(place=st.integers(0, 79), byte=st.integers(0, 255))
def test_any_damaged_byte_of_the_header_is_read_or_refused_as_a_checkpoint(tmp_path_factory, place, byte):
    path = tmp_path_factory.mktemp("damaged") / "x.safetensors"
    save_file({"a": np.arange(4, dtype=np.float16)}, path)
    content = bytearray(path.read_bytes())
    content[place % len(content)] = byte
    path.write_bytes(content)
    try:
        stored_tensors(path)
    except CheckpointError:
        return
