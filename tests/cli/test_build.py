"""build makes an engine and says in words what it made; what is wrong with the request is said before anything is built."""

import json

import pytest

from tensorrt_llm_ext.recipes import read_contract


def test_an_engine_with_defaults_is_summed_up_in_words(command, checkpoint_path, tmp_path):
    result = command("build", "--checkpoint", checkpoint_path, "--out", tmp_path / "engine")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("engine: checkpoint for backend ort")
    assert "final@last in final_post_last float32" in result.stdout and "Built in" in result.stdout
    assert f"Next: trtllm-extract run {tmp_path / 'engine'}" in result.stdout
    assert read_contract(tmp_path / "engine").limits.max_seq_len == 512


def test_options_go_before_the_recipe(command, checkpoint_path, tmp_path):
    (tmp_path / "mine.toml").write_text('name = "mine"\ntaps = "layer:1@mean"\nmax_seq_len = 64\nmax_batch_size = 7\n')
    words = ["build", tmp_path / "mine.toml", "--checkpoint", checkpoint_path, "--out", tmp_path / "engine", "--json"]
    result = command(*words, "--taps", "final:pre@last", "--max-seq-len", 32, "--precision", "float16")
    value = json.loads(result.stdout)
    contract = read_contract(tmp_path / "engine")
    assert value["engine"] == str(tmp_path / "engine") and value["build"] == contract.build
    assert value["facts"]["engine_fingerprint"] == contract.engine_fingerprint()
    assert [tap.spelling(8) for tap in contract.taps] == ["final:pre@last"]
    assert (contract.limits.max_seq_len, contract.limits.max_batch_size) == (32, 7)
    assert contract.activation_dtype == "float16"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--taps", "layer:8@last"], "before and after the final norm differ"),
        (["--card", "cpuu"], "there is no card named 'cpuu'"),
        (["--card", "l40s", "--card", "cpu"], "l40s trt, cpu ort"),
        (["--card", "l40s", "--card", "a100", "--precision", "fp8"], "the card 'a100' (NVIDIA A100) cannot build fp8"),
        (["--precision", "bfloat16"], "cannot build bfloat16 engines"),
        (["--max-seq-len", "100000"], "longer than the model can be run at exactly"),
        (["smollm2-135m"], "is for another model"),
        (["smollm2-135"], "there is no recipe named 'smollm2-135'"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_a_request_that_cannot_be_is_bad_input_and_leaves_nothing(command, checkpoint_path, tmp_path, options, words):
    result = command("build", "--checkpoint", checkpoint_path, "--out", tmp_path / "engine", *options)
    assert result.exit_code == 2 and words in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_several_cards_are_named_one_by_one(command, checkpoint_path, tmp_path):
    pytest.importorskip("tensorrt_rtx_bindings")
    words = ["build", "--checkpoint", checkpoint_path, "--out", tmp_path / "engine", "--precision", "float16"]
    result = command(*words, "--card", "rtx5090", "--card", "l40s")
    assert result.exit_code == 0 and "compute capability 8.9, 12.0, host linux-x86_64" in result.stdout


def test_without_a_checkpoint_the_usage_is_wrong(command, tmp_path):
    result = command("build", "--out", tmp_path / "engine")
    assert result.exit_code == 2 and "--checkpoint" in result.stderr
