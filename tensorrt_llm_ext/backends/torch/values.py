"""The values that the decoder's operations take and give: packed rows, linear layers, and where sequences lie.

M rows are computed of which the first T hold tokens: M is T rounded up to a bucket, so that few shapes exist. What the
rows past T hold never reaches another row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tensorrt_llm_ext.taps import Tap

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""The largest e4m3 value. A row's scale is its largest magnitude over this, so that nothing saturates."""

COUNTER_BYTES = 256
"""Memory in which a product may count the tiles that it hands out."""


@dataclass(frozen=True)
class Rows:
    """The input of a linear layer, ``[M, width]``: as it is, or e4m3 with one float32 scale a row ``[M, 1]``.

    A row's scale is found when it is written, or is ``input_scale`` for every row: then what lies beyond e4m3's largest value
    saturates, and a row that is not finite gets the scale NaN, or it would come out finite. ``step`` is how many rows one
    product takes, where that must be the same in every batch; None: all at once. ``counter``: COUNTER_BYTES for the product's own
    use.
    """

    values: torch.Tensor
    scales: torch.Tensor | None = None
    step: int | None = None
    input_scale: float | None = None
    counter: torch.Tensor | None = None

    def steps(self) -> list[slice]:
        """The rows of each product."""
        size = self.step or max(len(self.values), 1)
        return [slice(start, start + size) for start in range(0, len(self.values), size)]


@dataclass(frozen=True)
class Linear:
    """A linear layer: weight ``[out, in]``, as it is or e4m3 with one float32 scale an output ``[1, out]``.

    ``input_scale`` is the fixed scale of its input, where the checkpoint brings one; None: each row gets its own.
    """

    weight: torch.Tensor
    scales: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    input_scale: float | None = None

    @property
    def is_fp8(self) -> bool:
        return self.scales is not None

    def part(self, start: int, end: int) -> Linear:
        """The layer of these outputs alone."""
        scales = None if self.scales is None else self.scales[:, start:end]
        bias = None if self.bias is None else self.bias[start:end]
        return Linear(self.weight[start:end], scales, bias, self.input_scale)


@dataclass(frozen=True)
class Heads:
    """The attention heads of a layer, in the order of its fused rows: all queries, all keys, all values."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def fused_size(self) -> int:
        return self.q_size + 2 * self.kv_size


@dataclass(frozen=True)
class Rope:
    """Cosines and sines of every position, ``[max_seq_len, head_dim // 2]``: float32, or float16 for 16-bit rows.

    float16's 11 bits are an eighth of bfloat16's rounding, and half of what a program has to read.
    """

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True)
class HeadNorms:
    """QK-norm (Qwen3): a weight ``[head_dim]`` for queries and one for keys, and the epsilon."""

    q: torch.Tensor
    k: torch.Tensor
    eps: float


@dataclass(frozen=True)
class Norm:
    """A root-mean-square norm: its weight ``[hidden]`` and epsilon."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True)
class Batch:
    """A batch as the engine's tensors give it: int32 inputs, and an output for every tap."""

    input_ids: torch.Tensor  # [T]
    sequence_lengths: torch.Tensor  # [B]
    last_token_ids: torch.Tensor | None  # [B], 1-based; only with a `last` tap
    longest: int  # tokens of the longest sequence
    outputs: dict[Tap, torch.Tensor]


@dataclass(frozen=True)
class Layout:
    """A batch's inputs as the operations read them; the kernels' lie in memory that does not move.

    ``tiles`` (first row of the sequence, position of the tile's first query, length of the sequence; length 0: no tile) divides
    the queries of all sequences among a kernel's programs. The plain operations need none.
    """

    token_ids: torch.Tensor  # int32 [M]; -1 past the last token
    lengths: torch.Tensor  # int32 [B], or longer, and the rest sequences of length 0
    starts: torch.Tensor  # int32, as long
    last: torch.Tensor | None  # int32, as long, 1-based; past the last sequence 1, a row of every batch. None: no `last` tap
    num_tokens: int
    tiles: torch.Tensor | None = None  # int32 [num_tiles, 3]
