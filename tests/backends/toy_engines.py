"""Toy engines: small ONNX decoders with a contract, right ones and, above all, wrong ones.

A toy model is an embedding, a causal sum over the sequence (in the padded view, as attention has it) and a tanh: a
row depends on its own sequence's tokens up to its own, and on every one of them. ``reference`` says the right rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from tensorrt_llm_ext.checkpoint.architecture import Architecture, Rope
from tensorrt_llm_ext.fingerprint import file_fingerprint, token_hash
from tensorrt_llm_ext.recipes import write_contract
from tensorrt_llm_ext.recipes.contract import (
    Canary,
    CanaryState,
    Contract,
    EngineFile,
    Fingerprints,
    Limits,
    MemoryEstimate,
    TensorSpec,
)
from tensorrt_llm_ext.results import Failure, Record, WorkItem
from tensorrt_llm_ext.taps import Tap

VOCAB_SIZE, HIDDEN_SIZE, NUM_LAYERS = 97, 24, 3
NAN_TOKEN = 96  # its embedding is NaN
TOLERANCE = 1e-5  # rows are tanh values; float32 sums of up to 40 terms

LAST, MEAN, ALL = (Tap(NUM_LAYERS, "post", rows) for rows in ("last", "mean", "all"))
LIMITS = Limits(max_num_tokens=256, max_batch_size=32, max_seq_len=40, max_padded_tokens=400)


@dataclass
class Toy:
    """What to build, and in which way it is wrong. ``last`` maps the graph's names to the rows that are gathered."""

    taps: tuple[Tap, ...] = (LAST,)
    last: Callable[[Graph], str] = lambda graph: graph.minus_one("last_token_ids")
    later_share: float = 0.0  # of the whole sequence's sum in every row: above 0 it is not causal
    change_rows: Callable[[Graph, str], str] = lambda graph, rows: rows  # applied to every row before the taps
    change_output: Callable[[Graph, str], str] = lambda graph, rows: rows  # applied to every output
    limits: Limits = LIMITS


@dataclass
class Graph:
    """An ONNX graph in the making: names in, names out."""

    nodes: list = field(default_factory=list)
    initializers: dict[str, np.ndarray] = field(default_factory=dict)

    def op(self, kind: str, *inputs: str, **attributes) -> str:
        name = f"{kind.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    def constant(self, value) -> str:
        name = f"constant_{len(self.initializers)}"
        self.initializers[name] = np.asarray(value)
        return name

    def minus_one(self, name: str) -> str:
        return self.op("Sub", name, self.constant(np.int32(1)))


def embedding() -> np.ndarray:
    table = np.random.default_rng(5).normal(size=(VOCAB_SIZE, HIDDEN_SIZE)).astype(np.float32)
    table[NAN_TOKEN] = np.nan
    return table


def reference(token_ids: Sequence[int], tap: Tap) -> np.ndarray:
    """The right rows of one sequence, float32: [1, hidden], or [tokens, hidden] for rows ``all``."""
    rows = np.tanh(np.cumsum(embedding()[np.asarray(token_ids)] * np.float32(0.3), axis=0))
    return {"last": rows[-1:], "mean": rows.mean(axis=0, keepdims=True), "all": rows}[tap.rows]


def assert_right(record: Record | Failure, item: WorkItem) -> None:
    assert isinstance(record, Record) and record.request_id == item.request_id
    assert record.states
    for state in record.states:
        np.testing.assert_allclose(state.rows, reference(item.token_ids, state.tap), atol=TOLERANCE)


def toy_model(toy: Toy) -> onnx.ModelProto:
    graph = Graph()
    table = graph.constant(embedding() * np.float32(0.3))
    embedded = graph.op("Gather", table, "input_ids", axis=0)  # [T, hidden]
    padded = graph.op("Gather", embedded, "attention_rows", axis=0)  # [B, S, hidden]
    mixed = graph.op("CumSum", padded, graph.constant(np.int32(1)))
    if toy.later_share:
        total = graph.op("ReduceSum", padded, graph.constant(np.array([1])), keepdims=1)
        mixed = graph.op("Add", mixed, graph.op("Mul", total, graph.constant(np.float32(toy.later_share))))
    flat = graph.op("Reshape", mixed, graph.constant(np.array([-1, HIDDEN_SIZE])))
    rows = toy.change_rows(graph, graph.op("Tanh", graph.op("Gather", flat, "packed_slots", axis=0)))
    outputs = []
    for tap in toy.taps:
        tapped = {"last": _last, "mean": _mean, "all": lambda graph, rows, toy: rows}[tap.rows](graph, rows, toy)
        name = tap.column(NUM_LAYERS)
        graph.nodes.append(helper.make_node("Identity", [toy.change_output(graph, tapped)], [name]))
        outputs.append(name)
    return _model(graph, toy)


def _last(graph: Graph, rows: str, toy: Toy) -> str:
    return graph.op("Gather", rows, toy.last(graph), axis=0)


def _mean(graph: Graph, rows: str, toy: Toy) -> str:
    padded = graph.op("Gather", rows, "attention_rows", axis=0)
    longest = graph.op("Gather", graph.op("Shape", "attention_rows"), graph.constant(np.int64(1)))
    within = graph.op("Range", graph.constant(np.int64(0)), longest, graph.constant(np.int64(1)))
    lengths = graph.op("Unsqueeze", "sequence_lengths", graph.constant(np.array([1])))
    is_real = graph.op("Less", graph.op("Cast", within, to=TensorProto.INT32), lengths)
    is_real = graph.op("Unsqueeze", is_real, graph.constant(np.array([2])))
    zeroed = graph.op("Where", is_real, padded, graph.constant(np.float32(0)))
    total = graph.op("ReduceSum", zeroed, graph.constant(np.array([1])), keepdims=0)
    return graph.op("Div", total, graph.op("Cast", lengths, to=TensorProto.FLOAT))


def tensors(toy: Toy) -> tuple[TensorSpec, ...]:
    inputs = {"input_ids": ("T",), "position_ids": ("T",), "attention_rows": ("B", "S"), "packed_slots": ("T",)}
    if any(tap.rows == "last" for tap in toy.taps):
        inputs["last_token_ids"] = ("B",)
    if any(tap.rows == "mean" for tap in toy.taps):
        inputs["sequence_lengths"] = ("B",)
    return (
        *(TensorSpec(name, "input", "int32", shape) for name, shape in inputs.items()),
        *(
            TensorSpec(
                tap.column(NUM_LAYERS), "output", "float32", ("T" if tap.rows == "all" else "B", HIDDEN_SIZE), tap=tap
            )
            for tap in toy.taps
        ),
    )


def _model(graph: Graph, toy: Toy) -> onnx.ModelProto:
    kinds = {"int32": TensorProto.INT32, "float32": TensorProto.FLOAT}
    values = {"input": [], "output": []}
    for tensor in tensors(toy):
        values[tensor.role].append(helper.make_tensor_value_info(tensor.name, kinds[tensor.dtype], tensor.shape))
    initializers = [numpy_helper.from_array(value, name) for name, value in graph.initializers.items()]
    built = helper.make_graph(graph.nodes, "toy", values["input"], values["output"], initializers)
    return helper.make_model(built, opset_imports=[helper.make_opsetid("", 21)], ir_version=11)


def toy_contract(toy: Toy, files: tuple[EngineFile, ...] = ()) -> Contract:
    return Contract(
        model_name="toy",
        architecture=Architecture(
            family="llama",
            num_layers=NUM_LAYERS,
            hidden_size=HIDDEN_SIZE,
            intermediate_size=32,
            num_heads=2,
            num_kv_heads=2,
            head_dim=12,
            vocab_size=VOCAB_SIZE,
            max_positions=64,
            norm_eps=1e-5,
            rope=Rope("default", 10000.0, 64),
            has_qkv_bias=False,
            has_o_bias=False,
            has_mlp_bias=False,
            has_qk_norm=False,
            is_tied=True,
            sliding_window=None,
        ),
        fingerprints=Fingerprints("sha256:c", "sha256:t", "sha256:r", "sha256:p"),
        backend="ort",
        builder="toy",
        builder_version="1",
        accepted_runtime=f"onnxruntime>=1.23,<={onnxruntime.__version__}",
        platform="any",
        compute_capabilities=(),
        weight_dtype="float32",
        activation_dtype="float32",
        taps=toy.taps,
        tensors=tensors(toy),
        limits=toy.limits,
        memory=MemoryEstimate(0, 0, "toy"),
        files=files,
        canaries=tuple(toy_canary(token_ids, toy.taps) for token_ids in ((7, 8, 9, 10), (3,), (40, 30, 20))),
        build={},
    )


def toy_canary(token_ids: tuple[int, ...], taps: tuple[Tap, ...]) -> Canary:
    states = tuple(CanaryState(tap, reference(token_ids, tap), 1e-4, 0.1, "previous row") for tap in taps)
    return Canary(token_ids, "toy reference", states)


def write_engine(folder: Path, toy: Toy, **changed) -> Path:
    """Write an engine directory; ``changed`` replaces fields of its contract."""
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(toy_model(toy), folder / "model.onnx")
    model = folder / "model.onnx"
    files = (EngineFile("model.onnx", model.stat().st_size, file_fingerprint(model)),)
    contract = replace(toy_contract(toy, files), **changed)
    write_contract(folder, contract)
    return folder


def work_item(request_id: str, token_ids: Sequence[int]) -> WorkItem:
    token_ids = np.asarray(token_ids, dtype=np.int32)
    return WorkItem(request_id, f"row {request_id}", token_ids, token_hash(token_ids))


def random_items(num_items: int, seed: int = 0, max_length: int = 20) -> list[WorkItem]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, max_length + 1, size=num_items)
    return [work_item(str(i), rng.integers(0, NAN_TOKEN, size=length)) for i, length in enumerate(lengths)]
