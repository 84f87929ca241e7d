"""What a checkpoint is to the rest of the package: named tensors, an architecture, a tokenizer, an identity.

Tensor names are Hugging Face's canonical names (``model.layers.0.self_attn.q_proj.weight`` …) whatever the file
format; q and k rows are in Hugging Face's order (halves, not interleaved pairs).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from tensorrt_llm_ext.checkpoint.architecture import Architecture
from tensorrt_llm_ext.checkpoint.tokenizer import Tokenizer


@dataclass(frozen=True)
class TensorInfo:
    """A tensor before it is read. ``dtype`` is what ``Checkpoint.tensor`` gives (GGUF blocks give float32).

    ``file``, ``offset`` and ``length`` (bytes) locate the raw little-endian values where they lie in the file as they
    are; they are None where the values must be computed (de-quantised, permuted).
    """

    name: str
    dtype: str  # "float32", "float16" or "bfloat16"
    shape: tuple[int, ...]
    file: Path | None = None
    offset: int | None = None
    length: int | None = None


@dataclass(frozen=True)
class Fp8Scales:
    """What the values of a weight stored in FP8 are multiplied with, float32 ``[out]``, and the scale of its input: None
    where that is to be found at every call. ``values`` says where the weight's values lie, of type float8_e4m3fn."""

    weight: np.ndarray
    activation: float | None
    values: TensorInfo


class Checkpoint(Protocol):
    """Weights on disk, opened. One tensor is in memory at a time, and only while the caller holds it."""

    path: Path
    name: str
    architecture: Architecture

    def tensors(self) -> Iterator[TensorInfo]: ...

    def info(self, name: str) -> TensorInfo:
        """Describe one tensor. Raises DamagedCheckpoint when the checkpoint lacks it, naming the nearest it has."""
        ...

    def tensor(self, name: str) -> np.ndarray:
        """Read one tensor, C-contiguous; bfloat16 comes as ``ml_dtypes.bfloat16``."""
        ...

    def fp8_scales(self, linear: str) -> Fp8Scales | None:
        """Read the scales of a linear whose weight is stored in FP8; None where it is stored in another type. ``tensor``
        gives such a weight multiplied with them, in float32."""
        ...

    def tokenizer(self) -> Tokenizer: ...

    def fingerprint(self) -> str:
        """Identity of the weights and the config: ``sha256:`` over every weight file's bytes and the architecture."""
        ...

    def close(self) -> None: ...

    def __enter__(self) -> Checkpoint: ...

    def __exit__(self, *error: object) -> None: ...
