"""Sizes: in how many rows a batch is computed, and the memory of a torch engine. Free of torch, for the builder."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tensorrt_llm_ext.backends.torch.weight_index import WeightIndex
from tensorrt_llm_ext.checkpoint.architecture import Architecture
from tensorrt_llm_ext.checkpoint.layout import decoder_shapes, product_linears
from tensorrt_llm_ext.recipes.contract import Limits
from tensorrt_llm_ext.taps import Tap

TOKEN_STEP, SMALL_TOKENS, SMALL_STEP = 1024, 2048, 256
"""Rows of a product are a multiple of SMALL_STEP up to SMALL_TOKENS, then of TOKEN_STEP: few shapes, each run at warm-up."""

LAST_STEP = 64
"""The fewest sequences that attention is launched for, and rows of products of last rows alone."""

DETERMINISTIC_STEP = 1024
"""Rows of every product of an engine whose results may not depend on the batch by a bit, where a library chooses its kernel,
and with it the order of summation, by the number of rows: torch's, not ``cublaslt``. For last rows alone: LAST_STEP."""

_LAUNCH_BOUND = 5e11
"""Operations of a layer: what an H200 computes in four times the 0.2 ms that its host takes for a layer's launches."""

TILE = 128
"""Queries of a tile of attention."""

FORMULA = (
    "weights up to the highest tap, products of fp8 engines in 1 byte, all else in item = 2 (float32: 4) bytes"
    "; on a card vocab x (q + 2 kv) x item, the first layer's for every token"
    "; (max_num_tokens + max_batch_size to a power of two)"
    " x (item x (3 hidden + 2 q + intermediate + max(q + 2 kv, 2 intermediate, 2 hidden)) + 4)"
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


def grid_sequences(batch_size: int) -> int:
    """Round a batch's sequences up to those that attention's kernels are launched for, and products of last rows alone: powers of
    two, few of them."""
    return max(LAST_STEP, 1 << (batch_size - 1).bit_length())


def grids(max_batch_size: int) -> list[int]:
    """Every number that the sequences of batches of up to ``max_batch_size`` are rounded up to."""
    return [size for power in range(max_batch_size.bit_length()) if (size := LAST_STEP << power) <= grid_sequences(max_batch_size)]


def is_launch_bound(a: Architecture, num_rows: int) -> bool:
    """Say whether the host takes a good part of the time to launch a layer that the card takes to run it: then a graph pays."""
    q_size, kv_size = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    num_weights = a.hidden_size * (2 * q_size + 2 * kv_size + 3 * a.intermediate_size)
    return 2 * num_rows * num_weights < _LAUNCH_BOUND


def warm_up_batches(limits: Limits, is_deterministic: bool = False) -> list[tuple[int, int]]:
    """Batches of sequences of even length, tokens and sequences of each, that run whatever a batch within ``limits`` may need: every
    number of computed rows, every number of last rows, and the longest sequence."""
    fullest = min(limits.max_num_tokens, limits.max_batch_size * limits.max_seq_len)
    sizes = [min(size, fullest) for size in buckets(fullest, is_deterministic)]
    most = min(limits.max_batch_size, limits.max_num_tokens)
    found = [(size, -(-size // limits.max_seq_len)) for size in sizes]
    found += [(min(count, most), min(count, most)) for count in grids(most)]
    return [*found, (min(limits.max_seq_len, limits.max_num_tokens), 1)]


def launches(limits: Limits, is_deterministic: bool = False) -> list[tuple[int, int, int]]:
    """One batch for every set of launches that a batch within ``limits`` may need: tokens, sequences, tokens of the longest."""
    found, fewest = [], 1  # tokens of a batch that is computed in so many rows
    for num_rows in buckets(limits.max_num_tokens, is_deterministic):
        most = min(num_rows, limits.max_num_tokens)
        for count in grids(limits.max_batch_size):
            batch_size = min(count, limits.max_batch_size, most)
            for longest in sorted({min(TILE, limits.max_seq_len), limits.max_seq_len}):
                num_tokens = min(most, batch_size * longest)
                if num_tokens >= fewest and grid_sequences(batch_size) == count:
                    found.append((num_tokens, batch_size, longest))
        fewest = num_rows + 1
    return found


def num_tiles(num_rows: int, num_sequences: int) -> int:
    """Tiles of a batch at most, of sequences that are longer than one: each ends in one that may not be full."""
    return num_rows // TILE + min(num_sequences, num_rows // (TILE + 1))


def num_places(limits: Limits) -> int:
    """Values (int32) that hold the largest batch, laid out: see ``Layout``."""
    num_sequences, num_rows = grid_sequences(limits.max_batch_size), rounded(limits.max_num_tokens, TOKEN_STEP)
    return num_rows + 3 * num_sequences + 3 * num_tiles(num_rows, num_sequences)


def has_table(taps: Sequence[Tap]) -> bool:
    """Say whether an engine on a card looks up the first layer's queries, keys and values: where that layer is computed for every
    row, and not for last rows alone."""
    return any(tap.layer > 1 or tap.layer == 1 and tap.rows != "last" for tap in taps)


def engine_bytes(
    a: Architecture, limits: Limits, taps: Sequence[Tap], index: WeightIndex, *, item_bytes: int, is_fp8: bool, on_card: bool
) -> int:
    """Bytes that an engine takes on its device: weights, buffers, and on a card the first layer's table."""
    weights = _weight_bytes(a, index, max(tap.layer for tap in taps), item_bytes, is_fp8)
    table = item_bytes * a.vocab_size * _fused_size(a) if on_card and has_table(taps) else 0
    return weights + _workspace_bytes(a, limits, item_bytes, index.is_deterministic) + table


def _workspace_bytes(a: Architecture, limits: Limits, item_bytes: int, is_deterministic: bool) -> int:
    """See ``Workspace``."""
    wide = max(_fused_size(a), 2 * a.intermediate_size, 2 * a.hidden_size)
    row = item_bytes * (3 * a.hidden_size + 2 * a.num_heads * a.head_dim + a.intermediate_size + wide) + 4
    num_rows = bucket(limits.max_num_tokens, is_deterministic) + grid_sequences(limits.max_batch_size)
    return num_rows * row + 4 * num_places(limits)


def _weight_bytes(a: Architecture, index: WeightIndex, num_layers: int, item_bytes: int, is_fp8: bool) -> int:
    """Scales included."""
    kept = {f"{name}.weight" for product in index.kept for name in product_linears(product)}
    total = 0
    for name, shape in decoder_shapes(a).items():
        if is_needed(name, num_layers):
            in_fp8 = is_fp8 and ".layers." in name and len(shape) == 2 and name not in kept
            total += math.prod(shape) * (1 if in_fp8 else item_bytes) + (4 * shape[0] if in_fp8 else 0)
    return total


def _fused_size(a: Architecture) -> int:
    return (a.num_heads + 2 * a.num_kv_heads) * a.head_dim


def is_needed(name: str, num_layers: int) -> bool:
    """Say whether the first ``num_layers`` layers, the embedding or the final norm need this weight."""
    return not name.startswith("model.layers.") or int(name.split(".")[2]) < num_layers
