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

Observer = Callable[[str, float], None]
"""Called with the name of a linear and the largest absolute value of its input, a batch at a time."""


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
    every linear is. Raises BackendError with the layer and the library's words.
    """
    num_layers = checkpoint.architecture.num_layers
    offsets = np.cumsum([0, *map(len, sequences)])
    batches = batches_of(sequences, checkpoint.architecture.vocab_size)
    x = embedded(checkpoint, sequences)
    yield 0, "pre", np.split(x, offsets[1:-1])
    layer_step = Step(layer_model(checkpoint, max(map(len, sequences)), with_input_sizes=observe is not None), checkpoint)
    for layer in range(num_layers if last_layer is None else last_layer):
        prefix = layer_prefix(layer)
        x = layer_step.run(prefix, layer_step.weights(prefix), x, batches, observe)
        yield layer + 1, "pre", np.split(x, offsets[1:-1])
    if last_layer is None:
        norm = Step(norm_model(checkpoint), checkpoint)
        yield num_layers, "post", np.split(norm.run("", norm.weights(""), x, batches), offsets[1:-1])


def embedded(checkpoint: Checkpoint, sequences: Sequence[np.ndarray]) -> np.ndarray:
    """The embedding of every token, float32 ``[tokens, hidden]``."""
    return checkpoint.tensor(EMBEDDING)[np.concatenate(sequences)].astype(np.float32)


@dataclass(frozen=True)
class Batch:
    """Neighbouring sequences that run in one call."""

    rows: slice  # of the packed rows of all sequences
    indices: dict[str, np.ndarray]


class Step:
    """A small model from states to states whose weights are inputs, opened in ONNX Runtime."""

    def __init__(self, model: onnx.ModelProto, checkpoint: Checkpoint) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = _ERRORS_ONLY
        options.enable_cpu_mem_arena = False  # give memory back after each call
        options.enable_mem_pattern = False
        self._session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        self._checkpoint = checkpoint
        self._inputs = [tensor.name for tensor in self._session.get_inputs()]
        self._outputs = [tensor.name for tensor in self._session.get_outputs()]

    def weights(self, prefix: str) -> dict[str, np.ndarray]:
        """The checkpoint's weights ``prefix + name`` that this step takes, by name, in float32."""
        names = [name for name in self._inputs if name.endswith((".weight", ".bias"))]
        return {name: self._checkpoint.tensor(prefix + name).astype(np.float32, copy=False) for name in names}

    def run(
        self,
        prefix: str,
        weights: dict[str, np.ndarray],
        x: np.ndarray,
        batches: Sequence[Batch],
        observe: Observer | None = None,
    ) -> np.ndarray:
        """Take the states ``x`` of all sequences one step on; a batch is one call. ``weights`` hold every input besides
        the states and the layout. Raises BackendError naming ``prefix``."""
        following = np.empty_like(x)
        for batch in batches:
            feed = {STATES: x[batch.rows], **batch.indices, **weights}
            try:
                outputs = self._session.run(self._outputs, {name: feed[name] for name in self._inputs})
            except Exception as error:  # the library's exceptions share no base class
                raise BackendError(
                    f"ONNX Runtime failed in {prefix.rstrip('.') or 'the final norm'} of '{self._checkpoint.name}'",
                    expected=f"float32 states of {len(x[batch.rows])} tokens",
                    found=error,
                    fix="free memory if it ran out; otherwise read the library's words above",
                ) from error
            by_name = dict(zip(self._outputs, outputs, strict=True))
            following[batch.rows] = by_name.pop(NEXT_STATES)
            for name, value in by_name.items() if observe else ():
                observe(prefix + name, float(value))
        return following


def batches_of(sequences: Sequence[np.ndarray], vocab_size: int) -> list[Batch]:
    """Group neighbours while their padded size stays within MAX_PADDED_TOKENS."""
    groups: list[list[np.ndarray]] = []
    for sequence in sequences:
        longest = max(map(len, [*groups[-1], sequence])) if groups else 0
        if not groups or longest * (len(groups[-1]) + 1) > MAX_PADDED_TOKENS:
            groups.append([])
        groups[-1].append(sequence)
    ends = np.cumsum([sum(map(len, group)) for group in groups])
    return [_batch(group, int(end), vocab_size) for group, end in zip(groups, ends, strict=True)]


def _batch(group: list[np.ndarray], end: int, vocab_size: int) -> Batch:
    offsets = np.cumsum([0, *map(len, group)], dtype=np.int32)
    indices = index_arrays(_INDICES, np.concatenate(group).astype(np.int32, copy=False), offsets, vocab_size)
    return Batch(slice(end - int(offsets[-1]), end), indices)
