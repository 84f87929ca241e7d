"""The README's table holds what was measured, between its markers, and nothing around it changes."""

import importlib.util
from pathlib import Path

import pytest

from tensorrt_llm_ext.checks import BenchResult
from tensorrt_llm_ext.checks.bench import Timing

SPEC = importlib.util.spec_from_file_location("write_table", Path(__file__).with_name("write_table.py"))
write_table = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(write_table)

MACHINE = {"cpu": "a CPU", "onnxruntime": "1", "torch": "2", "transformers": "5", "python": "3", "system": "Linux", "commit": "abc+"}
RESULT = BenchResult(
    model="tiny",
    num_prompts=3,
    num_tokens=1234,
    longest=9,
    num_threads=2,
    num_rounds=3,
    timings=(
        Timing("this engine", "float32", "packed", 900.0, 1.0, (1.0,), 1.0),
        Timing("transformers", "float32", "padded", 300.0, 1.0, (1.0,), None),
    ),
    ratios={},
    notes=("something is left out",),
    machine=MACHINE,
)


def test_the_table_has_a_line_a_contender_with_the_ratio_to_ours():
    lines = write_table.table(RESULT).splitlines()
    assert lines[0].startswith("tiny: 3 prompts of 1 to 9 tokens, 1,234 in all; 2 threads of a CPU")
    assert "| this engine | float32 | packed | 900 | 1.00 | 1.000000 |" in lines
    assert "| transformers | float32 | padded | 300 | 3.00 |  |" in lines
    assert lines[-2] == "something is left out." and lines[-1].endswith("commit abc+.")


def test_only_what_is_between_the_markers_changes():
    text = "before <!-- bench:cpu -->\nold\n<!-- /bench:cpu --> after\n"
    once = write_table.replaced(text, "new")
    assert once == "before <!-- bench:cpu -->\nnew\n<!-- /bench:cpu --> after\n"
    assert write_table.replaced(once, "new") == once


@pytest.mark.parametrize("text", ["", "<!-- bench:cpu -->", "<!-- /bench:cpu --> <!-- bench:cpu -->"])
def test_without_both_markers_nothing_is_written(text):
    with pytest.raises(SystemExit, match="expected one <!-- bench:cpu -->"):
        write_table.replaced(text, "new")
