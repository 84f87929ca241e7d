"""probe shows the contract, the measured convention with its evidence, and the canaries; a wrong engine exits with 1."""

import json
import shutil

import numpy as np
import pytest
from fakes import falsify_contract


@pytest.fixture
def spoiled(engine_path, tmp_path):
    """A copy of the engine whose canaries are of another engine."""
    copy = shutil.copytree(engine_path, tmp_path / "spoiled")

    def take_others(contract):
        for canary in contract["canaries"]:
            canary["token_ids"] = [(token + 7) % 200 + 10 for token in canary["token_ids"]]

    falsify_contract(copy, take_others)
    return copy


def test_contract_evidence_and_canaries_are_printed(command, engine_path):
    result = command("probe", engine_path)
    assert result.exit_code == 0, result.output
    assert "last_token_ids int32 [B]" in result.stdout
    assert "Gather convention: prefix_sum, measured in" in result.stdout
    assert "Canaries: all right, by graph-fp32" in result.stdout and "hash it was published with" not in result.stdout


def test_json_holds_the_evidence_and_every_distance(command, engine_path):
    value = json.loads(command("probe", engine_path, "--full", "--json").stdout)
    assert value["files_hashed"] is True and value["canary_error"] is None
    assert value["convention"]["convention"] == "prefix_sum"
    last = value["convention"]["outputs"][0]
    assert np.subtract(last["fed"], last["rows_read"]).tolist() == [1] * len(last["fed"])
    assert value["contract"]["limits"]["max_seq_len"] == 128
    assert len(value["canaries"]) > 2 and all(c["distance"] <= c["tolerance"] for c in value["canaries"])


def test_wrong_canaries_exit_with_1_after_everything_else_was_shown(command, spoiled):
    result = command("probe", spoiled)
    assert result.exit_code == 1 and "Gather convention: prefix_sum" in result.stdout
    assert "other numbers than the contract promises" in result.stderr and "Canaries: all right" not in result.stdout
    result = command("probe", spoiled, "--json")
    assert result.exit_code == 1 and json.loads(result.stdout)["canary_error"]["error"] == "CanaryError"


def test_full_finds_a_changed_byte_that_has_the_right_size(command, engine_path, tmp_path):
    copy = shutil.copytree(engine_path, tmp_path / "copy")
    tokenizer = (copy / "tokenizer.json").read_text()
    (copy / "tokenizer.json").write_text(tokenizer.replace("1", "2", 1))
    assert command("probe", copy).exit_code == 0
    result = command("probe", copy, "--full")
    assert result.exit_code == 2 and "tokenizer.json' is not the one that was published" in result.stderr


def test_what_is_no_engine_is_bad_input(command, tmp_path):
    result = command("probe", tmp_path)
    assert result.exit_code == 2 and "is not an engine directory" in result.stderr
