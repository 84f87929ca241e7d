"""build_engine publishes a directory whose contract tells the truth, or leaves nothing and says why."""

import errno
import shutil
from dataclasses import replace

import pytest
import tiny

from tensorrt_llm_ext.builder import build as build_module
from tensorrt_llm_ext.builder import build_engine
from tensorrt_llm_ext.checkpoint import open_checkpoint
from tensorrt_llm_ext.errors import BuildError, DiskFull, RecipeError
from tensorrt_llm_ext.fingerprint import file_fingerprint
from tensorrt_llm_ext.recipes import ModelMatch, Recipe, load_card, read_contract
from tensorrt_llm_ext.runtime import Session

TAPS = "final@last,layer:3@mean,layer:5@all"


@pytest.fixture(scope="module")
def engine(checkpoints, tmp_path_factory):
    out = tmp_path_factory.mktemp("built") / "engine"
    build_engine(checkpoints["qwen3"], out, taps=TAPS)
    return out


def test_the_contract_lists_every_file_as_it_is(engine):
    contract = read_contract(engine)
    assert {path.name for path in engine.iterdir()} == {file.name for file in contract.files} | {"contract.json"}
    for file in contract.files:
        assert (engine / file.name).stat().st_size == file.size and file_fingerprint(engine / file.name) == file.sha256
    assert {"model.onnx", "weights.bin", "tokenizer.json"} <= {file.name for file in contract.files}


def test_the_contract_names_what_it_was_built_from(engine, checkpoints):
    contract, checkpoint = read_contract(engine), open_checkpoint(checkpoints["qwen3"])
    assert contract.fingerprints.checkpoint == checkpoint.fingerprint()
    assert contract.fingerprints.tokenizer == checkpoint.tokenizer().fingerprint()
    assert contract.architecture == checkpoint.architecture and contract.model_name == checkpoint.name
    assert (contract.backend, contract.platform, contract.compute_capabilities) == ("ort", "any", ())
    assert (contract.weight_dtype, contract.activation_dtype) == ("float32", "float32")
    assert contract.build["seconds"] > 0 and contract.build["peak_rss_bytes"] > 1e6


def test_the_tensors_are_those_of_the_model_file(engine, tmp_path):
    contract = read_contract(engine)
    outputs = {tensor.name: (tensor.tap, tensor.shape) for tensor in contract.tensors if tensor.role == "output"}
    assert outputs == {
        tap.column(8): (tap, ("T" if tap.rows == "all" else "B", 48)) for tap in contract.taps
    }
    assert [tensor.name for tensor in contract.tensors if tensor.role == "input"] == [
        "input_ids", "position_ids", "attention_rows", "packed_slots", "last_token_ids", "sequence_lengths",
    ]  # fmt: skip


@pytest.mark.parametrize("precision", ["float32", "float16"])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_session_opens_what_was_built(family, precision, checkpoints, tmp_path):
    build_engine(checkpoints[family], tmp_path / "engine", taps=TAPS, precision=precision)
    with Session.open(tmp_path / "engine") as session:
        distances = session.check_canaries()
        assert session.convention == "prefix_sum"
    assert len(distances) >= 2 * 3 and all(d.source == "graph-fp32" for d in distances)


def test_a_session_opens_an_engine_of_short_sequences(checkpoints, tmp_path):
    build_engine(checkpoints["llama"], tmp_path / "engine", taps=TAPS, max_seq_len=6)
    with Session.open(tmp_path / "engine") as session:
        assert max(len(canary.token_ids) for canary in session.contract.canaries) == 6
        assert session.check_canaries()


def test_the_same_build_twice_is_the_same_engine(engine, checkpoints, tmp_path):
    again = build_engine(checkpoints["qwen3"], tmp_path / "again", taps=TAPS)
    assert again.engine_fingerprint() == read_contract(engine).engine_fingerprint()
    other = build_engine(checkpoints["qwen3"], tmp_path / "other", taps=TAPS, max_seq_len=100)
    assert other.engine_fingerprint() != again.engine_fingerprint()


def test_a_moved_checkpoint_gives_the_same_engine(engine, checkpoints, tmp_path):
    shutil.copytree(checkpoints["qwen3"], tmp_path / "qwen3")
    moved = build_engine(tmp_path / "qwen3", tmp_path / "moved", taps=TAPS)
    assert moved.engine_fingerprint() == read_contract(engine).engine_fingerprint()


def test_what_is_given_goes_before_the_recipe(checkpoints, tmp_path):
    recipe = Recipe(taps="final@all", max_seq_len=64, max_batch_size=4)
    contract = build_engine(checkpoints["llama"], tmp_path / "engine", recipe=recipe, max_seq_len=32)
    assert (contract.limits.max_seq_len, contract.limits.max_batch_size) == (32, 4)
    assert [tap.rows for tap in contract.taps] == ["all"]


def test_progress_names_each_step_and_ends(checkpoints, tmp_path):
    heard = []
    build_engine(checkpoints["llama"], tmp_path / "engine", progress=lambda *step: heard.append(step))
    last = {name: (done, total) for name, done, total in heard}
    assert list(last) == ["weights", "canaries", "fingerprint"] and all(done == total for done, total in last.values())


def test_an_occupied_out_is_refused_with_what_it_holds(engine, checkpoints):
    with pytest.raises(BuildError, match="exists already") as error:
        build_engine(checkpoints["llama"], engine)
    assert error.value.found == "an engine of qwen3, backend ort"


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"recipe": Recipe(model=ModelMatch(num_layers=32))}, RecipeError, "another model"),
        ({"recipe": "smollm2-135m"}, RecipeError, "another model"),
        ({"precision": "bfloat16"}, RecipeError, "cannot build bfloat16"),
        ({"max_batch_size": 0}, RecipeError, "max_batch_size"),
        ({"card": replace(load_card("cpu"), name="gpu", backend="trt")}, BuildError, "no builder for the card 'gpu'"),
        ({"card": replace(load_card("cpu"), precisions=("bfloat16",))}, BuildError, "no builder for the card 'cpu'"),
    ],
)
def test_what_cannot_be_built_is_refused_and_leaves_nothing(given, error, message, checkpoints, tmp_path):
    with pytest.raises(error, match=message):
        build_engine(checkpoints["llama"], tmp_path / "engine", **given)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_leaves_nothing(checkpoints, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device", "weights.bin")

    monkeypatch.setattr(build_module, "write_ort_engine", full)
    with pytest.raises(DiskFull, match="filled up") as error:
        build_engine(checkpoints["llama"], tmp_path / "engine")
    assert "weights.bin" in error.value.found and list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_vanishes_leaves_nothing(checkpoints, tmp_path):
    shutil.copytree(checkpoints["llama"], tmp_path / "llama")

    def vanish(step, done, total):
        (tmp_path / "llama" / "model.safetensors").unlink(missing_ok=True)

    with pytest.raises(BuildError, match="could not be read or written") as error:
        build_engine(tmp_path / "llama", tmp_path / "engine", progress=vanish)
    assert "model.safetensors" in error.value.found
    assert [path.name for path in tmp_path.iterdir()] == ["llama"]


def test_an_interrupted_build_leaves_nothing(checkpoints, tmp_path):
    def interrupt(step, done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_engine(checkpoints["llama"], tmp_path / "engine", progress=interrupt)
    assert list(tmp_path.iterdir()) == []
