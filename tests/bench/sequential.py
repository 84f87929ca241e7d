"""The sequential speed of a folder's disk: what ``dd`` writes to it, synced."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

BLOCK_BYTES = 8 << 20


def dd_speed(path: Path, num_bytes: int) -> float:
    """Write about ``num_bytes`` to ``path`` by dd, with a sync at the end; bytes a second. The file is removed."""
    count = max(1, round(num_bytes / BLOCK_BYTES))
    began = time.perf_counter()
    words = ["dd", "if=/dev/zero", f"of={path}", f"bs={BLOCK_BYTES}", f"count={count}", "conv=fsync"]
    subprocess.run(words, check=True, capture_output=True)
    seconds = time.perf_counter() - began
    path.unlink()
    return count * BLOCK_BYTES / seconds
