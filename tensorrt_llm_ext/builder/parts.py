"""EngineParts: what the writer of a backend's engine tells the contract, and how it tells its progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import tensorrt_llm_ext
from tensorrt_llm_ext.graph.quantisation import Fp8Linears
from tensorrt_llm_ext.recipes.contract import MemoryEstimate, Profile, TensorSpec

Progress = Callable[[str, int, int], None]
"""Called with a step's name, how much of it is done, and how much there is."""


@dataclass(frozen=True)
class EngineParts:
    """What was written into an engine's folder. ``files`` are those that the plan's fingerprint is made of."""

    files: tuple[str, ...]
    tensors: tuple[TensorSpec, ...]
    weight_dtype: str  # the type that most bytes of the weights are computed in or stored in
    memory: MemoryEstimate
    accepted_runtime: str
    builder: str = "tensorrt_llm_ext"
    builder_version: str = tensorrt_llm_ext.__version__
    profiles: tuple[Profile, ...] = ()
    compiled_from: dict[str, str] | None = None
    """Hashes by name, where ``files`` have other bytes from build to build: then this is the plan's identity."""
    fp8: Fp8Linears | None = None
    """What the engine computes in FP8: then its canaries are run with that rounding, too."""
    build: dict = field(default_factory=dict)
    """Facts of the build for the reader; JSON types."""
