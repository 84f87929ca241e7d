"""One decoder layer as a small float32 model of its own, for runs that hold one layer in memory at a time.

The layer's weights are inputs, so one session serves every layer, no copy of a weight is made, and the model file has
no size limit to meet. The code of the layer is that of the whole decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING

import onnx

from tensorrt_llm_ext.checkpoint.rope import rope_tables
from tensorrt_llm_ext.graph.layers import decoder_layer, final_norm, layer_prefix, layout_inputs, rope_rows
from tensorrt_llm_ext.graph.operators import Graph
from tensorrt_llm_ext.graph.quantisation import rounded_rows, rounded_value

if TYPE_CHECKING:
    from tensorrt_llm_ext.checkpoint.protocol import Checkpoint

STATES = "states"  # float32 [T, hidden]
NEXT_STATES = "next_states"  # float32 [T, hidden]


def input_scale(linear: str) -> str:
    """The input, float32 [], by which a layer rounds the input of its ``linear``."""
    return f"{linear}.input_scale"


Operands = Callable[[Graph, str, str], tuple[str, str]]


def layer_model(
    checkpoint: Checkpoint,
    max_seq_len: int,
    *,
    with_input_sizes: bool = False,
    rounded: Collection[str] = (),
    by_row: Collection[str] = (),
) -> onnx.ModelProto:
    """Write the layer that takes STATES, the layout's indices and a layer's weights, and gives NEXT_STATES.

    Weights go by their names in the checkpoint without ``layer_prefix``; every layer of a decoder has the same. With
    ``with_input_sizes`` there is an output for each linear, named by it: a scalar, the largest absolute value of its
    input. The inputs of the linears ``rounded`` are rounded to FP8, each by one more input, its ``input_scale``;
    those of ``by_row`` each row by its own size.
    """
    a = checkpoint.architecture
    operands = _measured if with_input_sizes else partial(_rounded, rounded, by_row) if rounded or by_row else None
    g = _graph(checkpoint, layer_prefix(0), operands)
    x = g.input(STATES, "float32", ("T", a.hidden_size))
    layout = layout_inputs(g)
    cos, sin = (g.constant(table, "float32") for table in rope_tables(a, max_seq_len))
    rope = rope_rows(g, cos, sin, layout.position_ids)
    g.output(decoder_layer(g, x, "", layout, rope, a), NEXT_STATES, "float32", ("T", a.hidden_size))
    return g.model("layer")


def norm_model(checkpoint: Checkpoint) -> onnx.ModelProto:
    """Write the final norm: STATES and the weight ``model.norm.weight`` give NEXT_STATES."""
    a = checkpoint.architecture
    g = _graph(checkpoint, "")
    x = g.input(STATES, "float32", ("T", a.hidden_size))
    g.output(final_norm(g, x, a), NEXT_STATES, "float32", ("T", a.hidden_size))
    return g.model("norm")


def _graph(checkpoint: Checkpoint, prefix: str, operands: Operands | None = None) -> Graph:
    """A float32 graph whose weights are inputs, shaped as the checkpoint's ``prefix + name``."""
    return Graph("float32", lambda g, name: g.input(name, "float32", checkpoint.info(prefix + name).shape), operands)


def _measured(g: Graph, x: str, name: str) -> tuple[str, str]:
    """Operands as they are, and the size of the input as an output of the graph."""
    g.output(g.largest(x), name, "float32", ())
    return x, g.weight(f"{name}.weight")


def _rounded(linears: Collection[str], by_row: Collection[str], g: Graph, x: str, name: str) -> tuple[str, str]:
    """Operands whose input is rounded, where the linear is one of ``linears`` or of ``by_row``."""
    if name in by_row:
        x = rounded_rows(g, x)
    elif name in linears:
        x = rounded_value(g, x, g.input(input_scale(name), "float32", ()))
    return x, g.weight(f"{name}.weight")
