"""From our arrays to the tensors and values that others' libraries write."""

from __future__ import annotations

from types import ModuleType

import ml_dtypes
import numpy as np

from tensorrt_llm_ext.errors import MissingExtra


def library(name: str, what_for: str) -> ModuleType:
    """Import an optional library. Raises MissingExtra."""
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtra(
            f"{what_for} needs {name}, which is not installed",
            expected="the extra 'export' of this package",
            found=error,
            fix="pip install 'tensorrt_llm_ext[export]'",
        ) from error


def torch_tensor(array: np.ndarray):
    """A torch tensor of the same values; bfloat16, which torch does not take from NumPy, by its bits."""
    torch = library("torch", "this format")
    array = np.array(array)  # owned and writable, as torch wants it
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def plain(array: np.ndarray) -> np.ndarray:
    """The array in a dtype that every library knows: bfloat16 becomes float32, without loss."""
    return array.astype(np.float32) if array.dtype == ml_dtypes.bfloat16 else array
