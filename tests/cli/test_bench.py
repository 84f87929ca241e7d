"""bench prints one table and the ratios; JSON holds every round."""

import json

from tensorrt_llm_ext.checks import NUM_ROUNDS


def test_the_table_has_every_contender_and_the_ratios(command, engine_path, checkpoint_path, prompts_path):
    words = ["bench", engine_path, "--checkpoint", checkpoint_path, "--input", prompts_path, "--rounds", 1, "--threads", 1]
    result = command(*words)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("transformers │") in (3, 6) and "this engine" in result.stdout
    assert "times transformers float32, in order" in result.stdout and "onnxruntime" in result.stdout


def test_json_holds_every_round_and_the_refused_rows(command, engine_path, checkpoint_path, prompts_path):
    words = ["bench", engine_path, "--checkpoint", checkpoint_path, "--input", prompts_path, "--rounds", 2, "--threads", 1, "--json"]
    value = json.loads(command(*words).stdout)
    assert value["num_prompts"] == 3 and len(value["timings"][0]["round_seconds"]) == 2 and len(value["timings"]) in (4, 7)
    assert {"float32_in_order", "float32_sorted"} <= value["ratios"].keys()
    assert (len(value["timings"]) == 4) == bool(value["notes"])  # bfloat16 only where the CPU has it
    assert [refused["row"] for refused in value["refused"]] == [2]


def test_the_help_says_how_many_rounds_there_are(command):
    assert f"[default: {NUM_ROUNDS}]" in command("bench", "--help").stdout
