"""Exports are what the trainers' own readers load: names, keys, dtypes, shapes, the layer convention, the side of the norm.

The states are those of transformers, so a slot that is one layer off, or on the other side of the norm, turns a test red.
"""

import json
import sys

import datasets
import ml_dtypes
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny
import torch
import transformers
from click.testing import CliRunner

from tensorrt_llm_ext.builder import build_engine
from tensorrt_llm_ext.checkpoint import open_checkpoint
from tensorrt_llm_ext.cli import main
from tensorrt_llm_ext.errors import CheckpointError, ForeignDataset, InputError, MissingExtra, StoreError, TapError
from tensorrt_llm_ext.store import open_states
from tensorrt_llm_ext.store.exports import FORMATS, FinalNorm, export
from tensorrt_llm_ext.store.exports import tensors as tensors_module
from tensorrt_llm_ext.store.exports.pickled import file_name
from tensorrt_llm_ext.store.exports.tensors import torch_tensor

LAYERS = (2, 4, 5)  # eagle3 of eight layers
PROMPTS = [(f"id/{n}", list(range(3 + n, 3 + n + 1 + n * 5 % 17))) for n in range(9)]


def extracted(folder, checkpoint, taps):
    build_engine(checkpoint, folder / "engine", taps=taps, max_seq_len=32)
    lines = [json.dumps({"id": name, "ids": ids, "mask": [n % 2 for n in range(len(ids))]}) for name, ids in PROMPTS]
    lines.insert(4, "not json")
    (folder / "prompts.jsonl").write_text("".join(line + "\n" for line in lines))
    words = ["run", folder / "engine", "--input", folder / "prompts.jsonl", "--out", folder / "out", "--ids-field", "ids"]
    words += ["--id-field", "id", "--loss-mask-field", "mask", "--shard-mib", "1", "--threads", "1"]
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return folder / "out"


@pytest.fixture(scope="module")
def checkpoint_path(tmp_path_factory):
    return tiny.tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny", "qwen2")


@pytest.fixture(scope="module")
def dataset(checkpoint_path, tmp_path_factory):
    return extracted(tmp_path_factory.mktemp("eagle3"), checkpoint_path, "eagle3")


@pytest.fixture(scope="module")
def right(checkpoint_path):
    """By request: transformers' states, the state before the final norm added as the last but one."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint_path, dtype=torch.float32).eval()
    before = {}
    model.model.norm.register_forward_pre_hook(lambda module, inputs: before.update(last=inputs[0]))
    found = {}
    for name, ids in PROMPTS:
        with torch.no_grad():
            states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        found[name] = [*(states[layer][0] for layer in LAYERS), before["last"][0], states[-1][0]]
    assert float((found["id/3"][3] - found["id/3"][4]).abs().max()) > 0.1  # the two sides of the norm differ
    return found


def close(found, expected):
    assert found.shape == expected.shape
    return float((torch.as_tensor(found) - expected).abs().max()) < 1e-3


def exported(command_words):
    result = CliRunner().invoke(main, [str(word) for word in command_words])
    assert result.exit_code == 0, result.output
    return result


def test_speculators_own_reader_loads_our_export(dataset, right, tmp_path):
    """The real package: its dataset class, its check of a payload, its search for damaged files."""
    offline = pytest.importorskip("speculators.data_generation.offline", reason="speculators is not installed")
    from speculators.train.data import ArrowDataset, CollateFn

    exported(["export", dataset, "--to", "speculators-v2", "--out", tmp_path / "out"])
    table = datasets.load_from_disk(str(tmp_path / "out"))
    names = table["request_id"][:]
    assert list(names) == [name for name, _ in PROMPTS]
    reader = ArrowDataset(max_len=64, datapath=tmp_path / "out", on_missing="raise", hidden_states_dtype=torch.float32)
    assert len(reader) == len(PROMPTS) and reader.approx_lengths == [len(ids) for _, ids in PROMPTS]
    for number, (name, ids) in enumerate(PROMPTS):
        sample = reader[number]
        assert sample["input_ids"].tolist() == ids and sample["input_ids"].dtype == torch.int64
        assert sample["loss_mask"].tolist() == [n % 2 for n in range(len(ids))]
        assert close(sample["hidden_states"], torch.cat(right[name][:3], dim=1))
        assert close(sample["verifier_last_hidden_states"], right[name][3])
        payload = reader.transfer.get_cached(number)
        offline.check_hidden_states(payload, ids)
        assert payload["hidden_states"].shape == (len(ids), 4, 48)
    assert offline.find_corrupt_hidden_state_indices(tmp_path / "out" / "hidden_states", list(range(len(PROMPTS)))) == {}
    assert offline.get_existing_hidden_state_indices(tmp_path / "out" / "hidden_states") == list(range(len(PROMPTS)))
    batch = CollateFn(max_len=64, hidden_size=48, dtype=torch.float32)([reader[n] for n in range(3)])
    assert batch["hidden_states"].shape == (1, 64, 144)


def test_specforge_gets_the_state_after_the_norm_made_from_the_one_before(dataset, checkpoint_path, right, tmp_path):
    exported(["export", dataset, "--to", "specforge", "--out", tmp_path / "out", "--checkpoint", checkpoint_path])
    for number, (name, ids) in enumerate(PROMPTS):
        path = tmp_path / "out" / "rows_0-2000" / f"data_{number}.ckpt"
        data = torch.load(path, weights_only=True)
        assert set(data) == {"input_ids", "loss_mask", "hidden_state", "aux_hidden_state"}
        assert data["input_ids"].tolist() == ids and data["input_ids"].dtype == data["loss_mask"].dtype == torch.int64
        assert close(data["hidden_state"], right[name][4][None])
        assert close(data["aux_hidden_state"], torch.cat(right[name][:3], dim=1)[None])
    described = json.loads((tmp_path / "out" / "export.json").read_text())
    assert described["slots"]["last"] == {"layer": 8, "norm": "post"} and described["slots"]["last_is_derived"]
    assert [tap["layer"] for tap in described["slots"]["aux"]] == list(LAYERS)


@pytest.mark.parametrize("with_checkpoint", [False, True])
def test_modelopt_is_told_on_which_side_of_the_norm_the_state_is(dataset, checkpoint_path, right, tmp_path, with_checkpoint):
    words = ["export", dataset, "--to", "modelopt", "--out", tmp_path / "out"]
    exported(words + (["--checkpoint", checkpoint_path] if with_checkpoint else []))
    for name, ids in PROMPTS:
        data = torch.load(tmp_path / "out" / f"{name.replace('/', '%2F')}.pt", weights_only=True)
        assert data["conversation_id"] == name and data["input_ids"].tolist() == ids
        assert data["hidden_states_prenorm"] is not with_checkpoint
        assert close(data["hidden_states"], right[name][4 if with_checkpoint else 3])
        assert close(data["aux_hidden_states"], torch.cat(right[name][:3], dim=1))


def test_a_state_after_the_norm_that_was_extracted_is_taken_as_it_is(checkpoint_path, right, tmp_path):
    out = extracted(tmp_path, checkpoint_path, "eagle3,final@all")
    result = exported(["export", out, "--to", "specforge", "--out", tmp_path / "specforge", "--json"])
    assert json.loads(result.stdout)["left_out"] == ["final:pre@all"]
    data = torch.load(tmp_path / "specforge" / "rows_0-2000" / "data_3.ckpt", weights_only=True)
    assert close(data["hidden_state"], right["id/3"][4][None])
    result = exported(["export", out, "--to", "speculators-v2", "--out", tmp_path / "speculators"])
    assert "final@all" in result.stdout


def test_parquet_numpy_and_datasets_hold_every_row(dataset, right, tmp_path):
    for format in ("parquet", "numpy", "hf-datasets"):
        exported(["export", dataset, "--to", format, "--out", tmp_path / format])
    rows = pq.read_table(tmp_path / "parquet" / "part-00000.parquet").to_pylist()
    arrow = datasets.load_from_disk(str(tmp_path / "hf-datasets"))
    index = pq.read_table(tmp_path / "numpy" / "index.parquet").to_pylist()
    column = np.load(tmp_path / "numpy" / "layer_004_pre_all.npy", mmap_mode="r")
    token_ids = np.load(tmp_path / "numpy" / "token_ids.npy")
    assert [row["request_id"] for row in rows] == [row["request_id"] for row in index] == [name for name, _ in PROMPTS]
    assert [row["row"] for row in rows] == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    for number, (name, ids) in enumerate(PROMPTS):
        place = slice(index[number]["first_row"], index[number]["first_row"] + index[number]["num_rows"])
        assert rows[number]["token_ids"] == arrow[number]["token_ids"] == token_ids[place].tolist() == ids
        assert rows[number]["loss_mask"] == arrow[number]["loss_mask"]
        for found in (rows[number]["layer_004_pre_all"], arrow[number]["layer_004_pre_all"], column[place].copy()):
            assert close(np.array(found, dtype=np.float32), right[name][1])


def test_bfloat16_is_carried_by_its_bits():
    values = np.array([[1.5, -2.25], [3e38, 1e-30]], dtype=ml_dtypes.bfloat16)
    tensor = torch_tensor(values)
    assert tensor.dtype == torch.bfloat16 and np.array_equal(tensor.float().numpy(), values.astype(np.float32))


def test_the_final_norm_is_that_of_transformers():
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    rng = np.random.default_rng(0)
    norm = LlamaRMSNorm(64, eps=1e-5)
    norm.weight.data = torch.from_numpy(rng.normal(size=64).astype(np.float32))
    rows = rng.normal(size=(5, 64)).astype(np.float32) * 20
    ours = FinalNorm(norm.weight.detach().numpy(), 1e-5).apply(rows)
    assert np.abs(ours - norm(torch.from_numpy(rows)).detach().numpy()).max() < 1e-5


def test_taps_that_do_not_give_what_a_format_needs_are_refused(checkpoint_path, dataset, tmp_path):
    states = open_states(dataset)
    with pytest.raises(TapError, match="does not hold the states") as caught:
        export(states, tmp_path / "out", "specforge")
    assert "--checkpoint" in caught.value.fix and not (tmp_path / "out").exists()
    out = extracted(tmp_path / "post", checkpoint_path, "layer:2@all,final@all")
    for format, wanted in (("speculators-v2", "final:pre@all"), ("specforge", "3 auxiliary layers")):
        with pytest.raises(TapError) as caught:
            export(open_states(out), tmp_path / "out", format)
        assert wanted in caught.value.expected


def test_another_checkpoint_is_refused(dataset, tmp_path):
    other = tiny.tiny_checkpoint(tmp_path / "other", "qwen2", seed=9)
    with open_checkpoint(other) as checkpoint, pytest.raises(CheckpointError, match="not the checkpoint"):
        export(open_states(dataset), tmp_path / "out", "specforge", checkpoint=checkpoint)


def test_an_export_is_whole_or_not_there(dataset, tmp_path, monkeypatch):
    states = open_states(dataset)

    def broken():
        yield from list(original())[:4]
        raise StoreError("a shard is damaged", expected="1", found="2", fix="extract again")

    original = states.sequences
    for format in ("parquet", "numpy", "modelopt", "speculators-v2", "hf-datasets"):
        monkeypatch.setattr(states, "sequences", broken)
        with pytest.raises(StoreError, match="a shard is damaged"):
            export(states, tmp_path / "out", format)
        monkeypatch.setattr(states, "sequences", lambda: iter(list(original())[:4]))
        with pytest.raises(StoreError, match="not every sequence"):
            export(states, tmp_path / "out", format)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_something_and_an_unknown_format_are_refused(dataset, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ForeignDataset, match="exists already"):
        export(open_states(dataset), tmp_path, "parquet")
    with pytest.raises(InputError, match="unknown export format"):
        export(open_states(dataset), tmp_path / "out", "parket")


def test_a_missing_library_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtra, match="needs datasets"):
        tensors_module.library("datasets", "the format hf-datasets")


def test_names_of_files_are_safe_and_different():
    names = ["a/b", "a%2Fb", "../x", ".hidden", "x" * 300, "x" * 301, "世界", "a b"]
    made = [file_name(name) for name in names]
    assert len(set(made)) == len(names) and not any("/" in name or name.startswith(".") or len(name) > 200 for name in made)


def test_the_formats_of_the_command_are_those_of_the_package():
    (option,) = (parameter for parameter in main.get_command(None, "export").params if parameter.name == "format")
    assert tuple(option.type.choices) == FORMATS


def test_the_schema_of_an_empty_dataset_is_whole(dataset, tmp_path, monkeypatch):
    states = open_states(dataset)
    monkeypatch.setattr(type(states), "__len__", lambda self: 0)
    monkeypatch.setattr(states, "sequences", lambda: iter(()))
    export(states, tmp_path / "out", "parquet")
    table = pq.read_table(tmp_path / "out" / "part-00000.parquet")
    assert table.num_rows == 0 and table.schema.field("final_pre_all").type == pa.list_(pa.list_(pa.float32(), 48))
