"""SwiGLU as an epilogue of QuACK's product, with the scales of e4m3. Importing this module needs QuACK (the extra ``hopper``).

QuACK calls the function once for every two neighbouring outputs, gate and up of one value, while it traces its kernel; what
it compiles is kept in the user's cache folder, by its version and by all that decides the code.
"""

from __future__ import annotations

import os

import quack.cache
import torch
from quack.activation import swiglu
from quack.epilogue import gemm_epilogue, unpack
from quack.epilogue.library import swiglu_mod
from quack.epilogue.ops import ColVecLoad, RowVecLoad

from tensorrt_llm_ext.backends.torch import trials
from tensorrt_llm_ext.backends.torch.values import Linear, Rows

if "QUACK_CACHE_DIR" not in os.environ:  # QuACK's own is a folder that all users of a machine share
    quack.cache.CACHE_DIR = str(trials.cache_folder() / "quack")

_TILES = {"tile_M": 128, "tile_N": 192, "cluster_M": 2, "pingpong": True}
"""The quickest of those tried on an H200, in both types: a tile's epilogue runs while another tile is multiplied."""

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
    if linear.is_fp8:
        given = {"postact": out, "row_scales": rows.scales.view(1, -1), "out_scales": linear.scales}
        _scaled_swiglu.gemm(
            rows.values, linear.weight, None, epi_args=given, concat_layout=("B", "out_scales"), post_init_attrs=_FAST_SUM, **_TILES
        )
    else:
        swiglu_mod.gemm(rows.values, linear.weight, None, epi_args={"postact": out}, concat_layout=("B",), **_TILES)
