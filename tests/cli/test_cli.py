"""The command itself: verbs are files, errors are printed whole, and every verb speaks JSON."""

import json
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from tensorrt_llm_ext import __version__, errors
from tensorrt_llm_ext.cli import exit_code, main, verb
from tensorrt_llm_ext.errors import InputError

VERBS = main.list_commands(None)


@verb
@click.argument("name")
def failing(name, as_json):
    """Fails on purpose."""
    raise InputError(f"'{name}' is missing", expected="a file", found="nothing", fix="name a file")


def test_version_is_the_package_version():
    assert CliRunner().invoke(main, ["--version"]).output.split()[-1] == __version__


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_is_a_command_with_help_and_json(name):
    command = main.get_command(None, name)
    assert command.name == name and command.help
    assert any("--json" in parameter.opts for parameter in command.params)
    assert CliRunner().invoke(main, [name, "--help"]).exit_code == 0


def test_an_unknown_verb_offers_the_nearest_and_is_wrong_usage():
    result = CliRunner().invoke(main, ["rnu"])
    assert result.exit_code == 2 and "did you mean 'run'?" in result.output


def test_an_error_is_printed_with_expected_found_and_what_to_do_on_standard_error():
    result = CliRunner().invoke(failing, ["prompts.jsonl"])
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.splitlines() == [
        "InputError: 'prompts.jsonl' is missing",
        "  expected: a file",
        "  found:    nothing",
        "  to do:    name a file",
    ]


def test_an_error_is_one_json_object_on_standard_output_with_json():
    result = CliRunner().invoke(failing, ["prompts.jsonl", "--json"])
    assert result.exit_code == 2 and result.stderr == ""
    assert json.loads(result.stdout) == {
        "error": "InputError",
        "what": "'prompts.jsonl' is missing",
        "expected": "a file",
        "found": "nothing",
        "fix": "name a file",
    }


def test_an_interrupt_is_told_like_an_error_and_exits_with_130():
    @verb
    def interrupted(as_json):
        """Meets Ctrl-C."""
        raise KeyboardInterrupt

    result = CliRunner().invoke(interrupted, [])
    assert result.exit_code == 130 and result.stderr.startswith("Interrupted: Ctrl-C ended the command at once")
    result = CliRunner().invoke(interrupted, ["--json"])
    assert result.exit_code == 130 and json.loads(result.stdout)["error"] == "Interrupted" and result.stderr == ""


@pytest.mark.parametrize(
    ("words", "what", "usage"),
    [
        (["run", "engine", "--max-length", "0"], "0 is not in the range", "run [OPTIONS] ENGINE"),
        (["run", "engine", "--limti", "1"], "did you mean '--limit'", "run [OPTIONS] ENGINE"),
        (["verify"], "missing argument 'engine'", "verify [OPTIONS] ENGINE"),
        (["rnu"], "did you mean 'run'?", "[OPTIONS] COMMAND [ARGS]..."),
        (["--limit", "1", "run"], "no such option", "[OPTIONS] COMMAND [ARGS]..."),
    ],
)
def test_wrong_usage_is_one_json_object_with_json(words, what, usage):
    plain = CliRunner().invoke(main, words, prog_name="trtllm-extract")
    assert plain.exit_code == 2 and plain.stdout == "" and what in plain.stderr.lower()
    result = CliRunner().invoke(main, [*words, "--json"], prog_name="trtllm-extract")
    assert result.exit_code == 2 and result.stderr == ""
    described = json.loads(result.stdout)
    assert what in described["what"].lower() and described["expected"] == f"trtllm-extract {usage}"
    assert described["found"] == " ".join([*words, "--json"]) and described["fix"].endswith(" --help")
    assert described.keys() == InputError("a", expected="", found="", fix="").to_dict().keys()


def test_help_imports_no_library_that_runs_something():
    script = (
        "import sys; from click.testing import CliRunner; from tensorrt_llm_ext.cli import main;"
        "assert CliRunner().invoke(main, ['--help']).exit_code == 0;"
        "print(sorted({'lance', 'onnxruntime', 'torch', 'pyarrow', 'onnx', 'tokenizers'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.VerificationFailed, 1),
        (errors.CanaryError, 1),
        (errors.ConventionError, 1),
        (errors.BackendError, 1),
        (errors.DiskFull, 1),
        (errors.BuildError, 1),
        (errors.ForeignDataset, 2),
        (errors.UnsupportedCheckpoint, 2),
        (errors.ContractError, 2),
        (errors.IncompatibleEngine, 2),
        (errors.TapError, 2),
        (errors.RecipeError, 2),
        (errors.MissingExtra, 2),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_bad_input_exits_with_2_and_an_answer_that_is_no_with_1(error, code):
    assert exit_code(error("what", expected="a", found="b", fix="c")) == code
