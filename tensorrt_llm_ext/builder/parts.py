"""EngineParts: what the writer of a backend's engine tells the contract."""

from __future__ import annotations

from dataclasses import dataclass

from tensorrt_llm_ext.recipes.contract import MemoryEstimate, TensorSpec


@dataclass(frozen=True)
class EngineParts:
    """What was written into an engine's folder. ``files`` are those that the plan's fingerprint is made of."""

    files: tuple[str, ...]
    tensors: tuple[TensorSpec, ...]
    weight_dtype: str  # the type that most bytes of the weights are computed in or stored in
    memory: MemoryEstimate
    accepted_runtime: str
