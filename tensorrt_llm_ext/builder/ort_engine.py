"""What backend ort runs: one ONNX decoder graph, and its weights beside it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tensorrt_llm_ext.builder.calibration import SCALES_FILE, calibrated
from tensorrt_llm_ext.builder.memory import memory_estimate
from tensorrt_llm_ext.builder.parts import EngineParts, Progress
from tensorrt_llm_ext.checkpoint import Checkpoint
from tensorrt_llm_ext.graph import write_decoder
from tensorrt_llm_ext.graph.fp8 import FP8
from tensorrt_llm_ext.recipes import BuildSettings, TensorSpec

ACCEPTED_RUNTIME = "onnxruntime>=1.23,<2"  # 1.23 is the first with the Attention operator of opset 23


def write_ort_engine(
    checkpoint: Checkpoint,
    folder: Path,
    settings: BuildSettings,
    progress: Progress,
    calibration: Path | str | None = None,
) -> EngineParts:
    """Write model.onnx and its weights into the existing, empty ``folder``.

    Precision fp8 is computed in float32 and rounded where a card rounds: slow, and what FP8 numbers are checked by.
    Raises what ``write_decoder`` and ``calibrated`` raise.
    """
    fp8 = calibrated(checkpoint, settings, calibration, progress)
    if fp8:
        fp8.write(folder)
    decoder = write_decoder(
        checkpoint,
        folder,
        taps=settings.taps,
        dtype="float32" if fp8 else settings.precision,
        max_seq_len=settings.limits.max_seq_len,
        fp8=fp8 and fp8.linears,
        progress=partial(progress, "weights"),
    )
    inputs = [TensorSpec(tensor.name, "input", tensor.dtype, tensor.shape) for tensor in decoder.inputs]
    outputs = [
        TensorSpec(tensor.name, "output", tensor.dtype, tensor.shape, tap=tap)
        for tensor, tap in zip(decoder.outputs, settings.taps, strict=True)
    ]
    return EngineParts(
        files=(*decoder.files, SCALES_FILE) if fp8 else decoder.files,
        tensors=(*inputs, *outputs),
        weight_dtype=FP8 if fp8 else decoder.weight_dtype,
        memory=memory_estimate(checkpoint.architecture, settings, decoder.weight_bytes),
        accepted_runtime=ACCEPTED_RUNTIME,
        fp8=fp8 and fp8.linears,
        build={"calibration": fp8.facts(checkpoint)} if fp8 else {},
    )
