"""``trtllm-extract adopt``: writes the contract and says what it could not check."""

import json

import pytest
import tiny
from click.testing import CliRunner
from upstream_engines import INPUTS, write_upstream_engine

from tensorrt_llm_ext.cli import main
from tensorrt_llm_ext.recipes import read_contract


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny.tiny_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


def adopt(engine, checkpoint, *options):
    arguments = ["adopt", engine, "--checkpoint", checkpoint, "--compute-capability", "8.9", *options]
    return CliRunner().invoke(main, list(map(str, arguments)))


def test_the_contract_is_written_and_both_kinds_of_checks_are_told(tmp_path, checkpoint):
    engine = write_upstream_engine(tmp_path / "engine", build_config__opt_num_tokens=64)
    result = adopt(
        engine, checkpoint, "--taps", "final@last,final@all", "--max-seq-len", 64, "--platform", "linux-aarch64"
    )
    assert result.exit_code == 0, result.output
    contract = read_contract(engine)
    assert contract.compute_capabilities == ("8.9",) and contract.platform == "linux-aarch64"
    assert contract.limits.max_seq_len == 64 and len(contract.taps) == 2
    checked, at_load = result.stdout.split("checked only when it is opened:")
    assert "checked here:" in checked and "10 inputs" in checked
    assert "8.9, as you said" in at_load and "to know:" in at_load and "64 tokens a batch" in at_load


def test_json_tells_the_same(tmp_path, checkpoint):
    engine = write_upstream_engine(tmp_path / "engine")
    told = json.loads(adopt(engine, checkpoint, "--json").stdout)
    assert told["fingerprint"] == read_contract(engine).engine_fingerprint() and told["engine"] == str(engine)
    assert told["checked"] and told["at_load"] and told["warnings"] == []


def test_an_engine_without_our_outputs_is_refused_with_the_way_to_get_them(tmp_path, checkpoint):
    result = adopt(write_upstream_engine(tmp_path / "engine", INPUTS), checkpoint)
    assert result.exit_code != 0 and "trtllm-extract patch apply" in result.stderr


def test_a_compute_capability_is_two_numbers(tmp_path, checkpoint):
    arguments = ["adopt", str(tmp_path), "--checkpoint", str(checkpoint), "--compute-capability", "sm90"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2 and "not a compute capability" in result.stderr
