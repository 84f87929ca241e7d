"""show prints what something is; what it does not know is an answer of its own."""

import json


def test_a_fact_a_line_with_lists_below_each_other(command, engine_path):
    result = command("show", engine_path)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == "engine: checkpoint for backend ort"
    place = next(i for i, line in enumerate(lines) if line.startswith("  taps "))
    assert lines[place].endswith("final@last in final_post_last float32 [B, 48]")
    assert lines[place + 1].strip() == "layer:3@all in layer_003_pre_all float32 [T, 48]"


def test_json_holds_path_kind_title_and_facts(command, checkpoint_path):
    value = json.loads(command("show", checkpoint_path, "--json").stdout)
    assert (value["path"], value["kind"], value["title"]) == (str(checkpoint_path), "checkpoint", "checkpoint")
    assert value["facts"]["architecture"].startswith("qwen2: 8 layers")


def test_something_unknown_exits_with_1_and_says_what_was_looked_for(command, tmp_path):
    (tmp_path / "x").write_text("hello")
    result = command("show", tmp_path / "x")
    assert result.exit_code == 1 and "unknown: a file that this package does not know" in result.stdout
    assert "a checkpoint: a GGUF file" in result.stdout
    assert json.loads(command("show", tmp_path / "x", "--json").stdout)["kind"] == "unknown"


def test_nothing_at_the_path_is_bad_input(command, tmp_path):
    result = command("show", tmp_path / "none")
    assert result.exit_code == 2 and "there is nothing at" in result.stderr


def test_an_engine_is_held_against_another(command, engine_path, checkpoint_path, tmp_path):
    result = command("show", engine_path, "--against", engine_path)
    assert (result.exit_code, result.stdout) == (0, "The same engine: the contracts are equal.\n")
    other = tmp_path / "other"
    words = ["--taps", "final@last,layer:3@all", "--max-seq-len", 64]
    assert command("build", "--checkpoint", checkpoint_path, "--out", other, *words).exit_code == 0
    result = command("show", engine_path, "--against", other)
    assert result.exit_code == 1 and result.stdout.startswith("Not the same engine. The contracts differ in:")
    (line,) = [line for line in result.stdout.splitlines() if "limits.max_seq_len" in line]
    assert line.strip("│ ").split() == ["limits.max_seq_len", "│", "yes", "│", "128", "│", "64"]
    assert "Why: recipe, card or options are not the same" in result.stdout
    value = json.loads(command("show", engine_path, "--against", other, "--json").stdout)
    assert value["is_same_engine"] is False and value["against"] == str(other)
    assert {"field": "limits.max_seq_len", "is_identity": True, "here": "128", "there": "64"} in value["differences"]


def test_an_engine_held_against_no_engine_is_bad_input(command, engine_path, checkpoint_path):
    result = command("show", engine_path, "--against", checkpoint_path)
    assert result.exit_code == 2 and "is not an engine directory" in result.stderr
