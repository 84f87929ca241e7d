"""open_checkpoint knows what lies at a path, and says what it is where it is not a checkpoint."""

import pytest
from tiny import tiny_checkpoint

from tensorrt_llm_ext.checkpoint import GgufCheckpoint, HfCheckpoint, open_checkpoint
from tensorrt_llm_ext.errors import DamagedCheckpoint, UnsupportedCheckpoint


def test_a_hugging_face_folder_is_opened_by_its_path_as_text_or_path(tmp_path):
    folder = tiny_checkpoint(tmp_path / "some-model", "llama", num_hidden_layers=1)
    assert type(open_checkpoint(str(folder))) is type(open_checkpoint(folder)) is HfCheckpoint
    assert open_checkpoint(folder).name == "some-model" and open_checkpoint(folder).path == folder


def test_a_gguf_file_is_opened_by_its_content_and_alone_in_a_folder(tmp_path, gguf_model):
    path = gguf_model("qwen3").write(tmp_path / "model.gguf")
    assert type(open_checkpoint(path)) is type(open_checkpoint(tmp_path)) is GgufCheckpoint
    assert open_checkpoint(tmp_path).path == path
    path = path.rename(tmp_path / "model.bin")
    assert type(open_checkpoint(path)) is GgufCheckpoint


def test_a_damaged_gguf_file_is_known_by_its_name(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(DamagedCheckpoint, match="is truncated, or is not a GGUF file"):
        open_checkpoint(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("files", "target", "found"),
    [
        ([], "missing", "nothing at this path"),
        ([], "", "a folder without config.json and without GGUF files"),
        (["a.gguf", "b.gguf"], "", "2 GGUF files: a.gguf, b.gguf"),
        (["contract.json", "model.onnx"], "", "an engine (contract.json)"),
        (["model.safetensors"], "model.safetensors", "a file of another type ('.safetensors')"),
    ],
)
def test_what_is_not_a_checkpoint_is_said_to_be_what_it_is(tmp_path, files, target, found):
    for name in files:
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(UnsupportedCheckpoint, match="is not a checkpoint") as error:
        open_checkpoint(tmp_path / target)
    assert error.value.found == found and error.value.fix
