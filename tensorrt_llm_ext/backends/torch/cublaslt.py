"""Products by cuBLASLt, called directly: torch's door to it can neither add to what is there nor fix the algorithm.

One algorithm serves every number of rows of a layer, so the order of summation of a row, and its bytes, do not depend on
the batch; and the product is added to the residual stream where it lies, which spares the next norm a pass over it.
The library orders its algorithms by an estimate; ``try_algorithms`` by time.

Constants are those of cublasLt.h (CUDA 13). A row-major ``x @ weight.T`` is the column-major ``weight @ x.T``, transposed.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from ctypes import byref, c_float, c_int, c_int8, c_int32, c_int64, c_size_t, c_uint64, c_void_p, sizeof
from dataclasses import replace
from functools import lru_cache
from itertools import cycle

import torch

from tensorrt_llm_ext.backends.torch import trials
from tensorrt_llm_ext.backends.torch.values import COUNTER_BYTES, FP8, Linear, Rows

_FLOAT32, _TYPES = 0, {torch.bfloat16: 14, FP8: 28}  # cudaDataType_t
_COMPUTE_FLOAT32 = 68
_TRANSPOSE_A, _EPILOGUE, _BIAS, _SCALE_A, _SCALE_B, _FAST_SUM, _BIAS_TYPE, _SCALES_A, _SCALES_B = 3, 7, 8, 17, 18, 25, 26, 31, 32
_SCALE_A_ROW = 3  # CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F
_ADD_BIAS = 4
_ORDER_OF_TILES = 4  # CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING
_ORDERS = (0, 1, 2)
_NUM_ALGORITHMS = 8  # of the library's own, at most
_ANY_ADDRESS = 256

REFERENCE_ROWS = 16384
"""The rows that an algorithm is chosen for."""

_ENQUEUEING = threading.Lock()
"""Held from the setting of a plan's addresses to its call: engines in several threads share the plans."""

_FEWEST_ROWS = 64
"""The fewest of a product: an algorithm must be able to compute so few, too."""

_COMPARED_ROWS = 256

_Kind = tuple[int, int, torch.dtype, bool]
"""Products that one algorithm serves: outputs, inputs, the type of rows and weights, and whether there is a bias."""

_chosen: dict[_Kind, ctypes.Array] = {}


class _LibraryError(RuntimeError):
    """The library refused a call; its status."""


class _Heuristic(ctypes.Structure):
    _fields_ = [
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


def can_multiply(linear: Linear) -> bool:
    """Say whether this card and library multiply in the type of ``linear``: bfloat16, or e4m3 with a scale a row and a scale an
    output."""
    return linear.weight.dtype in _TYPES and bool(_algorithms(_kind(linear)))


def multiply(rows: Rows, linear: Linear, out: torch.Tensor, *, adds: bool) -> None:
    """Write ``rows @ weight.T + bias`` to ``out`` (bfloat16 ``[M, out]``), or add it, on torch's current stream."""
    kind = _kind(linear)
    _enqueue(rows, linear, out, _chosen.get(kind) or _algorithms(kind)[0], adds)


def try_algorithms(rows: Rows, linears: Sequence[Linear], out: torch.Tensor, *, adds: bool) -> None:
    """Choose the algorithm that multiplies ``rows`` by these linears, which are alike, in the least time.

    The library's estimate of the best knows nothing of a card's limit of power. Only those take part that give the first one's
    bytes, so a choice changes no result; it is kept for the process and in the user's cache.
    """
    kind = _kind(linears[0])
    if kind in _chosen:
        return
    same, what, next_linear = _same_bytes(rows, linears[0], out), _described(kind), cycle(linears)
    if (known := trials.kept(what)) not in map(list, same):

        def call_of(algorithm: ctypes.Array) -> Callable[[], None]:
            return lambda: _enqueue(rows, next(next_linear), out, algorithm, adds)

        known = [*same[trials.quickest([call_of(algorithm) for algorithm in same])]]
        trials.keep(what, known)
    _chosen[kind] = (c_uint64 * 8)(*known)


def _kind(linear: Linear) -> _Kind:
    size_out, size_in = linear.weight.shape
    return size_out, size_in, linear.weight.dtype, linear.bias is not None


def _enqueue(rows: Rows, linear: Linear, out: torch.Tensor, algorithm: ctypes.Array, adds: bool) -> None:
    plan = _plan(len(rows.values), _kind(linear))
    library, handle = _library()
    counter = (None, c_size_t(0)) if rows.counter is None else (c_void_p(rows.counter.data_ptr()), c_size_t(COUNTER_BYTES))
    stream = torch.cuda.current_stream().cuda_stream
    with _ENQUEUEING:
        if linear.is_fp8:
            plan.set(_SCALE_A, c_void_p(linear.scales.data_ptr()))
            plan.set(_SCALE_B, c_void_p(rows.scales.data_ptr()))
        if linear.bias is not None:
            plan.set(_BIAS, c_void_p(linear.bias.data_ptr()))
        _check(
            library.cublasLtMatmul(
                handle, plan.operation, byref(c_float(1)), c_void_p(linear.weight.data_ptr()), plan.a,
                c_void_p(rows.values.data_ptr()), plan.b, byref(c_float(adds)), c_void_p(out.data_ptr()), plan.d,
                c_void_p(out.data_ptr()), plan.d, byref(algorithm), *counter, c_void_p(stream),
            )
        )  # fmt: skip


class _Plan:
    """The library's descriptors of one shape. They live as long as the process, like the shapes of its engines."""

    def __init__(self, num_rows: int, kind: _Kind) -> None:
        size_out, size_in, dtype, has_bias = kind
        self.operation = c_void_p()
        _check(_library()[0].cublasLtMatmulDescCreate(byref(self.operation), _COMPUTE_FLOAT32, _FLOAT32))
        self.set(_TRANSPOSE_A, c_int32(1))
        if dtype == FP8:
            self.set(_FAST_SUM, c_int8(1))
            for mode, scale in ((_SCALES_A, _SCALE_A), (_SCALES_B, _SCALE_B)):
                self.set(mode, c_int32(_SCALE_A_ROW))
                self.set(scale, c_void_p(_ANY_ADDRESS))  # no algorithm is found without one; each call sets its own
        if has_bias:
            self.set(_EPILOGUE, c_int32(_ADD_BIAS))
            self.set(_BIAS_TYPE, c_int32(_TYPES[torch.bfloat16]))
            self.set(_BIAS, c_void_p(_ANY_ADDRESS))
        self.a = _matrix(dtype, size_in, size_out)
        self.b = _matrix(dtype, size_in, num_rows)
        self.d = _matrix(torch.bfloat16, size_out, num_rows)

    def set(self, attribute: int, value: ctypes._SimpleCData) -> None:
        library = _library()[0]
        _check(library.cublasLtMatmulDescSetAttribute(self.operation, attribute, byref(value), c_size_t(sizeof(value))))


_plan = lru_cache(maxsize=None)(_Plan)


@lru_cache(maxsize=None)
def _algorithms(kind: _Kind) -> list[ctypes.Array]:
    """The library's algorithms that need no memory but a counter, its own estimate of the best first; then the same with their
    tiles in other orders. None where it has none, or is not there."""
    try:
        firsts = _firsts(kind)
    except (OSError, AttributeError, _LibraryError):
        return []
    found: dict[tuple[int, ...], ctypes.Array] = {tuple(algorithm): algorithm for algorithm in firsts}
    for algorithm in firsts:
        for order in _ORDERS:
            other = (c_uint64 * 8)(*algorithm)
            _library()[0].cublasLtMatmulAlgoConfigSetAttribute(byref(other), _ORDER_OF_TILES, byref(c_int32(order)), c_size_t(4))
            found.setdefault(tuple(other), other)
    return [algorithm for algorithm in found.values() if _fits(algorithm, kind, REFERENCE_ROWS) and _fits(algorithm, kind, _FEWEST_ROWS)]


def _firsts(kind: _Kind) -> list[ctypes.Array]:
    plan, (library, handle) = _plan(REFERENCE_ROWS, kind), _library()
    preference, found, num_found = c_void_p(), (_Heuristic * _NUM_ALGORITHMS)(), c_int()
    _check(library.cublasLtMatmulPreferenceCreate(byref(preference)))
    status = library.cublasLtMatmulAlgoGetHeuristic(
        handle, plan.operation, plan.a, plan.b, plan.d, plan.d, preference, _NUM_ALGORITHMS, found, byref(num_found)
    )
    library.cublasLtMatmulPreferenceDestroy(preference)
    _check(status)
    return [one.algorithm for one in found[: num_found.value]]


def _fits(algorithm: ctypes.Array, kind: _Kind, num_rows: int) -> bool:
    plan, (library, handle), needs = _plan(num_rows, kind), _library(), _Heuristic()
    status = library.cublasLtMatmulAlgoCheck(
        handle, plan.operation, plan.a, plan.b, plan.d, plan.d, byref(algorithm), byref(needs)
    )
    return status == 0 and needs.workspace <= COUNTER_BYTES


def _same_bytes(rows: Rows, linear: Linear, out: torch.Tensor) -> list[ctypes.Array]:
    """The algorithms that give the bytes of the first, for all rows and for few. The first and the last of many say it: they hold
    every tile of outputs, and the last to be computed."""
    expected, same = None, []
    for algorithm in _algorithms(_kind(linear)):
        found = []
        try:
            for num_rows in (len(out), _FEWEST_ROWS):
                part = replace(rows, values=rows.values[:num_rows], scales=None if rows.scales is None else rows.scales[:num_rows])
                out[:num_rows].zero_()  # what another wrote proves nothing
                _enqueue(part, linear, out[:num_rows], algorithm, adds=False)
                found += [some.view(torch.int16).clone() for some in (out[:_COMPARED_ROWS], out[-_COMPARED_ROWS:])]
        except _LibraryError:
            if expected is None:  # the library's own, which products take that are not tried
                raise
            continue
        expected = expected or found
        same += [algorithm] if all(map(torch.equal, found, expected)) else []
    return same


def _described(kind: _Kind) -> str:
    size_out, size_in, dtype, has_bias = kind
    bias = " and a bias" if has_bias else ""
    return f"cuBLASLt {_library()[0].cublasLtGetVersion()}, {dtype}, {size_out} x {size_in}{bias}"


@lru_cache(maxsize=1)
def _library() -> tuple[ctypes.CDLL, c_void_p]:
    """The library that torch has loaded, and a handle of our own."""
    library = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.partition('.')[0]}")
    library.cublasLtGetVersion.restype = c_size_t
    handle = c_void_p()
    _check(library.cublasLtCreate(byref(handle)))
    return library, handle


def _matrix(dtype: torch.dtype, rows: int, columns: int) -> c_void_p:
    layout = c_void_p()
    _check(_library()[0].cublasLtMatrixLayoutCreate(byref(layout), _TYPES[dtype], c_uint64(rows), c_uint64(columns), c_int64(rows)))
    return layout


def _check(status: int) -> None:
    if status:
        raise _LibraryError(f"cuBLASLt returned status {status} (cublasStatus_t)")
