"""Weights stay where they lie when their type fits, and are streamed aligned and exact when it does not."""

import errno
import os
from collections import namedtuple

import ml_dtypes
import numpy as np
import onnx
import pytest
import tiny
import torch

from tensorrt_llm_ext.checkpoint import open_checkpoint
from tensorrt_llm_ext.checkpoint.architecture import architecture_from_config
from tensorrt_llm_ext.errors import BuildError, DiskFull
from tensorrt_llm_ext.graph import weights as weights_module
from tensorrt_llm_ext.graph import write_decoder
from tensorrt_llm_ext.taps import parse_taps

SEQUENCES = [np.arange(3, 3 + length, dtype=np.int32) for length in (4, 1, 7)]
LINKED = "checkpoint-1.weights"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.fixture
def write(tmp_path):
    """Write the decoder of a Hugging Face folder into tmp_path/engine."""

    def written(folder, dtype="float32", taps="final@last"):
        out = tmp_path / "engine"
        out.mkdir()
        checkpoint = open_checkpoint(folder)
        return write_decoder(checkpoint, out, taps=parse_taps(taps, 8), dtype=dtype, max_seq_len=16)

    return written


@pytest.fixture
def checkpoint_folder(tmp_path):
    def made(dtype="float32", **options):
        return tiny.tiny_checkpoint(tmp_path / "checkpoint", "qwen3", dtype=DTYPES[dtype], **options)

    return made


def external(folder, name: str) -> tuple[str, int, int]:
    """Where an initializer's values lie: file, offset, length."""
    graph = onnx.load(folder / "model.onnx", load_external_data=False).graph
    (tensor,) = (tensor for tensor in graph.initializer if tensor.name == name)
    entries = {entry.key: entry.value for entry in tensor.external_data}
    return entries["location"], int(entries["offset"]), int(entries["length"])


@pytest.mark.parametrize(
    ("stored", "computed"),
    [("float32", "float32"), ("bfloat16", "float32"), ("float16", "float32"), ("float16", "float16"), ("bfloat16", "bfloat16")],
)
def test_weights_that_fit_are_not_copied(stored, computed, checkpoint_folder, write):
    source = checkpoint_folder(stored) / "model.safetensors"
    files = write(source.parent, computed)
    assert files.files == ("model.onnx", LINKED, "weights.bin") and files.weight_dtype == stored
    assert (files.folder / LINKED).samefile(source)
    tables = 2 * 16 * 8 * (4 if computed == "float32" else 2)  # cos and sin [max_seq_len, head_dim / 2]
    assert (files.folder / "weights.bin").stat().st_size == tables


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_widening_in_the_graph_is_exact(stored, checkpoint_folder, write, open_decoder, array_checkpoint, tmp_path):
    folder = checkpoint_folder(stored)
    found = open_decoder(write(folder, taps="final@all").folder / "model.onnx").run(SEQUENCES)
    model = tiny.tiny_model("qwen3").to(DTYPES[stored]).float()
    checkpoint = array_checkpoint(model, architecture_from_config(model.config.to_dict()))
    (tmp_path / "float32").mkdir()
    write_decoder(checkpoint, tmp_path / "float32", taps=parse_taps("final@all", 8), dtype="float32", max_seq_len=16)
    expected = open_decoder(tmp_path / "float32" / "model.onnx").run(SEQUENCES)
    assert np.array_equal(found["final_post_all"], expected["final_post_all"])


@pytest.mark.parametrize(("stored", "computed"), [("float32", "float16"), ("bfloat16", "float16"), ("float32", "bfloat16")])
def test_weights_that_do_not_fit_are_streamed_aligned(stored, computed, checkpoint_folder, write):
    folder = checkpoint_folder(stored)
    files = write(folder, computed)
    assert files.files == ("model.onnx", "weights.bin") and files.weight_dtype == computed
    name = "model.layers.3.mlp.up_proj.weight"
    location, offset, length = external(files.folder, name)
    assert location == "weights.bin" and offset % 64 == 0
    dtype = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[computed]
    bytes_written = (files.folder / location).read_bytes()[offset : offset + length]
    assert bytes_written == open_checkpoint(folder).tensor(name).astype(dtype).tobytes()


def test_shards_are_linked_each(checkpoint_folder, write, open_decoder, reference_states):
    folder = checkpoint_folder(max_shard_size="200KB")
    shards = sorted(folder.glob("*.safetensors"))
    files = write(folder)
    linked = sorted(files.folder.glob("checkpoint-*"))
    assert len(linked) == len(shards) > 2
    assert {path.stat().st_ino for path in linked} == {path.stat().st_ino for path in shards}
    rows = open_decoder(files.folder / "model.onnx").run(SEQUENCES)["final_post_last"]
    expected = [reference_states(tiny.tiny_model("qwen3"), sequence)[8, "post"][-1] for sequence in SEQUENCES]
    assert np.abs(rows - np.stack(expected)).max() < 1e-4


def test_a_symlink_is_followed_to_the_file(checkpoint_folder, write, open_decoder, tmp_path):
    folder = checkpoint_folder()
    blob = tmp_path / "blobs" / "0123abcd"
    blob.parent.mkdir()
    (folder / "model.safetensors").rename(blob)
    (folder / "model.safetensors").symlink_to(blob)
    files = write(folder)
    assert not (files.folder / LINKED).is_symlink() and (files.folder / LINKED).samefile(blob)
    assert np.isfinite(open_decoder(files.folder / "model.onnx").run(SEQUENCES)["final_post_last"]).all()


def test_a_file_is_copied_where_a_link_is_refused(checkpoint_folder, write, monkeypatch):
    def refused(source, target):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    folder = checkpoint_folder()
    monkeypatch.setattr(os, "link", refused)
    files = write(folder)
    copy = files.folder / LINKED
    assert copy.read_bytes() == (folder / "model.safetensors").read_bytes()
    assert not copy.samefile(folder / "model.safetensors")
    assert files.files == ("model.onnx", LINKED, "weights.bin")  # the names, and so the identity, do not depend on the disk


def test_a_file_of_which_little_is_used_is_not_linked(checkpoint_folder, write, monkeypatch):
    monkeypatch.setattr(weights_module, "MIN_PART_USED", 1.1)
    files = write(checkpoint_folder("bfloat16"))
    assert files.files == ("model.onnx", "weights.bin") and files.weight_dtype == "bfloat16"


def test_a_full_disk_is_refused_before_anything_is_streamed(checkpoint_folder, write, monkeypatch, tmp_path):
    folder = checkpoint_folder()
    usage = namedtuple("usage", "total used free")(10, 9, 1000)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(DiskFull, match="no space for the weights") as error:
        write(folder)
    assert "GB free" in error.value.expected and error.value.found == "0.00 GB free"
    assert not (tmp_path / "engine" / "weights.bin").exists()


def test_a_weight_too_large_for_float16_is_refused_by_name(tmp_path, array_checkpoint):
    model = tiny.tiny_model("llama")
    with torch.no_grad():
        model.model.layers[4].mlp.down_proj.weight[3, 5] = 1e6
    checkpoint = array_checkpoint(model, architecture_from_config(model.config.to_dict()))
    with pytest.raises(BuildError, match="layers.4.mlp.down_proj.weight' is too large for float16") as error:
        write_decoder(checkpoint, tmp_path, taps=parse_taps("final@last", 8), dtype="float16", max_seq_len=16)
    assert error.value.found == "1e+06"


def test_progress_ends_at_all_bytes(tmp_path, array_checkpoint):
    model = tiny.tiny_model("llama")
    checkpoint = array_checkpoint(model, architecture_from_config(model.config.to_dict()))
    heard = []
    write_decoder(
        checkpoint, tmp_path, taps=parse_taps("final@last", 8), dtype="float32", max_seq_len=16,
        progress=lambda done, total: heard.append((done, total)),
    )  # fmt: skip
    assert heard == sorted(heard) and heard[0][0] == 0 and heard[-1][0] == heard[-1][1] > 0
