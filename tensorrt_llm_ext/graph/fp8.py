"""Numbers of float8_e4m3fn: the scales by which values fit them, and the rounding itself."""

from __future__ import annotations

import ml_dtypes
import numpy as np

FP8 = "float8_e4m3fn"
FP8_MAX = float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max)  # 448
_PIECE = 1 << 14  # values rounded at once: they stay in the cache, and their memory in the process
_SMALLEST_NORMAL = np.float32(2**-6)
_EXPONENT_SHIFT = np.uint32((127 - 7) << 3)  # float32 counts exponents from -127, FP8 from -7
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
    """Divide ``[rows, width]`` by the scales, ``[rows, 1]`` or one, and round to float8_e4m3fn: to nearest, ties to even,
    what is too large to the largest. NaN stays NaN."""
    codes = np.empty(values.shape, np.uint8)
    scales = np.broadcast_to(np.asarray(scales, np.float32), (len(values), 1))
    num_rows = max(1, _PIECE // values.shape[1])
    for start in range(0, len(values), num_rows):
        piece = slice(start, start + num_rows)
        codes[piece] = _codes(values[piece].astype(np.float32) / scales[piece])
    return codes.view(ml_dtypes.float8_e4m3fn)


def _codes(x: np.ndarray) -> np.ndarray:
    """The codes of float32 values by integer arithmetic: little more than half the time of a cast."""
    size = np.minimum(np.abs(x), np.float32(FP8_MAX))
    bits = size.view(np.uint32)
    codes = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - _EXPONENT_SHIFT  # of normal numbers: 3 bits of 23 are left
    with np.errstate(invalid="ignore"):  # NaN, which gets its code below
        multiples = np.rint(size * 512).astype(np.uint32)
    codes = np.where(size < _SMALLEST_NORMAL, multiples, codes)  # the others are multiples of 2^-9
    codes = np.where(np.isnan(x), np.uint32(0x7F), codes)
    return codes | np.signbit(x).astype(np.uint32) << 7
