"""Memory stays flat however long the input is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

NUM_ROWS = 100_000
ALLOWED_GROWTH = 32e6  # bytes: 16 a row for the request ids, Lance's list of files, and what the allocator keeps


@pytest.mark.slow
def test_a_hundred_thousand_short_rows_take_no_more_memory_than_ten_thousand(tmp_path):
    script = Path(__file__).with_name("measured_run.py")
    result = subprocess.run(
        [sys.executable, str(script), str(NUM_ROWS), str(tmp_path)], capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr[-4000:]
    for name, run in json.loads(result.stdout).items():
        resident = run["resident"]
        print(f"{name}: {[round(size / 1e6) for size in resident]} MB after each tenth")
        assert len(resident) == 10 and resident[-1] - resident[0] < ALLOWED_GROWTH, name
        assert run["report"]["shortfall"] == 0
        assert run["report"]["stored" if name == "first" else "already_stored"] == NUM_ROWS
