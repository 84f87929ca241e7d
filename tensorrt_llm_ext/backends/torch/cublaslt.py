"""FP8 products by cuBLASLt, called directly: torch's door to it can neither add to what is there nor fix the algorithm.

One algorithm serves every number of rows of a layer, so the order of summation of a row, and its bytes, do not depend on
the batch; it needs no memory to work in, which would have to be cleared before every product; and the product is added to
the residual stream where it lies, which spares the next norm a pass over it.

Constants are those of cublasLt.h (CUDA 13). A row-major ``x @ weight.T`` is the column-major ``weight @ x.T``, transposed.
"""

from __future__ import annotations

import ctypes
import threading
from ctypes import byref, c_float, c_int, c_int8, c_int32, c_int64, c_size_t, c_uint64, c_void_p, sizeof
from functools import lru_cache

import torch

from tensorrt_llm_ext.backends.torch.values import Linear, Rows

_FLOAT32, _BFLOAT16, _E4M3 = 0, 14, 28  # cudaDataType_t
_COMPUTE_FLOAT32 = 68
_TRANSPOSE_A, _EPILOGUE, _BIAS, _SCALE_A, _SCALE_B, _FAST_SUM, _BIAS_TYPE, _SCALES_A, _SCALES_B = 3, 7, 8, 17, 18, 25, 26, 31, 32
_SCALE_A_ROW = 3  # CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F
_ADD_BIAS = 4
_REFERENCE_ROWS = 16384  # the rows that the algorithm is chosen for
_ANY_ADDRESS = 256

_ENQUEUEING = threading.Lock()
"""Held from the setting of a plan's addresses to its call: engines in several threads share the plans."""


class _Heuristic(ctypes.Structure):
    _fields_ = [
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


@lru_cache(maxsize=1)
def is_available() -> bool:
    """Say whether this card and library multiply e4m3 with a scale a row and a scale an output."""
    try:
        _algorithm(256, 256)
    except (OSError, RuntimeError, AttributeError):
        return False
    return True


def multiply(rows: Rows, linear: Linear, out: torch.Tensor, *, adds: bool) -> None:
    """Write ``rows @ weight.T + bias`` to ``out`` (bfloat16 ``[M, out]``), or add it, on torch's current stream."""
    (num_rows, size_in), size_out = rows.values.shape, len(linear.weight)
    stream = torch.cuda.current_stream().cuda_stream
    algorithm = _algorithm(size_out, size_in)
    plan = _plan(num_rows, size_out, size_in, linear.bias is not None)
    library, handle = _library()
    with _ENQUEUEING:
        plan.set(_SCALE_A, c_void_p(linear.scales.data_ptr()))
        plan.set(_SCALE_B, c_void_p(rows.scales.data_ptr()))
        if linear.bias is not None:
            plan.set(_BIAS, c_void_p(linear.bias.data_ptr()))
        _check(
            library.cublasLtMatmul(
                handle, plan.operation, byref(c_float(1)), c_void_p(linear.weight.data_ptr()), plan.a,
                c_void_p(rows.values.data_ptr()), plan.b, byref(c_float(adds)), c_void_p(out.data_ptr()), plan.d,
                c_void_p(out.data_ptr()), plan.d, byref(algorithm), None, c_size_t(0), c_void_p(stream),
            )
        )  # fmt: skip


class _Plan:
    """The library's descriptors of one shape. They live as long as the process, like the shapes of its engines."""

    def __init__(self, num_rows: int, size_out: int, size_in: int, has_bias: bool) -> None:
        self.operation = c_void_p()
        _check(_library()[0].cublasLtMatmulDescCreate(byref(self.operation), _COMPUTE_FLOAT32, _FLOAT32))
        self.set(_TRANSPOSE_A, c_int32(1))
        self.set(_FAST_SUM, c_int8(1))
        for mode, scale in ((_SCALES_A, _SCALE_A), (_SCALES_B, _SCALE_B)):
            self.set(mode, c_int32(_SCALE_A_ROW))
            self.set(scale, c_void_p(_ANY_ADDRESS))  # no algorithm is found without one; each call sets its own
        if has_bias:
            self.set(_EPILOGUE, c_int32(_ADD_BIAS))
            self.set(_BIAS_TYPE, c_int32(_BFLOAT16))
        self.a = _matrix(_E4M3, size_in, size_out)
        self.b = _matrix(_E4M3, size_in, num_rows)
        self.d = _matrix(_BFLOAT16, size_out, num_rows)

    def set(self, attribute: int, value: ctypes._SimpleCData) -> None:
        library = _library()[0]
        _check(library.cublasLtMatmulDescSetAttribute(self.operation, attribute, byref(value), c_size_t(sizeof(value))))


_plan = lru_cache(maxsize=None)(_Plan)


@lru_cache(maxsize=None)
def _algorithm(size_out: int, size_in: int) -> ctypes.Array:
    plan, library = _plan(_REFERENCE_ROWS, size_out, size_in, False), _library()[0]
    preference, best, num_found = c_void_p(), _Heuristic(), c_int()
    _check(library.cublasLtMatmulPreferenceCreate(byref(preference)))
    status = library.cublasLtMatmulAlgoGetHeuristic(
        _library()[1], plan.operation, plan.a, plan.b, plan.d, plan.d, preference, 1, byref(best), byref(num_found)
    )
    library.cublasLtMatmulPreferenceDestroy(preference)
    _check(status)
    if num_found.value == 0:
        raise RuntimeError("cuBLASLt has no algorithm for e4m3 with scales of rows")
    return best.algorithm


@lru_cache(maxsize=1)
def _library() -> tuple[ctypes.CDLL, c_void_p]:
    """The library that torch has loaded, and a handle of our own."""
    library = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.partition('.')[0]}")
    handle = c_void_p()
    _check(library.cublasLtCreate(byref(handle)))
    return library, handle


def _matrix(dtype: int, rows: int, columns: int) -> c_void_p:
    layout = c_void_p()
    _check(_library()[0].cublasLtMatrixLayoutCreate(byref(layout), dtype, c_uint64(rows), c_uint64(columns), c_int64(rows)))
    return layout


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt returned status {status} (cublasStatus_t)")
