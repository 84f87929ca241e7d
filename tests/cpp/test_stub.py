"""The Python-visible signatures are a golden file: an accidental change of the door is a failing diff."""

import subprocess
import sys
from pathlib import Path

GOLDEN = Path(__file__).parents[2] / "tensorrt_llm_ext" / "_runtime.pyi"


def test_the_stub_is_what_the_module_says(tmp_path):
    command = [sys.executable, "-m", "pybind11_stubgen", "tensorrt_llm_ext._runtime", "-o", str(tmp_path), "--exit-code"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr
    made = (tmp_path / "tensorrt_llm_ext" / "_runtime.pyi").read_text()
    assert GOLDEN.read_text() == made, f"write it anew: python {' '.join(command[1:4])} -o ."
