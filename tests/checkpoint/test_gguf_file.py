"""A GGUF header is read as the gguf package reads it, and a broken one is damage."""

import struct

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import smollm2_gguf

from tensorrt_llm_ext.checkpoint import open_checkpoint
from tensorrt_llm_ext.checkpoint.gguf_file import read_gguf
from tensorrt_llm_ext.errors import CheckpointError, DamagedCheckpoint, UnsupportedCheckpoint


def text(value):
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def header(version=3, num_tensors=0, num_fields=0, rest=b""):
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_fields) + rest


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.gguf"


def test_every_type_of_field_and_the_place_of_a_tensor_are_those_of_the_gguf_package(path, gguf_model):
    tiny = gguf_model("qwen3")
    tiny.fields |= {
        "x.text": "é",
        "x.flag": True,
        "x.number": 0.1,
        "x.list": [1, 2],
        "x.names": ["a", "b"],
        "x.floats": [0.5],
    }
    tiny.types = {"blk.0.ffn_up.weight": gguf.GGMLQuantizationType.Q4_1}
    got, wanted = read_gguf(tiny.write(path)), gguf.GGUFReader(path)
    fields = {key: field.contents() for key, field in wanted.fields.items() if not key.startswith("GGUF.")}
    assert {key: list(v) if isinstance(v, np.ndarray) else v for key, v in got.metadata.items()} == fields
    assert {name: (t.type, list(t.shape), t.offset, t.length) for name, t in got.tensors.items()} == {
        t.name: (t.tensor_type, t.shape.tolist()[::-1], t.data_offset, t.n_bytes) for t in wanted.tensors
    }


def test_a_real_file_is_read(path):
    file = read_gguf(smollm2_gguf())
    assert len(file.tensors) == 272 and len(file.metadata["tokenizer.ggml.tokens"]) == 49152
    assert file.tensors["token_embd.weight"].shape == (49152, 576)


@pytest.mark.parametrize("size", [0, 3, 7, 12, 23, 40, 200, 5000])
def test_a_header_that_ends_too_early_is_damage(path, gguf_model, size):
    gguf_model("qwen3").write(path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DamagedCheckpoint, match="is truncated, or is not a GGUF file"):
        read_gguf(path)


def test_another_kind_of_file_is_damage(path):
    path.write_bytes(b"PK\x03\x04" * 20)
    with pytest.raises(DamagedCheckpoint, match="not a GGUF file") as error:
        read_gguf(path)
    assert error.value.expected == "the letters GGUF at its start"


@pytest.mark.parametrize("version", [1, 4, 3 << 24], ids=["old", "new", "big-endian"])
def test_a_version_that_is_not_known_is_refused(path, version):
    path.write_bytes(header(version))
    with pytest.raises(UnsupportedCheckpoint, match="GGUF of a version that is not served"):
        read_gguf(path)


@pytest.mark.parametrize(
    ("rest", "expected"),
    [
        (text(b"\xff\xfe"), "text in UTF-8"),
        (text("key") + struct.pack("<I", 77), "a field of a known type"),
        (struct.pack("<Q", 1 << 60), f"{1 << 60} bytes"),
        (text("key") + struct.pack("<IIQ", 9, 4, 1 << 60), "bytes at byte"),
    ],
    ids=["not text", "unknown type", "a text beyond the file", "an array beyond the file"],
)
def test_a_field_that_cannot_be_read_is_damage(path, rest, expected):
    path.write_bytes(header(num_fields=1, rest=rest))
    with pytest.raises(DamagedCheckpoint) as error:
        read_gguf(path)
    assert expected in error.value.expected


def test_a_type_of_tensor_that_is_not_known_is_refused_by_name(path):
    path.write_bytes(header(num_tensors=1, rest=text("some.weight") + struct.pack("<IQIQ", 1, 1, 999, 0)))
    with pytest.raises(UnsupportedCheckpoint, match="the tensor 'some.weight' of .* has a type that is not known"):
        read_gguf(path)


@pytest.fixture(scope="module")
def sample(tmp_path_factory, gguf_model):
    path = tmp_path_factory.mktemp("sample") / "model.gguf"
    return gguf_model("llama", num_hidden_layers=1).write(path).read_bytes()


@settings(max_examples=200, deadline=None)
@given(place=st.integers(0, 7000), byte=st.integers(0, 255))
def test_any_damaged_byte_of_the_header_is_read_or_refused_as_a_checkpoint(tmp_path_factory, sample, place, byte):
    path = tmp_path_factory.mktemp("damaged") / "model.gguf"
    content = bytearray(sample)
    content[place] = byte
    path.write_bytes(content)
    try:
        checkpoint = open_checkpoint(path)
        checkpoint.tokenizer()
    except CheckpointError:
        return
