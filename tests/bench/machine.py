"""What a figure was measured on: card, driver, versions and commit."""

from __future__ import annotations

import argparse
import subprocess
from contextlib import suppress
from importlib import metadata
from pathlib import Path


def card(commit: str | None = None) -> dict[str, str]:
    """Name the first CUDA card and what drives it; ``commit`` for a tree that travelled without its history."""
    import torch

    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split()[0]
    commit = commit or _output("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+")
    found = {"card": torch.cuda.get_device_name(), "driver": driver, "cuda": torch.version.cuda, "torch": torch.__version__}
    for name, package in (("triton", "triton"), ("transformers", "transformers"), ("quack", "quack-kernels")):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(package)
    return {**found, "commit": commit}


def arguments(description: str) -> argparse.ArgumentParser:
    """Start a card benchmark's command line."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("--json", help="write the report to this file")
    parser.add_argument("--commit", help="the commit of this tree, when its history is elsewhere")
    return parser


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
