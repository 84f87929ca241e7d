"""``trtllm-extract patch``: shows, applies and reverts, and says what it means for upstream's own runtime."""

import json

import pytest
from click.testing import CliRunner
from upstream_source import decilm_path, definition_path, write_upstream

from tensorrt_llm_ext.cli import main


@pytest.fixture
def site(tmp_path):
    return write_upstream(tmp_path, "0.16.0")


def extract(*arguments):
    return CliRunner().invoke(main, ["patch", *map(str, arguments)])


def test_status_shows_our_lines_with_their_numbers_and_changes_nothing(site):
    before = definition_path(site).read_bytes()
    result = extract("status", "--site", site)
    assert result.exit_code == 0 and definition_path(site).read_bytes() == before
    assert "tensorrt_llm/models/modeling_utils.py, DecoderModelForCausalLM.forward: not patched" in result.stdout
    assert "5 lines would be inserted" in result.stdout
    shown = [line for line in result.stdout.splitlines() if line.startswith("  +")]
    extract("apply", "--site", site)
    lines = definition_path(site).read_text().splitlines() + decilm_path(site).read_text().splitlines()
    assert len(shown) == 10 and {line[10:].strip() for line in shown} <= {line.strip() for line in lines}
    assert "gather_last_token_logits" not in result.stdout  # ours only


def test_apply_says_that_upstreams_generation_session_rejects_such_engines(site):
    assert "GenerationSession rejects engines with unknown outputs" in extract("apply", "--site", site).stdout
    assert "modeling_utils.py, DecoderModelForCausalLM.forward: patched" in extract("status", "--site", site).stdout


def test_revert_gives_the_bytes_back(site):
    before = definition_path(site).read_bytes()
    extract("apply", "--site", site)
    result = extract("revert", "--site", site)
    assert result.exit_code == 0 and "inserted" not in result.stdout
    assert "modeling_utils.py, DecoderModelForCausalLM.forward: not patched" in result.stdout
    assert definition_path(site).read_bytes() == before


def test_json_tells_the_same(site):
    told = json.loads(extract("apply", "--site", site, "--json").stdout)
    assert told["version"] == "0.16.0" and told["site"] == str(site) and "GenerationSession" in told["notice"]
    assert [(file["class"], file["state"], len(file["lines"])) for file in told["files"]] == [
        ("DecoderModelForCausalLM", "patched", 5),
        ("DeciLMForCausalLM", "patched", 5),
    ]
    numbered = definition_path(site).read_text().splitlines()
    assert all(numbered[line["line"] - 1] == line["text"] for line in told["files"][0]["lines"])


def test_a_file_that_is_left_alone_is_shown_with_the_reason(site):
    decilm_path(site).write_text("class DeciLMForCausalLM:\n    pass\n")
    result = extract("apply", "--site", site)
    assert result.exit_code == 0
    assert "DeciLMForCausalLM.forward: not understood" in result.stdout and "one method forward" in result.stdout


def test_a_decoder_that_is_not_understood_is_an_error(site):
    definition_path(site).write_text("class DecoderModelForCausalLM:\n    pass\n")
    result = extract("apply", "--site", site)
    assert result.exit_code != 0 and "expected: one method forward" in result.stderr
    assert extract("status", "--site", site).exit_code == 0


def test_upstream_not_installed_is_a_clear_error(tmp_path):
    result = extract("status", "--site", tmp_path, "--json")
    assert result.exit_code != 0 and json.loads(result.stdout)["what"] == "TensorRT-LLM is not installed here"
