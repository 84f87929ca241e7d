"""A plan of a 7B model is compiled on a small machine: in time, and in memory. Random weights, ``make test-slow``."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

HERE = Path(__file__).parent
GIB = 1 << 30


def built(folder, precision):
    """What a build in a process of its own took."""
    environment = os.environ | {"PYTHONPATH": f"{HERE.parents[1]}:{HERE.parent}"}
    command = [sys.executable, str(HERE / "large_build.py"), str(folder / "checkpoint"), precision]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def needs(folder, disk_gib, memory_gib):
    if psutil.disk_usage(str(folder)).free < disk_gib * GIB or psutil.virtual_memory().available < memory_gib * GIB:
        pytest.skip(f"needs {disk_gib} GiB of disk and {memory_gib} GiB of memory")


@pytest.mark.slow
def test_a_7b_fp8_plan_takes_under_two_minutes_and_16_gib(tmp_path):
    pytest.importorskip("tensorrt_rtx_bindings")
    needs(tmp_path, 24, 16)
    facts = built(tmp_path, "fp8")
    assert facts["plan_bytes"] > 6 * GIB
    assert facts["seconds"] < 120 and facts["peak_rss_bytes"] < 16 * GIB, facts


@pytest.mark.slow
def test_a_7b_bfloat16_plan_fits_in_24_gib(tmp_path):
    pytest.importorskip("tensorrt_rtx_bindings")
    needs(tmp_path, 44, 18)
    facts = built(tmp_path, "bfloat16")
    assert facts["plan_bytes"] > 12 * GIB
    assert facts["peak_rss_bytes"] < 24 * GIB, facts
