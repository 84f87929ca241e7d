"""The runtime's classes without Python: under the sanitizers, and with every allocation counted."""

import os
import subprocess
from pathlib import Path

import pytest
from stand_in import compile_shared

HERE = Path(__file__).parent
CPP = HERE.parents[1] / "cpp"
QUIET = (
    "allocations 0, violations 0, slots 0, tickets 0, streams 0, mapped 0, device 0, destructor errors 0, abandoned 0"
)
BUILDS = {
    "allocations": ["-O2", "-DCOUNT_ALLOCATIONS"],
    "address and undefined behaviour": ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "threads": ["-O1", "-fsanitize=thread"],
}


@pytest.mark.slow
@pytest.mark.parametrize("build", BUILDS)
def test_the_classes_run_clean(build, tmp_path):
    options = BUILDS[build]
    sanitizer = [option for option in options if option.startswith("-fsanitize")]
    stand_in = compile_shared(HERE / "stand_in_driver.cpp", tmp_path, *sanitizer)
    sources = [str(source) for source in sorted(CPP.glob("*.cpp")) if source.name != "bindings.cpp"]
    program = tmp_path / "runtime_test"
    command = ["g++", "-std=c++17", "-g", "-rdynamic", "-pthread", f"-I{CPP}", *options, str(HERE / "runtime_test.cpp"), *sources]
    subprocess.run([*command, "-o", str(program), "-ldl"], check=True, timeout=600)
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1", "ASAN_OPTIONS": "detect_leaks=1"}
    answer = subprocess.run([str(program), str(stand_in)], capture_output=True, text=True, timeout=600, env=environment)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip() == QUIET, answer.stdout + answer.stderr
