"""Sizes: in how many rows a batch is computed, and the memory of a torch engine. Free of torch, for the builder."""

from __future__ import annotations

import math

from tensorrt_llm_ext.backends.torch.weight_index import WeightIndex
from tensorrt_llm_ext.checkpoint.architecture import Architecture
from tensorrt_llm_ext.checkpoint.layout import decoder_shapes, product_linears
from tensorrt_llm_ext.recipes.contract import Limits

TOKEN_STEP, SMALL_TOKENS, SMALL_STEP = 1024, 2048, 256
"""Rows of a product are a multiple of SMALL_STEP up to SMALL_TOKENS, then of TOKEN_STEP: few shapes, each run at warm-up."""

LAST_STEP = 64
"""The same for products of last rows alone."""

DETERMINISTIC_STEP = 1024
"""Rows of every product of an engine whose results may not depend on the batch by a bit: the library chooses its kernel,
and with it the order of summation, by the number of rows. For last rows alone: LAST_STEP."""

TILE = 16  # tokens of the smallest tile of any kernel: what the list of tiles has room for

FORMULA = (
    "weights up to the highest tap, products of fp8 engines in 1 byte, all else in item = 2 (float32: 4) bytes"
    " + (max_num_tokens + max_batch_size) x (item x (3 hidden + 2 q + intermediate + max(q + 2 kv, 2 intermediate, 2 hidden)) + 4)"
)


def rounded(count: int, step: int) -> int:
    """Round up to a multiple of ``step``."""
    return -(-count // step) * step


def bucket(num_tokens: int, is_deterministic: bool = False) -> int:
    """Round a batch's tokens up to the rows that are computed."""
    is_small = num_tokens <= SMALL_TOKENS and not is_deterministic
    return rounded(num_tokens, SMALL_STEP if is_small else TOKEN_STEP)


def buckets(max_num_tokens: int, is_deterministic: bool = False) -> list[int]:
    """Every number of rows that batches of up to ``max_num_tokens`` are computed in."""
    largest = bucket(max_num_tokens, is_deterministic)
    return sorted({bucket(size, is_deterministic) for size in range(SMALL_STEP, largest + 1, SMALL_STEP)})


def num_places(limits: Limits) -> int:
    """Values (int32) that hold where the sequences of the largest batch begin, and their tiles."""
    return 4 * limits.max_batch_size + 3 * (limits.max_num_tokens // TILE)


def workspace_bytes(a: Architecture, limits: Limits, item_bytes: int, is_deterministic: bool = False) -> int:
    """Bytes of the buffers of the largest batch: see ``Workspace``."""
    q_size, fused_size = a.num_heads * a.head_dim, (a.num_heads + 2 * a.num_kv_heads) * a.head_dim
    wide = max(fused_size, 2 * a.intermediate_size, 2 * a.hidden_size)
    row = item_bytes * (3 * a.hidden_size + 2 * q_size + a.intermediate_size + wide) + 4
    num_rows = bucket(limits.max_num_tokens, is_deterministic) + rounded(limits.max_batch_size, LAST_STEP)
    return num_rows * row + 4 * num_places(limits)


def weight_bytes(a: Architecture, index: WeightIndex, *, num_layers: int, item_bytes: int, is_fp8: bool) -> int:
    """Bytes that the decoder's weights take on their device, scales included."""
    kept = {f"{name}.weight" for product in index.kept for name in product_linears(product)}
    total = 0
    for name, shape in decoder_shapes(a).items():
        if is_needed(name, num_layers):
            in_fp8 = is_fp8 and ".layers." in name and len(shape) == 2 and name not in kept
            total += math.prod(shape) * (1 if in_fp8 else item_bytes) + (4 * shape[0] if in_fp8 else 0)
    return total


def is_needed(name: str, num_layers: int) -> bool:
    """Say whether the first ``num_layers`` layers, the embedding or the final norm need this weight."""
    return not name.startswith("model.layers.") or int(name.split(".")[2]) < num_layers
