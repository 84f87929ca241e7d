"""open_checkpoint: find out what lies at a path, and open it."""

from __future__ import annotations

from pathlib import Path

from gguf import GGUF_MAGIC

from tensorrt_llm_ext.checkpoint.gguf import GgufCheckpoint
from tensorrt_llm_ext.checkpoint.hf import CONFIG, HfCheckpoint
from tensorrt_llm_ext.checkpoint.protocol import Checkpoint
from tensorrt_llm_ext.errors import UnsupportedCheckpoint

_EXPECTED = "a Hugging Face folder (config.json and safetensors), a .gguf file, or a folder with one .gguf file"


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Open a checkpoint and check its headers; no weight is read.

    Raises UnsupportedCheckpoint for what is not a checkpoint we serve, DamagedCheckpoint for one that is broken.
    """
    path = Path(path)
    if path.is_file():
        return _open_file(path)
    if not path.is_dir():
        raise _refusal(path, "nothing at this path", "correct the path; a model of the hub is downloaded first")
    if (path / "contract.json").exists():
        raise _refusal(path, "an engine (contract.json)", "name the checkpoint that the engine was built from")
    if (path / CONFIG).exists():
        return HfCheckpoint(path)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return GgufCheckpoint(files[0])
    if files:
        raise _refusal(path, f"{len(files)} GGUF files: {', '.join(f.name for f in files)}", "name one of the files")
    raise _refusal(path, f"a folder without {CONFIG} and without GGUF files", "name the folder that holds config.json")


def _open_file(path: Path) -> Checkpoint:
    with open(path, "rb") as file:
        is_gguf = file.read(4) == GGUF_MAGIC.to_bytes(4, "little")
    if is_gguf or path.suffix == ".gguf":  # a damaged GGUF file gets its own error
        return GgufCheckpoint(path)
    raise _refusal(path, f"a file of another type ('{path.suffix}')", "name the folder that holds config.json")


def _refusal(path: Path, found: str, fix: str) -> UnsupportedCheckpoint:
    return UnsupportedCheckpoint(f"'{path}' is not a checkpoint", expected=_EXPECTED, found=found, fix=fix)
