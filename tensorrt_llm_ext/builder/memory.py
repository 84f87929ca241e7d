"""How much memory an open engine takes, by a formula that the contract carries with it."""

from __future__ import annotations

from tensorrt_llm_ext.checkpoint.architecture import Architecture
from tensorrt_llm_ext.recipes import BuildSettings
from tensorrt_llm_ext.recipes.contract import MemoryEstimate

_VALUE_BYTES = 4  # ONNX Runtime computes float16 in float32 where it has no kernel of its own
_ALLOCATOR = 1.3  # what its allocator holds for each byte of tensors: measured on SmolLM2, from 64 x 32 to 1 x 2048 tokens
_SCORES = 2  # and of the scores, its largest tensors, which do not go where the layer before had its own: measured there too

FORMULA = (
    "weights in the type they are computed in"
    " + 1.3 x 4 x (max_num_tokens x (3 hidden + 3 intermediate) + max_padded_tokens x 2 (heads + 2 kv_heads) x head_dim)"
    " + 2 x 4 x max_padded_tokens x max_seq_len x heads"
)


def memory_estimate(architecture: Architecture, settings: BuildSettings, weight_bytes: int) -> MemoryEstimate:
    """Estimate the host memory of an ONNX Runtime engine at its limits: FORMULA.

    The last term is the attention scores of the longest sequences, which ONNX Runtime holds whole; a batch of short
    ones needs almost none of it.
    """
    a, limits = architecture, settings.limits
    rows = limits.max_num_tokens * (3 * a.hidden_size + 3 * a.intermediate_size)
    heads = limits.max_padded_tokens * 2 * (a.num_heads + 2 * a.num_kv_heads) * a.head_dim
    scores = limits.max_padded_tokens * limits.max_seq_len * a.num_heads
    host_bytes = weight_bytes + int(_VALUE_BYTES * (_ALLOCATOR * (rows + heads) + _SCORES * scores))
    return MemoryEstimate(device_bytes=0, host_bytes=host_bytes, formula=FORMULA)
