"""Rounding to FP8 is the cast that ml_dtypes does, bit by bit, and cuts what is too large."""

import ml_dtypes
import numpy as np
import pytest

from tensorrt_llm_ext.graph.fp8 import FP8_MAX, rounded_to_fp8

FP8_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)


def cast(values, scales):
    with np.errstate(invalid="ignore"):
        return np.clip(values.astype(np.float32) / scales, -FP8_MAX, FP8_MAX).astype(ml_dtypes.float8_e4m3fn)


def same_bits(found, right):
    """Equal in every bit, but for the sign of what is no number."""
    is_nan = np.isnan(right.astype(np.float32))
    is_equal = found.view(np.uint8)[~is_nan] == right.view(np.uint8)[~is_nan]
    return is_equal.any() and is_equal.all() and np.isnan(found.astype(np.float32))[is_nan].all()


def test_every_value_of_fp8_stays_itself():
    values = FP8_VALUES.astype(np.float32)[None]
    assert same_bits(rounded_to_fp8(values, 1.0), FP8_VALUES[None])


def test_values_between_go_to_the_nearest_and_ties_to_the_even():
    finite = np.sort(FP8_VALUES.astype(np.float32)[np.isfinite(FP8_VALUES.astype(np.float32))])
    middle = (finite[1:] + finite[:-1]) / 2
    values = np.stack([middle, np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(-np.inf))])
    assert same_bits(rounded_to_fp8(values, 1.0), cast(values, 1.0))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_rows_have_scales_of_their_own(dtype):
    """More rows than are rounded at once, from far too large to far too small."""
    rng = np.random.default_rng(0)
    values = (rng.standard_normal((700, 300)) * 10.0 ** rng.uniform(-6, 6, (700, 1))).astype(dtype)
    scales = (10.0 ** rng.uniform(-2, 2, (700, 1))).astype(np.float32)
    assert same_bits(rounded_to_fp8(values, scales), cast(values, scales))


def test_what_is_no_number_stays_none_and_what_is_infinite_is_the_largest():
    values = np.float32([[np.nan, -np.nan, np.inf, -np.inf, 1e9, -0.0]])
    found = rounded_to_fp8(values, 1.0).astype(np.float32)
    assert np.isnan(found[0, :2]).all() and found[0, 2:5].tolist() == [448, -448, 448] and np.signbit(found[0, 5])
