"""The benchmark of starts, on a tiny shape on the CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

import start_time  # noqa: E402
from test_torch_h200 import TINY  # noqa: E402


@pytest.mark.parametrize("precision", ["bfloat16", "fp8"])
def test_an_engine_of_random_weights_is_written_and_each_start_is_taken_apart(precision, tmp_path, monkeypatch):
    a, environments = TINY["llama-2-7b"], []

    def run(command, env, **options):
        environments.append(env)
        found = start_time.opened(Path(command[2]), command[4], a)
        return subprocess.CompletedProcess(command, 0, "words of a library\n" + json.dumps(found) + "\n")

    monkeypatch.setattr(start_time.subprocess, "run", run)
    report = start_time.measured(tmp_path, precision, a)
    assert [*report["starts"]] == ["first", "second"] and environments[0] == environments[1]
    for start in report["starts"].values():
        parts = {name: seconds for name, seconds in start.items() if name != "all"}
        assert {*parts} == {"interpreter and imports", "weights", "the rest of opening"}
        assert sum(parts.values()) == pytest.approx(start["all"]) and min(parts.values()) >= 0
