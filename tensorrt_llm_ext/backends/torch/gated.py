"""The product of gate and up with SwiGLU in its epilogue, by QuACK's kernels for Hopper.

What a product writes is half as wide then, and SwiGLU reads nothing again. QuACK is used where it is installed (the extra
``hopper``) and runs on what it was measured on, compute capability 9.0; elsewhere the product and SwiGLU are two passes.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import metadata
from types import ModuleType

import torch

from tensorrt_llm_ext.backends.torch.values import FP8, Linear, Rows
from tensorrt_llm_ext.errors import BackendError

_CAPABILITY = (9, 0)
_VERSION = "0.6."  # of quack-kernels: its epilogues are not a stable interface
_ALIGNED = 16  # bytes: what the card's unit for copies asks of a row


def can_multiply(linear: Linear) -> bool:
    """Say whether ``multiply`` serves this layer here: without a bias, in bfloat16 or e4m3, with rows that the card can copy."""
    size_out, size_in = linear.weight.shape
    fits = size_in * linear.weight.itemsize % _ALIGNED == 0 and size_out % _ALIGNED == 0
    return linear.weight.dtype in (torch.bfloat16, FP8) and linear.bias is None and fits and _epilogues() is not None


def multiply(rows: Rows, linear: Linear, out: torch.Tensor) -> None:
    """Write silu(gate) * up of ``rows @ weight.T`` to ``out`` (bfloat16 ``[M, intermediate]``), on torch's current stream.

    ``linear`` holds gate above up. Every number of rows is multiplied in the same tiles: a row's bytes do not depend on the batch.
    """
    _epilogues().multiply(rows, linear, out)


@lru_cache(maxsize=1)
def _epilogues() -> ModuleType | None:
    """The module that needs QuACK; None where that is not installed, or cannot run."""
    try:
        version = metadata.version("quack-kernels")
    except metadata.PackageNotFoundError:
        return None
    if not version.startswith(_VERSION) or not torch.cuda.is_available() or torch.cuda.get_device_capability() != _CAPABILITY:
        return None
    try:
        from tensorrt_llm_ext.backends.torch import epilogues
    except (ImportError, AttributeError, TypeError) as error:  # of one of the packages that it stands on
        raise BackendError(
            f"QuACK {version} is installed, but it does not import",
            expected="what the extra hopper installs: pip install 'tensorrt_llm_ext[hopper]'",
            found=error,
            fix="install the extra again, or remove quack-kernels: the engine runs without it, a few percent slower",
        ) from error
    return epilogues
