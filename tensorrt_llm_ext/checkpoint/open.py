"""open_checkpoint: find out what lies at a path, and open it."""

from __future__ import annotations

from pathlib import Path

from tensorrt_llm_ext.checkpoint.hf import CONFIG, HfCheckpoint
from tensorrt_llm_ext.checkpoint.protocol import Checkpoint
from tensorrt_llm_ext.errors import UnsupportedCheckpoint

_EXPECTED = "a Hugging Face folder (config.json and safetensors)"


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Open a checkpoint and check its headers; no weight is read.

    Raises UnsupportedCheckpoint for what is not a checkpoint we serve, DamagedCheckpoint for one that is broken.
    """
    path = Path(path)
    if path.is_dir() and (path / CONFIG).exists():
        return HfCheckpoint(path)
    raise UnsupportedCheckpoint(
        f"'{path}' is not a checkpoint", expected=_EXPECTED, found=_what(path), fix="name a checkpoint folder"
    )


def _what(path: Path) -> str:
    return "a folder without config.json" if path.is_dir() else "a file" if path.exists() else "nothing at this path"
