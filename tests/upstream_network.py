"""A stand-in for the few parts of TensorRT-LLM that a decoder definition calls; it computes with NumPy as it goes.

What it repeats of upstream's behaviour: ``mark_output`` adds a cast when the dtype differs, marks the tensor and then
renames it, so a tensor marked twice keeps only the second name; ``gather_last_token_logits`` takes 1-based prefix sums
and gives its own argument back when there are none.
"""

from __future__ import annotations

import sys
import types
from contextlib import contextmanager

import numpy as np

HIDDEN, VOCAB, NUM_LAYERS = 6, 11, 2
STATES = np.random.default_rng(0).normal(size=(VOCAB, HIDDEN)).astype(np.float16)  # a token's state, before the norm
HEAD = np.random.default_rng(1).normal(size=(HIDDEN, VOCAB)).astype(np.float16)


class Network:
    """What was computed, in order, and what was marked."""

    def __init__(self):
        self.operators: list[str] = []
        self.marked: list[Tensor] = []
        self.num_marks = 0

    def outputs(self) -> dict[str, Tensor]:
        return {tensor.name: tensor for tensor in self.marked}


class Tensor:
    def __init__(self, network: Network, operator: str, array: np.ndarray):
        self.network, self.array, self.name = network, array, f"{operator}_{len(network.operators)}"
        network.operators.append(operator)

    @property
    def dtype(self):
        return self.array.dtype.name

    def mark_output(self, name=None, dtype=None):
        marked = self if dtype in (None, self.dtype) else Tensor(self.network, "cast", self.array.astype(dtype))
        self.network.num_marks += 1
        if marked not in self.network.marked:
            self.network.marked.append(marked)
        marked.name = name


class Mapping:
    def __init__(self, is_last=True, cp_size=1, cp_rank=0):
        self._is_last, self.cp_size, self.cp_rank = is_last, cp_size, cp_rank

    def is_last_pp_rank(self):
        return self._is_last


def normed(states: np.ndarray) -> np.ndarray:
    """The stand-in's final norm."""
    return (states / np.sqrt((states.astype(np.float32) ** 2).mean(-1, keepdims=True))).astype(np.float16)


class Transformer:
    """Gives every token's state, normed on the last pipeline rank; of its own tokens only on a context-parallel rank."""

    def __init__(self, network, mapping):
        self.network, self.mapping = network, mapping

    def forward(self, input_ids=None, use_cache=False, **rest):
        states = STATES[input_ids]
        states = normed(states) if self.mapping.is_last_pp_rank() else states
        result = Tensor(self.network, "transformer", states)
        presents = [Tensor(self.network, "present", np.zeros(1, np.float16)) for _ in range(NUM_LAYERS)]
        return (result, presents) if use_cache else result


def model_of(module: types.ModuleType, class_name: str, mapping: Mapping | None = None, dtype: str = "float16"):
    """Make an instance of a definition's class over a fresh network."""
    model = getattr(module, class_name).__new__(getattr(module, class_name))
    model.network = Network()
    mapping = mapping or Mapping()
    model.config = types.SimpleNamespace(
        mapping=mapping, dtype=dtype, logits_dtype="float32", num_hidden_layers=NUM_LAYERS
    )
    model.transformer = Transformer(model.network, mapping)
    model.lm_head = lambda states: Tensor(states.network, "lm_head", states.array @ HEAD)
    return model


@contextmanager
def loaded(path):
    """Run a definition's file with these stand-ins in place of the package it imports from."""
    functional = types.ModuleType("tensorrt_llm.functional")
    functional.gather_last_token_logits = _gather
    functional.cp_split = lambda ids, mapping: np.array_split(ids, mapping.cp_size)[mapping.cp_rank]
    functional.cp_gather = lambda part, whole, mapping: Tensor(part.network, "cp_gather", normed(STATES[whole]))
    functional.remove_input_padding = lambda: True
    names = {"tensorrt_llm": types.ModuleType("tensorrt_llm"), "tensorrt_llm.functional": functional}
    package = "tensorrt_llm." + path.parent.name
    names[package] = types.ModuleType(package)
    if path.parent.name != "models":
        names["tensorrt_llm.modeling_utils"] = types.ModuleType("tensorrt_llm.modeling_utils")
    before = {name: sys.modules.get(name) for name in names}
    sys.modules.update(names)
    try:
        module = types.ModuleType(package + ".definition")
        module.__package__ = package
        exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
        yield module
    finally:
        for name, value in before.items():
            sys.modules.pop(name) if value is None else sys.modules.update({name: value})


def _gather(states, last_token_ids, is_packed):
    if last_token_ids is None:
        return states
    assert is_packed
    return Tensor(states.network, "gather", states.array[last_token_ids - 1])
