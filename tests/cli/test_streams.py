"""The command where a standard stream is closed or takes nothing."""

import os
import subprocess
import sys

import pytest

COMMAND = [sys.executable, "-m", "tensorrt_llm_ext.cli"]


def in_a_shell(redirection, *words):
    return subprocess.run(
        ["sh", "-c", f'"$@" {redirection}', "sh", *map(str, words)], capture_output=True, text=True, timeout=120
    )


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("words", [["--json"], []])
@pytest.mark.parametrize("buffering", ["", "-u"])
def test_a_full_standard_output_is_an_error_with_a_text(engine_path, words, buffering):
    command = [*COMMAND[:1], *buffering.split(), *COMMAND[1:]]
    result = in_a_shell(">/dev/full", *command, "show", engine_path, *words)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert result.stderr.startswith("Error: standard output cannot be written to") and "No space left" in result.stderr


def test_a_reader_that_has_enough_ends_the_command_quietly(engine_path):
    result = in_a_shell("| head -c 1", *COMMAND, "show", engine_path)
    assert (result.stdout, result.stderr) == ("e", "")


@pytest.mark.parametrize("redirection", ["2>&-", ">&-"])
def test_the_verbs_work_where_a_stream_is_closed(engine_path, redirection):
    result = in_a_shell(redirection, *COMMAND, "probe", engine_path)
    assert result.returncode == 0, result.stderr
    assert result.stderr == "" and ("gather convention" in result.stdout.lower()) == (redirection == "2>&-")


@pytest.mark.parametrize("redirection", ["<&-", "2>&-", "<&- 2>&-"])
def test_no_file_gets_the_number_of_a_closed_stream(redirection):
    script = (
        "import os; from tensorrt_llm_ext.cli._streams import open_standard_streams;"
        "open_standard_streams(); print(os.open('/', os.O_RDONLY))"
    )
    assert int(in_a_shell(redirection, sys.executable, "-c", script).stdout) > 2
