"""Everything we read or write is described in words, by its content; what is not ours is unknown, and so named."""

import shutil

import lance
import numpy as np
import pyarrow as pa
import pytest
import tiny
from safetensors.numpy import save_file

from tensorrt_llm_ext.checkpoint import open_checkpoint
from tensorrt_llm_ext.checkpoint.gguf import GgufCheckpoint
from tensorrt_llm_ext.checkpoint.hf import HfCheckpoint
from tensorrt_llm_ext.checks import describe
from tensorrt_llm_ext.checks.description import KINDS
from tensorrt_llm_ext.errors import ContractError, DamagedCheckpoint, InputError, RecipeError
from tensorrt_llm_ext.recipes.toml_file import DATA
from tensorrt_llm_ext.results import payload_from_record
from tensorrt_llm_ext.runtime import Session


@pytest.fixture
def record(published_engine, items):
    with Session.open(published_engine) as session:
        return next(record for record in session.extract(items) if record.request_id == "r7")


def test_a_checkpoint_folder(checkpoint_path):
    found = describe(checkpoint_path)
    assert (found.kind, found.title) == ("checkpoint", "checkpoint")
    assert found.facts["architecture"] == (
        "qwen3: 8 layers, hidden size 48, 6 heads of 16 (2 for keys and values), MLP 80, vocabulary 263, QK-norm"
    )
    assert found.facts["output_head"] == "its own" and "with a chat template" in found.facts["tokenizer"]
    assert found.facts["longest_sequence"] == "512 tokens: the model's maximum of positions"


@pytest.mark.parametrize("place", ["file", "folder"])
def test_a_gguf_file_and_a_folder_with_one(place):
    path = tiny.smollm2_gguf()
    found = describe(path if place == "file" else path.parent)
    assert found.kind == "checkpoint" and found.facts["output_head"] == "tied to the embedding"
    assert found.facts["weights"].startswith("134.5 million parameters in 272 tensors, read as float32")


def test_weights_are_never_loaded(checkpoint_path, published_engine, monkeypatch):
    def refuse(self, name):
        raise AssertionError(f"{name} was read")

    for reader in (HfCheckpoint, GgufCheckpoint):
        monkeypatch.setattr(reader, "tensor", refuse)
        monkeypatch.setattr(reader, "fingerprint", lambda self: refuse(self, "every byte"))
    with open_checkpoint(checkpoint_path) as checkpoint, pytest.raises(AssertionError):
        checkpoint.tensor("model.norm.weight")
    for path in (checkpoint_path, tiny.smollm2_gguf(), published_engine):
        describe(path)


def test_an_engine_and_its_taps(published_engine):
    found = describe(published_engine)
    assert (found.kind, found.title) == ("engine", "checkpoint for backend ort")
    assert found.facts["taps"][:2] == [
        "final@last in final_post_last float32 [B, 48]",
        "layer:3@mean in layer_003_pre_mean float32 [B, 48]",
    ]
    assert found.facts["files_here"] == "all there, in the sizes that were published"
    assert "graph-fp32" in found.facts["canaries"] and "tolerances away" in found.facts["canaries"]
    assert found.facts["runs_on"].startswith("any CPU, host any, onnxruntime")


def test_an_engine_with_a_file_cut_short_says_which(engine_path):
    (engine_path / "tokenizer.json").write_text("{")
    assert "tokenizer.json" in describe(engine_path).facts["files_here"]
    assert "found 1 bytes" in describe(engine_path).facts["files_here"]


def test_a_contract_alone_under_any_name(published_engine, tmp_path):
    shutil.copy(published_engine / "contract.json", tmp_path / "promised")
    found = describe(tmp_path / "promised")
    assert found.kind == "contract" and found.facts["taps"] == describe(published_engine).facts["taps"]


def test_a_contract_of_another_format_is_refused_with_both_versions(engine_path, edit_contract):
    edit_contract(lambda contract: contract.update(format_version=99))
    with pytest.raises(ContractError, match="another format version") as error:
        describe(engine_path)
    assert error.value.found == "format_version 99"


def test_a_recipe_says_what_it_leaves_open():
    found = describe(DATA / "smollm2-135m.toml")
    assert (found.kind, found.title) == ("recipe", "smollm2-135m")
    assert "num_layers 30" in found.facts["fits"] and found.facts["max_batch_size"] == "left to the card and the model"


def test_a_card():
    found = describe(DATA / "cards" / "cpu.toml")
    assert (found.kind, found.title) == ("card", "cpu, any CPU")
    assert "float32" in found.facts["precisions"]


def test_a_recipe_with_a_misspelt_key_is_refused_with_the_nearest(tmp_path):
    (tmp_path / "mine.toml").write_text('taps = "final@last"\nmax_sequence_len = 5\n')
    with pytest.raises(RecipeError, match="unknown key 'max_sequence_len'") as error:
        describe(tmp_path / "mine.toml")
    assert "max_seq_len" in error.value.expected


def test_a_record_payload_without_its_engine(record, tmp_path):
    (tmp_path / "r7.safetensors").write_bytes(payload_from_record(record))
    found = describe(tmp_path / "r7.safetensors")
    assert (found.kind, found.title) == ("record", "request 'r7'")
    assert found.facts["tokens"] == "7" and found.facts["states"][2].startswith("layer:4@all: [7, 48] float32, xxh3-128:")
    assert "gather convention prefix_sum" in found.facts["engine"]


def test_a_dataset_of_vectors(record, published_engine, checkpoint_path, items, tmp_path):
    from tensorrt_llm_ext.builder import build_engine
    from tensorrt_llm_ext.store import Header, VectorStore

    contract = build_engine(checkpoint_path, tmp_path / "engine", taps="final@last,layer:3@mean", max_seq_len=256)
    with Session.open(tmp_path / "engine") as session:
        by_id = {item.request_id: item for item in items}
        with VectorStore.create(tmp_path / "out", Header(contract, session.origin, {})) as store:
            for row, answer in enumerate(session.extract(items)):
                store.append(row, by_id[answer.request_id], answer)
            store.commit(window_end=5)
    for path in (tmp_path / "out", tmp_path / "out" / "vectors.lance"):
        found = describe(path)
        assert (found.kind, found.title) == ("dataset", "5 requests to checkpoint")
        assert found.facts["vectors"][1] == "layer:3@mean in layer_003_pre_mean: float32 [48]"


def test_a_lance_dataset_of_something_else_is_unknown(tmp_path):
    lance.write_dataset(pa.table({"a": [1, 2]}), str(tmp_path / "other.lance"))
    found = describe(tmp_path / "other.lance")
    assert found.kind == "unknown" and "not one of hidden states" in found.title


def test_a_safetensors_file_that_is_no_record(tmp_path):
    save_file({"a": np.zeros((2, 3), np.float32)}, tmp_path / "x.safetensors", metadata={"format": "pt"})
    found = describe(tmp_path / "x.safetensors")
    assert found.kind == "weights" and found.facts["tensors"] == "1: 1 F32"


@pytest.mark.parametrize(
    "content", [b"", b"x", b"hello, world\n", b'{"a": 1}', b'a = "b"\n', b"\xff\xfe\x00", b"[1, 2]"], ids=repr
)
def test_a_file_that_is_nothing_of_ours_is_unknown_and_says_what_was_looked_for(tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    found = describe(tmp_path / "x")
    assert found.kind == "unknown" and found.facts["looked_for"] == [kind.looks_like for kind in KINDS]


def test_a_folder_that_is_nothing_of_ours_is_unknown_and_says_what_it_holds(tmp_path):
    for name in "gfedcba":
        (tmp_path / name).touch()
    found = describe(tmp_path)
    assert found.kind == "unknown" and found.facts["holds"] == "a, b, c, d, e and 2 more"


def test_nothing_at_the_path_is_an_error(tmp_path):
    with pytest.raises(InputError, match="there is nothing at"):
        describe(tmp_path / "none")


def test_a_truncated_gguf_file_gets_its_own_error(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUF\x03")
    with pytest.raises(DamagedCheckpoint):
        describe(tmp_path / "x.gguf")
