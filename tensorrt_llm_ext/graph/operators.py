"""A graph under construction, written as arithmetic: every method adds one operator and returns its result's name.

Opset 23 and IR version 11 are what both ONNX Runtime and the TensorRT-RTX parser accept for RMSNormalization,
RotaryEmbedding and Attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper

OPSET = 23
IR_VERSION = 11

ONNX_TYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "int32": TensorProto.INT32,
    "int64": TensorProto.INT64,
    "float8_e4m3fn": TensorProto.FLOAT8E4M3FN,
}
NUMPY_TYPES = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
}

Dims = tuple[int | str, ...]


@dataclass(frozen=True)
class GraphTensor:
    """An input or output of a graph. ``shape`` holds sizes and the symbols T (tokens), B (sequences), S (longest)."""

    name: str
    dtype: str
    shape: Dims


class Graph:
    """Nodes, inputs, outputs and initializers in the order they were asked for. Values are known by name.

    ``weight`` says where weights come from: it is called once per weight with the graph and the checkpoint's name,
    and returns the name of the value that holds it in ``dtype``. ``operands`` is called once per linear with the graph,
    its input and its name, and returns the two values to multiply; by default the input and the weight as they are.
    ``together`` is called once per group of linears that share an input, and returns the two values that give all their
    outputs side by side, or None where they are to be multiplied one by one, which is the default.
    """

    def __init__(
        self,
        dtype: str,
        weight: Callable[[Graph, str], str],
        operands: Callable[[Graph, str, str], tuple[str, str]] | None = None,
        together: Callable[[Graph, str, Sequence[str]], tuple[str, str] | None] | None = None,
    ) -> None:
        self.dtype = dtype
        self._together = together or (lambda g, x, names: None)
        self._operands = operands or (lambda g, x, name: (x, g.weight(f"{name}.weight")))
        self.inputs: list[GraphTensor] = []
        self.outputs: list[GraphTensor] = []
        self.initializers: list[TensorProto] = []
        self._weight = weight
        self._weights: dict[str, str] = {}
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[tuple, str] = {}

    # -- the border -------------------------------------------------------------------------------------------------

    def input(self, name: str, dtype: str, shape: Dims) -> str:
        self.inputs.append(GraphTensor(name, dtype, shape))
        return name

    def output(self, value: str, name: str, dtype: str, shape: Dims) -> None:
        """Give ``value`` out under ``name`` and ``dtype``."""
        self._nodes.append(helper.make_node("Cast", [value], [name], name=name, to=ONNX_TYPES[dtype]))
        self.outputs.append(GraphTensor(name, dtype, shape))

    def weight(self, name: str) -> str:
        if name not in self._weights:
            self._weights[name] = self._weight(self, name)
        return self._weights[name]

    def constant(self, value: object, dtype: str) -> str:
        """A small value kept in the model file; the same value is kept once."""
        array = np.asarray(value, dtype=NUMPY_TYPES.get(dtype, dtype))
        key = (dtype, array.shape, array.tobytes())
        if key not in self._constants:
            name = f"constant_{len(self._constants)}"
            self._constants[key] = name
            self.initializers.append(helper.make_tensor(name, ONNX_TYPES[dtype], array.shape, array.tobytes(), raw=True))
        return self._constants[key]

    def model(self, name: str) -> onnx.ModelProto:
        inputs, outputs = ([_value_info(tensor) for tensor in side] for side in (self.inputs, self.outputs))
        graph = helper.make_graph(self._nodes, name, inputs, outputs, self.initializers)
        return helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION, producer_name="tensorrt_llm_ext"
        )

    def node(self, operator: str, *inputs: str, **attributes: object) -> str:
        name = f"{operator}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(operator, inputs, [name], name=name, **attributes))
        return name

    # -- arithmetic -------------------------------------------------------------------------------------------------

    def add(self, a: str, b: str) -> str:
        return self.node("Add", a, b)

    def subtract(self, a: str, b: str) -> str:
        return self.node("Sub", a, b)

    def multiply(self, a: str, b: str) -> str:
        return self.node("Mul", a, b)

    def divide(self, a: str, b: str) -> str:
        return self.node("Div", a, b)

    def less(self, a: str, b: str) -> str:
        return self.node("Less", a, b)

    def where(self, condition: str, a: str, b: str) -> str:
        return self.node("Where", condition, a, b)

    def sum(self, x: str, axis: int) -> str:
        return self.node("ReduceSum", x, self.constant([axis], "int64"), keepdims=0)

    def largest(self, x: str) -> str:
        """The largest absolute value, a scalar."""
        return self.node("ReduceMax", self.node("Abs", x), keepdims=0)

    def silu(self, x: str) -> str:
        """x * sigmoid(x)"""
        return self.multiply(x, self.node("Sigmoid", x))

    def linear(self, x: str, name: str, has_bias: bool) -> str:
        """x W^T + b, with W [out, in] as it lies in the checkpoint."""
        x, weight = self._operands(self, x, name)
        bias = [self.weight(f"{name}.bias")] if has_bias else []
        return self.node("Gemm", x, weight, *bias, transB=1)

    def linears(self, x: str, sizes: dict[str, int], has_bias: bool) -> list[str]:
        """Several linears of one input, by name with their widths: one product where ``together`` gives its operands."""
        operands = None if has_bias else self._together(self, x, list(sizes))
        if operands is None:
            return [self.linear(x, name, has_bias) for name in sizes]
        return self.split(self.node("Gemm", *operands, transB=1), list(sizes.values()))

    def rms_norm(self, x: str, name: str, epsilon: float) -> str:
        """x / sqrt(mean(x^2) + epsilon) * w over the last axis; the statistics are float32 in every build."""
        return self.node("RMSNormalization", x, self.weight(f"{name}.weight"), axis=-1, epsilon=epsilon, stash_type=1)

    def rotate(self, x: str, cos: str, sin: str, num_heads: int) -> str:
        """Rotary embedding of [1, T, num_heads * head_dim]; each head's halves are the pairs."""
        return self.node("RotaryEmbedding", x, cos, sin, num_heads=num_heads, interleaved=0)

    def causal_attention(self, q: str, k: str, v: str, *, num_heads: int, num_kv_heads: int, scale: float) -> str:
        """softmax(scale q k^T, causal) v over [B, S, heads * head_dim]."""
        heads = {"q_num_heads": num_heads, "kv_num_heads": num_kv_heads}
        return self.node("Attention", q, k, v, is_causal=1, scale=scale, **heads)

    # -- shapes and types -------------------------------------------------------------------------------------------

    def gather(self, x: str, rows: str) -> str:
        return self.node("Gather", x, rows, axis=0)

    def reshape(self, x: str, *shape: int) -> str:
        """Numpy's reshape; 0 keeps a dimension, -1 takes the rest."""
        return self.node("Reshape", x, self.constant(shape, "int64"))

    def unsqueeze(self, x: str, axis: int) -> str:
        return self.node("Unsqueeze", x, self.constant([axis], "int64"))

    def squeeze(self, x: str, axis: int) -> str:
        return self.node("Squeeze", x, self.constant([axis], "int64"))

    def split(self, x: str, widths: Sequence[int]) -> list[str]:
        """The parts of [T, sum of widths], side by side."""
        name = f"Split_{len(self._nodes)}"
        parts = [f"{name}_{number}" for number in range(len(widths))]
        self._nodes.append(helper.make_node("Split", [x, self.constant(widths, "int64")], parts, name=name, axis=1))
        return parts

    def cast(self, x: str, dtype: str) -> str:
        return self.node("Cast", x, to=ONNX_TYPES[dtype])

    def size(self, x: str, axis: int) -> str:
        """The length of one axis, an int64 scalar."""
        return self.squeeze(self.node("Shape", x, start=axis, end=axis + 1), 0)

    def count(self, length: str) -> str:
        """0, 1 … length - 1, int64."""
        return self.node("Range", self.constant(0, "int64"), length, self.constant(1, "int64"))


def _value_info(tensor: GraphTensor) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(tensor.name, ONNX_TYPES[tensor.dtype], tensor.shape)
