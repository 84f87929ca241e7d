"""One ONNX decoder from a checkpoint: packed tokens in, the taps' hidden states out, no key-value cache.

::

    x = embedding[input_ids]                                   # [T, hidden]
    for layer in layers up to the highest tap:
        x = x + attention(norm(x));  x = x + mlp(norm(x))      # layers.py
        give out the taps of this layer                        # rows.py

The output head is never written, nor a layer above the highest tap, nor the final norm unless a tap asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tensorrt_llm_ext.checkpoint.rope import rope_tables
from tensorrt_llm_ext.checkpoint.architecture import Architecture
from tensorrt_llm_ext.graph import names
from tensorrt_llm_ext.graph.fp8 import FP8
from tensorrt_llm_ext.graph.layers import EMBEDDING, decoder_layer, final_norm, layer_prefix, layout_inputs, rope_rows
from tensorrt_llm_ext.graph.operators import NUMPY_TYPES, Graph, GraphTensor
from tensorrt_llm_ext.graph.quantisation import Fp8Linears, Fp8Operands
from tensorrt_llm_ext.graph.rows import RowGather
from tensorrt_llm_ext.graph.weights import ExternalWeights
from tensorrt_llm_ext.taps import Tap

if TYPE_CHECKING:
    from tensorrt_llm_ext.checkpoint.protocol import Checkpoint


@dataclass(frozen=True)
class DecoderFiles:
    """What was written: file names within the folder, and the graph's inputs and outputs (one output a tap, in order)."""

    folder: Path
    files: tuple[str, ...]  # model.onnx first
    inputs: tuple[GraphTensor, ...]
    outputs: tuple[GraphTensor, ...]
    weight_dtype: str
    """The type that most bytes of the weights are stored in."""
    weight_bytes: int
    """Of the weights in the type they are computed in."""


def write_decoder(
    checkpoint: Checkpoint,
    folder: Path,
    *,
    taps: tuple[Tap, ...],
    dtype: str,
    max_seq_len: int,
    fp8: Fp8Linears | None = None,
    is_compiled: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> DecoderFiles:
    """Write model.onnx and its weights into the existing, empty ``folder``, one tensor in memory at a time.

    ``dtype`` is the compute type: float32 or float16 for ONNX Runtime, bfloat16 or float16 for TensorRT. ``mean``
    outputs are float32, and so is every output of a bfloat16 build (NumPy has no bfloat16). With ``fp8`` the linears
    round their operands to FP8 by its scales. For a compiler (``is_compiled``) FP8 linears of one input are one product
    where no weight must be copied for it: it would make them one itself, with copies in memory. ``progress`` hears of
    bytes of weights done and in all. Raises DiskFull, BuildError, and OSError for what else a disk refuses.
    """
    weights = ExternalWeights(checkpoint, dtype)
    operands = fp8 and Fp8Operands(fp8, weights)
    g = Graph(dtype, weights.initializer, operands, operands.together if operands and is_compiled else None)
    _write_nodes(g, checkpoint.architecture, weights, taps, max_seq_len)
    files = weights.write(folder, progress)
    (folder / names.MODEL_FILE).write_bytes(g.model(checkpoint.name).SerializeToString(deterministic=True))
    num_bytes = weights.num_bytes()
    return DecoderFiles(
        folder=folder,
        files=(names.MODEL_FILE, *files),
        inputs=tuple(g.inputs),
        outputs=tuple(g.outputs),
        weight_dtype=num_bytes.most_common(1)[0][0],
        weight_bytes=sum(
            count if stored == FP8 else count // NUMPY_TYPES[stored].itemsize * NUMPY_TYPES[dtype].itemsize
            for stored, count in num_bytes.items()
        ),
    )


def _write_nodes(
    g: Graph, a: Architecture, weights: ExternalWeights, taps: tuple[Tap, ...], max_seq_len: int
) -> None:
    input_ids = g.input(names.INPUT_IDS, "int32", ("T",))
    layout = layout_inputs(g)
    gather = RowGather(g, layout.attention_rows, {tap.rows for tap in taps})
    x = g.cast(g.gather(weights.stored(g, EMBEDDING), input_ids), g.dtype)  # [T, hidden]
    taken = _take(g, a, gather, x, 0, taps)
    num_layers = max(tap.layer for tap in taps)
    top_rows = {tap.rows for tap in taps if tap.layer == num_layers}
    if num_layers:
        tables = zip((names.ROPE_COS, names.ROPE_SIN), rope_tables(a, max_seq_len), strict=True)
        rope = rope_rows(g, *(weights.table(g, name, table) for name, table in tables), layout.position_ids)
    for layer in range(1, num_layers + 1):
        if layer == num_layers and top_rows == {"last"}:
            gather.keep_last()  # nothing reads the other rows of the highest layer
        x = decoder_layer(g, x, layer_prefix(layer - 1), layout, rope, a, gather.kept_rows)
        taken |= _take(g, a, gather, x, layer, taps)
    for tap in taps:
        is_float32 = tap.rows == "mean" or g.dtype == "bfloat16"
        rows = "T" if tap.rows == "all" else "B"
        g.output(taken[tap], tap.column(a.num_layers), "float32" if is_float32 else g.dtype, (rows, a.hidden_size))


def _take(g: Graph, a: Architecture, gather: RowGather, x: str, layer: int, taps: tuple[Tap, ...]) -> dict[Tap, str]:
    """The rows of every tap at this layer."""
    norms = {"pre": lambda rows: rows, "post": lambda rows: final_norm(g, rows, a)}
    return {tap: gather.take(x, tap.rows, norms[tap.norm]) for tap in taps if tap.layer == layer}
