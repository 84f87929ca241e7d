"""A checkpoint run layer by layer in float32: one layer and its activations in memory, for a model of any size.

Canaries, calibration and ``verify`` take their numbers from here. The layers are the graph's own (``layer_model``), so
this is the float32 oracle of every engine built from that graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnxruntime

from tensorrt_llm_ext.checkpoint.protocol import Checkpoint
from tensorrt_llm_ext.errors import BackendError
from tensorrt_llm_ext.graph import names
from tensorrt_llm_ext.graph.layer_model import NEXT_STATES, STATES, layer_model, norm_model
from tensorrt_llm_ext.graph.layers import EMBEDDING, layer_prefix
from tensorrt_llm_ext.recipes.contract import TensorSpec
from tensorrt_llm_ext.runtime.packing import index_arrays
from tensorrt_llm_ext.taps import Norm

MAX_PADDED_TOKENS = 2048  # of one call, unless a single sequence is longer: bounds the activations
_ERRORS_ONLY = 3  # the library's log level

_INDICES = (
    TensorSpec(names.POSITION_IDS, "input", "int32", ("T",)),
    TensorSpec(names.ATTENTION_ROWS, "input", "int32", ("B", "S")),
    TensorSpec(names.PACKED_SLOTS, "input", "int32", ("T",)),
)


Observer = Callable[[str, np.ndarray], None]
"""Called with the name of a linear and the sizes of its input, float32 ``[tokens, 2]``: largest and root mean square."""


def layer_states(
    checkpoint: Checkpoint,
    sequences: Sequence[np.ndarray],
    *,
    last_layer: int | None = None,
    observe: Observer | None = None,
) -> Iterator[tuple[int, Norm, list[np.ndarray]]]:
    """Yield ``(layer, norm, states)`` from layer 0, the embedding, upwards; ``states`` is float32 ``[tokens, hidden]`` a
    sequence.

    Ends with the state after the final norm, ``(n, "post", states)``, or with ``last_layer`` where one is given. What
    was yielded is never written to again. ``observe`` hears how large the input of
    every linear is, a batch at a time. Raises BackendError with the layer and the library's words.
    """
    num_layers = checkpoint.architecture.num_layers
    offsets = np.cumsum([0, *map(len, sequences)])
    batches = _batches(sequences, checkpoint.architecture.vocab_size)
    x = checkpoint.tensor(EMBEDDING)[np.concatenate(sequences)].astype(np.float32)  # [tokens, hidden]
    yield 0, "pre", _divided(x, offsets)
    layer_session = _Session(layer_model(checkpoint, max(map(len, sequences)), with_input_sizes=observe is not None))
    for layer in range(num_layers if last_layer is None else last_layer):
        x = _next(layer_session, checkpoint, layer_prefix(layer), x, batches, observe)
        yield layer + 1, "pre", _divided(x, offsets)
    if last_layer is None:
        x = _next(_Session(norm_model(checkpoint)), checkpoint, "", x, batches)
        yield num_layers, "post", _divided(x, offsets)


@dataclass(frozen=True)
class _Batch:
    """Neighbouring sequences that run in one call."""

    rows: slice  # of the packed rows of all sequences
    indices: dict[str, np.ndarray]


class _Session:
    """A small model whose weights are inputs, opened in ONNX Runtime."""

    def __init__(self, model: onnx.ModelProto) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = _ERRORS_ONLY
        options.enable_cpu_mem_arena = False  # give memory back after each call
        options.enable_mem_pattern = False
        self._session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        self._inputs = [tensor.name for tensor in self._session.get_inputs()]
        self.weights = [name for name in self._inputs if name.endswith((".weight", ".bias"))]
        self._outputs = [tensor.name for tensor in self._session.get_outputs()]

    def run(self, feed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        outputs = self._session.run(self._outputs, {name: feed[name] for name in self._inputs})
        return dict(zip(self._outputs, outputs, strict=True))


def _next(
    session: _Session,
    checkpoint: Checkpoint,
    prefix: str,
    x: np.ndarray,
    batches: list[_Batch],
    observe: Observer | None = None,
) -> np.ndarray:
    """Run one step over all sequences; its weights are in memory only here."""
    weights = {name: checkpoint.tensor(prefix + name).astype(np.float32, copy=False) for name in session.weights}
    following = np.empty_like(x)
    for batch in batches:
        try:
            outputs = session.run({STATES: x[batch.rows], **batch.indices, **weights})
        except Exception as error:  # the library's exceptions share no base class
            raise BackendError(
                f"ONNX Runtime failed in {prefix.rstrip('.') or 'the final norm'} of '{checkpoint.name}'",
                expected=f"float32 states of {len(x[batch.rows])} tokens",
                found=error,
                fix="free memory if it ran out; otherwise read the library's words above",
            ) from error
        following[batch.rows] = outputs.pop(NEXT_STATES)
        for name, values in outputs.items() if observe else ():
            observe(prefix + name, values)
    return following


def _batches(sequences: Sequence[np.ndarray], vocab_size: int) -> list[_Batch]:
    """Group neighbours while their padded size stays within MAX_PADDED_TOKENS."""
    groups: list[list[np.ndarray]] = []
    for sequence in sequences:
        longest = max(map(len, [*groups[-1], sequence])) if groups else 0
        if not groups or longest * (len(groups[-1]) + 1) > MAX_PADDED_TOKENS:
            groups.append([])
        groups[-1].append(sequence)
    ends = np.cumsum([sum(map(len, group)) for group in groups])
    return [_batch(group, int(end), vocab_size) for group, end in zip(groups, ends, strict=True)]


def _batch(group: list[np.ndarray], end: int, vocab_size: int) -> _Batch:
    offsets = np.cumsum([0, *map(len, group)], dtype=np.int32)
    indices = index_arrays(_INDICES, np.concatenate(group).astype(np.int32, copy=False), offsets, vocab_size)
    return _Batch(slice(end - int(offsets[-1]), end), indices)


def _divided(x: np.ndarray, offsets: np.ndarray) -> list[np.ndarray]:
    return np.split(x, offsets[1:-1])
