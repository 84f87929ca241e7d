"""The user's cache folder of this package: what a later start need not find out or compile again."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """The folder, which need not exist: in ``XDG_CACHE_HOME``, or ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "tensorrt_llm_ext"


def can_be_shared(folder: Path) -> bool:
    """Make the folder, and say whether processes can share it: write into it, and hold locks there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
