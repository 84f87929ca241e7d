"""build makes an engine and says in words what it made; what is wrong with the request is said before anything is built."""

import json

import pytest

from tensorrt_llm_ext.backends.torch.weight_index import read_weight_index
from tensorrt_llm_ext.recipes import read_contract, toml_file


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
    ("options", "key", "expected"),
    [(["--deterministic"], "", True), (["--deterministic"], "false", True), ([], "true", True), ([], "", False)],
    ids=["option", "option before recipe", "recipe", "neither"],
)
def test_the_same_bytes_in_any_batch_are_asked_for_by_option_or_recipe(command, checkpoint_path, tmp_path, options, key, expected):
    (tmp_path / "mine.toml").write_text('taps = "final@last"\n' + (f"is_deterministic = {key}\n" if key else ""))
    card = tmp_path / "torch.toml"
    card.write_text((toml_file.DATA / "cards" / "cpu.toml").read_text().replace('"ort"', '"torch"'))
    words = ["build", tmp_path / "mine.toml", "--checkpoint", checkpoint_path, "--out", tmp_path / "engine", "--card", card]
    result = command(*words, *options)
    assert result.exit_code == 0, result.output
    assert read_weight_index(tmp_path / "engine").is_deterministic is expected


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--taps", "layer:8@last"], "before and after the final norm differ"),
        (["--card", "cpuu"], "there is no card named 'cpuu'"),
        (["--card", "l40s", "--card", "cpu"], "l40s trt, cpu ort"),
        (["--card", "l40s", "--card", "a100", "--precision", "fp8"], "the card 'a100' (NVIDIA A100) cannot build fp8"),
        (["--precision", "bfloat16"], "cannot build bfloat16 engines"),
        (["--deterministic"], "backend ort cannot promise the same bytes in any batch"),
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


@pytest.mark.parametrize("cards", [["--card", "rtx5090", "--card", "l40s"], ["--card", "rtx5090,l40s"]], ids=str)
def test_several_cards_get_one_engine(command, checkpoint_path, tmp_path, cards):
    pytest.importorskip("tensorrt_rtx_bindings")
    words = ["build", "--checkpoint", checkpoint_path, "--out", tmp_path / "engine", "--precision", "float16"]
    result = command(*words, *cards)
    assert result.exit_code == 0 and "compute capability 8.9, 12.0, host linux-x86_64" in result.stdout


def test_the_path_of_a_card_may_hold_a_comma(command, checkpoint_path, tmp_path):
    (tmp_path / "mine, too.toml").write_bytes((toml_file.DATA / "cards" / "cpu.toml").read_bytes())
    words = ["build", "--checkpoint", checkpoint_path, "--out", tmp_path / "engine", "--card", tmp_path / "mine, too.toml"]
    assert command(*words).exit_code == 0


@pytest.mark.parametrize("name", ["none.jsonl", "none", "empty.bin"])
def test_text_that_cannot_be_calibrated_on_is_bad_input_without_options_of_other_verbs(command, checkpoint_path, tmp_path, name):
    (tmp_path / "empty.bin").write_bytes(b"")
    words = ["build", "--checkpoint", checkpoint_path, "--out", tmp_path / "engine", "--precision", "fp8"]
    result = command(*words, "--calibration", tmp_path / name)
    assert result.exit_code == 2 and "cannot be calibrated on" in result.stderr
    assert "--calibration prompts.jsonl" in result.stderr and "--format" not in result.stderr


def test_without_a_checkpoint_the_usage_is_wrong(command, tmp_path):
    result = command("build", "--out", tmp_path / "engine")
    assert result.exit_code == 2 and "--checkpoint" in result.stderr
