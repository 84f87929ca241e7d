"""SwiGLU as an epilogue of QuACK's product, with the scales of e4m3. Importing this module needs QuACK (the extra ``hopper``).

QuACK calls the function once for every two neighbouring outputs, gate and up of one value, while it traces its kernel. What
it compiles is kept in the user's cache folder, or where QUACK_CACHE_DIR says: its own is one in /tmp, which anyone may make first.
"""

from __future__ import annotations

import threading
from pathlib import Path

import quack.cache
import torch
from quack.activation import swiglu
from quack.epilogue import gemm_epilogue, unpack
from quack.epilogue.library import swiglu_mod
from quack.epilogue.ops import ColVecLoad, RowVecLoad

from tensorrt_llm_ext.backends.torch.user_cache import cache_folder, can_be_shared
from tensorrt_llm_ext.backends.torch.values import Linear, Rows

quack.cache.EXTRA_SOURCE_DIRS.append(Path(__file__).parent)  # it knows an installed function by its name alone
if quack.cache.CACHE_DIR is None:
    quack.cache.CACHE_DIR = str(cache_folder() / "quack")
    quack.cache.CACHE_ENABLED &= can_be_shared(cache_folder() / "quack")  # without locks each kernel would wait a minute for one

_CALLING = threading.Lock()
"""Held during a call: the first of its kind compiles, which serves one thread."""

_TILES = {"tile_M": 128, "tile_N": 192, "cluster_M": 2, "pingpong": True}
"""A tile's epilogue runs while another tile is multiplied. None that was tried on an H200 was quicker in both types."""

_FAST_SUM = (("fp8_slow_accum", False),)  # as ``cublaslt`` sums e4m3


@gemm_epilogue(
    outputs=("postact",), ops={"row_scales": ColVecLoad("row_scales"), "out_scales": RowVecLoad("out_scales")}, mode="acc_pair"
)
def _scaled_swiglu(acc, row_scales, out_scales):
    gate, up = unpack(acc * row_scales * out_scales)
    return {"postact": swiglu(gate, up)}


def multiply(rows: Rows, linear: Linear, out: torch.Tensor) -> None:
    """See ``gated.multiply``."""
    # In concat_layout: gate lies above up, and is read as if their rows took turns.
    with _CALLING:
        if linear.is_fp8:
            given = {"postact": out, "row_scales": rows.scales.view(1, -1), "out_scales": linear.scales}
            turns = ("B", "out_scales")
            _scaled_swiglu.gemm(
                rows.values, linear.weight, None, epi_args=given, concat_layout=turns, post_init_attrs=_FAST_SUM, **_TILES
            )
        else:
            swiglu_mod.gemm(rows.values, linear.weight, None, epi_args={"postact": out}, concat_layout=("B",), **_TILES)
