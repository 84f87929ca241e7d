"""What backend ort runs: one ONNX decoder graph, and its weights beside it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tensorrt_llm_ext.builder.memory import memory_estimate
from tensorrt_llm_ext.builder.parts import EngineParts, Progress
from tensorrt_llm_ext.checkpoint import Checkpoint
from tensorrt_llm_ext.graph import write_decoder
from tensorrt_llm_ext.recipes import BuildSettings, TensorSpec

ACCEPTED_RUNTIME = "onnxruntime>=1.23,<2"  # 1.23 is the first with the Attention operator of opset 23


def write_ort_engine(
    checkpoint: Checkpoint, folder: Path, settings: BuildSettings, progress: Progress
) -> EngineParts:
    """Write model.onnx and its weights into the existing, empty ``folder``. Raises what ``write_decoder`` raises."""
    decoder = write_decoder(
        checkpoint,
        folder,
        taps=settings.taps,
        dtype=settings.precision,
        max_seq_len=settings.limits.max_seq_len,
        progress=partial(progress, "weights"),
    )
    inputs = [TensorSpec(tensor.name, "input", tensor.dtype, tensor.shape) for tensor in decoder.inputs]
    outputs = [
        TensorSpec(tensor.name, "output", tensor.dtype, tensor.shape, tap=tap)
        for tensor, tap in zip(decoder.outputs, settings.taps, strict=True)
    ]
    return EngineParts(
        files=decoder.files,
        tensors=(*inputs, *outputs),
        weight_dtype=decoder.weight_dtype,
        memory=memory_estimate(checkpoint.architecture, settings, decoder.weight_bytes),
        accepted_runtime=ACCEPTED_RUNTIME,
    )
