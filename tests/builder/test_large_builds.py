"""A plan of a 7B model is compiled on a small machine: in time, and in memory. Random weights, ``make test-slow``."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

HERE = Path(__file__).parent
GIB = 1 << 30


def built(folder, precision):
    """What a build in a process of its own took. Pages of mapped files, the checkpoint's above all, are in
    ``peak_rss_bytes`` and not in ``peak_private_bytes``: the system takes them back when it needs them."""
    environment = os.environ | {"PYTHONPATH": f"{HERE.parents[1]}:{HERE.parent}"}
    command = [sys.executable, str(HERE / "large_build.py"), str(folder / "checkpoint"), precision]
    with open(folder / "stdout", "wb") as out, open(folder / "stderr", "wb") as errors:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=errors)
        peak = 0
        while process.poll() is None:
            peak = max(peak, private_bytes(process.pid))
            time.sleep(0.1)
    assert process.returncode == 0, (folder / "stderr").read_text()[-2000:]
    return {**json.loads((folder / "stdout").read_text().splitlines()[-1]), "peak_private_bytes": peak}


def private_bytes(pid):
    """Memory of a process that is no file's; 0 once it has ended."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status.get("RssAnon", "0 kB").split()[0]) * 1024


def needs(folder, disk_gib, memory_gib):
    if psutil.disk_usage(str(folder)).free < disk_gib * GIB or psutil.virtual_memory().available < memory_gib * GIB:
        pytest.skip(f"needs {disk_gib} GiB of disk and {memory_gib} GiB of memory")


@pytest.mark.slow
def test_a_7b_fp8_plan_takes_under_two_minutes_and_16_gib(tmp_path):
    pytest.importorskip("tensorrt_rtx_bindings")
    needs(tmp_path, 24, 16)
    facts = built(tmp_path, "fp8")
    print(facts)
    assert facts["plan_bytes"] > 6 * GIB
    assert facts["seconds"] < 120 and facts["peak_rss_bytes"] < 16 * GIB, facts


@pytest.mark.slow
def test_a_7b_fp8_plan_takes_under_16_gib_with_calibration_and_canaries_too(tmp_path):
    """Half an hour: every product's harm is measured, on 64 tokens; the states of 1,024, as a build takes, are 2 GiB more."""
    pytest.importorskip("tensorrt_rtx_bindings")
    needs(tmp_path, 30, 16)
    facts = built(tmp_path, "fp8-calibrated")
    print(facts)
    assert facts["plan_bytes"] > 6 * GIB and facts["measured_tokens"] == 64 and facts["fp8_linears"] == 7 * 32
    assert facts["peak_private_bytes"] < 14 * GIB, facts


@pytest.mark.slow
def test_a_7b_bfloat16_plan_fits_in_24_gib(tmp_path):
    """Two of them are left to the system and its file cache."""
    pytest.importorskip("tensorrt_rtx_bindings")
    needs(tmp_path, 44, 22)
    facts = built(tmp_path, "bfloat16")
    print(facts)
    assert facts["plan_bytes"] > 12 * GIB
    assert facts["peak_private_bytes"] < 22 * GIB, facts
