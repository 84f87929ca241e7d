"""The product of gate and up with SwiGLU in its epilogue, by QuACK's kernels for Hopper.

What a product writes is half as wide then, and SwiGLU reads nothing again. QuACK is used where it is installed (the extra
``hopper``), in a version that this was written for, and on what it was measured on, compute capability 9.0; elsewhere the product
and SwiGLU are two passes.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import metadata
from types import ModuleType

import torch
from packaging.specifiers import SpecifierSet

from tensorrt_llm_ext.backends.torch.values import FP8, Linear, Rows
from tensorrt_llm_ext.errors import BackendError

_CAPABILITY = (9, 0)
_VERSIONS = SpecifierSet(">=0.6.5,<0.7")  # of quack-kernels, as in pyproject.toml: its epilogues are not a stable interface
_ALIGNED = 16  # bytes: what the card's unit for copies asks of a row


def can_multiply(linear: Linear) -> bool:
    """Say whether ``multiply`` serves this layer here: without a bias, in bfloat16 or e4m3, with rows that the card can copy."""
    size_out, size_in = linear.weight.shape
    row_bytes = size_in * linear.weight.itemsize, size_out // 2 * torch.bfloat16.itemsize
    fits = linear.weight.dtype in (torch.bfloat16, FP8) and linear.bias is None and not any(size % _ALIGNED for size in row_bytes)
    return fits and _is_hopper(linear.weight.device) and _epilogues() is not None


def multiply(rows: Rows, linear: Linear, out: torch.Tensor) -> None:
    """Write silu(gate) * up of ``rows @ weight.T`` to ``out`` (bfloat16 ``[M, intermediate]``), on torch's current stream.

    ``linear`` holds gate above up. Every number of rows is multiplied in the same tiles: a row's bytes do not depend on the batch.
    """
    _epilogues().multiply(rows, linear, out)


def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == _CAPABILITY


@lru_cache(maxsize=1)
def _epilogues() -> ModuleType | None:
    """The module that needs QuACK; None where that, or a version that this was written for, is not installed."""
    try:
        version = metadata.version("quack-kernels")
    except metadata.PackageNotFoundError:
        return None
    if version not in _VERSIONS:
        return None
    try:
        from tensorrt_llm_ext.backends.torch import epilogues
    except Exception as error:  # whatever the packages raise that it stands on
        raise BackendError(
            f"QuACK {version} is installed, but it does not import",
            expected="what the extra hopper installs: pip install 'tensorrt_llm_ext[hopper]'",
            found=error,
            fix="install the extra again, or remove quack-kernels: the engine runs without it, slower",
        ) from error
    return epilogues
