"""verify prints each tap's worst places and a verdict; beyond the tolerance it exits with 1."""

import json
import shutil

import pytest
import tiny
from fakes import falsify_contract


@pytest.fixture
def lying(engine_path, tmp_path):
    """A copy of the engine whose tap layer:3 claims to be layer:4."""
    copy = shutil.copytree(engine_path, tmp_path / "lying")

    def rename(contract):
        for tap in [*contract["taps"], *(t["tap"] for t in contract["tensors"] if t["tap"])]:
            tap["layer"] = {3: 4}.get(tap["layer"], tap["layer"])

    falsify_contract(copy, rename)
    return copy


def test_a_right_engine_is_called_right_and_refused_rows_are_counted(command, engine_path, checkpoint_path, prompts_path):
    result = command("verify", engine_path, "--checkpoint", checkpoint_path, "--input", prompts_path)
    assert result.exit_code == 0, result.output
    assert "3 prompts, " in result.stdout and "final@last" in result.stdout and "layer:3@all" in result.stdout
    assert "Next token: the same for 3 of 3 prompts." in result.stdout
    assert "Not compared: 1 refused rows, the first: the prompt is too long." in result.stdout
    assert result.stdout.splitlines()[-1] == "Right: every row lies within the tolerance for float32."


def test_json_holds_every_place_and_every_refusal(command, engine_path, checkpoint_path, prompts_path):
    words = ["verify", engine_path, "--checkpoint", checkpoint_path, "--input", prompts_path, "--json"]
    value = json.loads(command(*words).stdout)
    assert value["has_passed"] is True and value["canaries_updated"] is False
    assert [refused["row"] for refused in value["refused"]] == [2]
    assert value["taps"][1]["num_rows"] == value["num_tokens"]


def test_beyond_the_tolerance_it_exits_with_1_and_says_where(command, lying, checkpoint_path, prompts_path):
    words = ["verify", lying, "--checkpoint", checkpoint_path, "--input", prompts_path, "--update-canaries"]
    before = (lying / "contract.json").read_bytes()
    result = command(*words)
    assert result.exit_code == 1 and "beyond the tolerance for float32: layer:4@all" in result.stderr
    assert (lying / "contract.json").read_bytes() == before  # a wrong engine does not get new canaries
    result = command(*words, "--json")
    value = json.loads(result.stdout)
    assert result.exit_code == 1 and value["has_passed"] is False and value["canaries_updated"] is False


def test_canaries_are_updated_when_asked_for(command, engine_path, checkpoint_path, prompts_path, tmp_path):
    copy = shutil.copytree(engine_path, tmp_path / "copy")
    words = ["verify", copy, "--checkpoint", checkpoint_path, "--input", prompts_path, "--update-canaries"]
    assert "canaries are now those of transformers" in command(*words).stdout
    assert "Canaries: all right, by transformers" in command("probe", copy).stdout


def test_another_checkpoint_is_bad_input(command, engine_path, prompts_path, tmp_path):
    other = tiny.tiny_checkpoint(tmp_path / "other", "qwen2", seed=1)
    result = command("verify", engine_path, "--checkpoint", other, "--input", prompts_path)
    assert result.exit_code == 2 and "is not the checkpoint this engine was built from" in result.stderr
