"""The tensors of a torch engine: what it wants, and what it gives out for every tap. Free of torch, for the builder."""

from __future__ import annotations

from tensorrt_llm_ext.checkpoint.architecture import Architecture
from tensorrt_llm_ext.graph import names
from tensorrt_llm_ext.recipes.contract import TensorSpec
from tensorrt_llm_ext.taps import Tap

STREAM_DTYPES = {"float32": "float32", "float16": "float16", "bfloat16": "bfloat16", "fp8": "bfloat16"}
"""The type of the residual stream by the precision of an engine."""


def engine_tensors(architecture: Architecture, taps: tuple[Tap, ...], precision: str) -> tuple[TensorSpec, ...]:
    """List inputs and outputs. Attention reads packed rows, so no input describes padding; which of its kernels are needed
    is decided by lengths that the host reads.

    Rows ``all`` come in the type of the residual stream, which loses nothing before the final norm; ``last`` and ``mean``,
    few and computed in float32, in float32.
    """
    inputs = {names.INPUT_IDS: "T", names.SEQUENCE_LENGTHS: "B"}
    if any(tap.rows == "last" for tap in taps):
        inputs[names.LAST_TOKEN_IDS] = "B"
    return (
        *(TensorSpec(name, "input", "int32", (size,)) for name, size in inputs.items()),
        TensorSpec(names.HOST_LENGTHS, "input", "int32", ("B",), location="host"),
        *(_output(architecture, tap, precision) for tap in taps),
    )


def _output(architecture: Architecture, tap: Tap, precision: str) -> TensorSpec:
    rows, dtype = ("T", STREAM_DTYPES[precision]) if tap.rows == "all" else ("B", "float32")
    name = tap.column(architecture.num_layers)
    return TensorSpec(name, "output", dtype, (rows, architecture.hidden_size), tap=tap)
