"""Numbers of float8_e4m3fn: the scales by which values fit them, and the rounding itself."""

from __future__ import annotations

import ml_dtypes
import numpy as np

FP8 = "float8_e4m3fn"
FP8_MAX = float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max)  # 448
_SMALLEST_SCALE = np.float32(ml_dtypes.finfo(ml_dtypes.bfloat16).tiny)


def scale_of(largest: np.ndarray | float) -> np.ndarray:
    """The smallest scales of bfloat16 by which values up to ``largest`` fit FP8; 1 where there are only zeros.

    Rounded up, so that nothing is cut. float32.
    """
    exact = np.atleast_1d(np.asarray(largest, dtype=np.float32) / np.float32(FP8_MAX))
    above = ((exact.view(np.uint32) + 0xFFFF) & 0xFFFF0000).astype(np.uint32).view(np.float32)  # bfloat16's next
    scales = np.where(exact > 0, np.maximum(above, _SMALLEST_SCALE), np.float32(1))
    return scales.reshape(np.shape(largest))


def rounded_to_fp8(values: np.ndarray, scales: np.ndarray | float) -> np.ndarray:
    """Divide by the scales and round to float8_e4m3fn."""
    return np.clip(values.astype(np.float32) / scales, -FP8_MAX, FP8_MAX).astype(ml_dtypes.float8_e4m3fn)
