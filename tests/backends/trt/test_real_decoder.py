"""The decoder graph that the builder writes, under the stand-in: one contract, the same hidden states as backend ort."""

import json
import shutil
from dataclasses import replace

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from tiny import tiny_checkpoint
from toy_engines import work_item
from toy_plans import facts_of, write_plan

from tensorrt_llm_ext.backends.trt import machine
from tensorrt_llm_ext.builder import build_engine
from tensorrt_llm_ext.cli import main
from tensorrt_llm_ext.recipes import read_contract
from tensorrt_llm_ext.recipes.contract import Profile
from tensorrt_llm_ext.runtime import Session


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A tiny Llama: its checkpoint, and its engine of backend ort."""
    folder = tmp_path_factory.mktemp("decoder")
    checkpoint = tiny_checkpoint(folder / "checkpoint", "llama", num_hidden_layers=3)
    build_engine(checkpoint, folder / "ort", card="cpu", taps="final@last,layer:1@all,final@mean", max_seq_len=64)
    return folder


@pytest.fixture
def trt_engine(built, tmp_path):
    """The same directory as a plan for an RTX 5090: the graph with its weights inside, two rungs."""
    contract = read_contract(built / "ort")
    limits = contract.limits
    rungs = tuple(Profile(limits.max_num_tokens, limits.max_batch_size, length) for length in (8, 64))
    contract = replace(
        contract,
        backend="trt",
        accepted_runtime="tensorrt_rtx==1.7.1.116",
        platform="any",
        compute_capabilities=("12.0",),
        profiles=rungs,
    )
    copied = shutil.copytree(built / "ort", tmp_path / "copied")  # onnx reads no weights that are hard links
    graph = onnx.load(copied / "model.onnx").SerializeToString()
    folder = write_plan(tmp_path / "trt", contract, facts_of(contract.tensors, rungs), graph)
    for file in copied.glob("*token*"):
        shutil.copy(file, folder)
    return folder


def test_the_same_graph_gives_the_same_states_by_either_backend(built, trt_engine, open_session):
    rng = np.random.default_rng(3)
    items = [work_item(str(i), rng.integers(3, 263, size=length)) for i, length in enumerate([5, 1, 17, 64, 8, 30])]
    session = open_session(trt_engine)  # measures the convention and runs the canaries of the real contract
    assert session.convention == "prefix_sum"
    ours = {record.request_id: record for record in session.extract(items)}
    with Session.open(built / "ort", num_threads=1) as other:
        theirs = {record.request_id: record for record in other.extract(items)}
    assert ours.keys() == theirs.keys() == {item.request_id for item in items}
    for name, record in ours.items():
        for state, right in zip(record.states, theirs[name].states, strict=True):
            assert state.tap == right.tap
            np.testing.assert_allclose(state.rows, right.rows, rtol=1e-4, atol=1e-4)


def test_verify_runs_on_it_and_without_a_driver_says_why_it_cannot(built, trt_engine, library, monkeypatch):
    arguments = ["verify", str(trt_engine), "--checkpoint", str(built / "checkpoint"), "--json"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)
    refused = machine.NoCard("no NVIDIA driver")
    monkeypatch.setattr(machine, "present_card", lambda: (_ for _ in ()).throw(refused))
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code != 0 and "no NVIDIA driver" in result.output
