"""What backend trt runs: the decoder graph, compiled by TensorRT for one kind of card into one plan.

::

    decoder = write_decoder(…)                  # model.onnx and weights, beside the plan for as long as it is compiled
    compile_plan(library, model.onnx, engine.plan, profiles=ladder(limits), …)

The plan carries the weights; the graph is removed. No GPU is needed by TensorRT-RTX, and none can look into the plan
here: what the contract says of it is what the graph was written with, and what the parser read.
"""

from __future__ import annotations

import platform
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from tensorrt_llm_ext.builder.calibration import calibrated
from tensorrt_llm_ext.builder.ladder import ladder
from tensorrt_llm_ext.builder.parts import EngineParts, Progress
from tensorrt_llm_ext.builder.trt_builder import compile_plan
from tensorrt_llm_ext.builder.trt_library import check_fp8, library_for
from tensorrt_llm_ext.checkpoint import Architecture, Checkpoint
from tensorrt_llm_ext.fingerprint import file_fingerprint
from tensorrt_llm_ext.graph import DecoderFiles, write_decoder
from tensorrt_llm_ext.graph.fp8 import FP8
from tensorrt_llm_ext.graph.names import MODEL_FILE
from tensorrt_llm_ext.graph.weights import check_space
from tensorrt_llm_ext.recipes import BuildSettings, TensorSpec
from tensorrt_llm_ext.recipes.contract import MemoryEstimate, Profile

TRT_PRECISIONS = ("bfloat16", "float16", "fp8")
PLAN_FILE = "engine.plan"

_RUNG_BYTES = 32 << 20  # of a plan besides its weights, for each rung: measured 7 MB (8 layers) to 13 MB (30 layers)
_VALUE_BYTES = 2
_ENDS = "; host: the plan, while it is loaded. Not measured on a card"
FORMULA = f"the plan + what its largest profile computes in, as the builder reports it{_ENDS}"
FORMULA_UNREPORTED = (  # a bound: by the builder's report, plans of SmolLM2 take 0.54 to 0.60 of it
    "the plan + 2 x (max_num_tokens x (3 hidden + 3 intermediate)"
    f" + the largest profile's max_batch_size x max_seq_len x 2 (heads + 2 kv_heads) x head_dim){_ENDS}"
)


def write_trt_engine(
    checkpoint: Checkpoint,
    folder: Path,
    settings: BuildSettings,
    progress: Progress,
    calibration: Path | str | None = None,
) -> EngineParts:
    """Compile engine.plan into the existing, empty ``folder``; for precision fp8 write scales.safetensors beside it.

    Raises what ``library_for``, ``calibrated``, ``write_decoder`` and ``compile_plan`` raise, and DiskFull before the
    compiler starts.
    """
    library = library_for(settings.compute_capabilities)
    if settings.precision == "fp8":
        check_fp8(settings.compute_capabilities)
    profiles = ladder(settings.limits)
    fp8 = calibrated(checkpoint, settings, calibration, progress)
    if fp8:
        fp8.write(folder)
    with tempfile.TemporaryDirectory(prefix=".network-", dir=folder) as network:
        decoder = write_decoder(
            checkpoint,
            Path(network),
            taps=settings.taps,
            dtype="bfloat16" if fp8 else settings.precision,
            max_seq_len=settings.limits.max_seq_len,
            fp8=fp8 and fp8.linears,
            is_compiled=True,
            progress=partial(progress, "weights"),
        )
        check_space(folder, "the plan", decoder.weight_bytes + _RUNG_BYTES * len(profiles))
        tensors = _tensors(decoder, settings)
        started = time.monotonic()
        activation_bytes = compile_plan(
            library,
            decoder.folder / MODEL_FILE,
            folder / PLAN_FILE,
            tensors=tensors,
            compute_capabilities=settings.compute_capabilities,
            profiles=profiles,
            opt_num_tokens=settings.limits.opt_num_tokens,
            progress=partial(progress, "compile"),
        )
        seconds = time.monotonic() - started
        compiled_from = {MODEL_FILE: file_fingerprint(decoder.folder / MODEL_FILE)}  # scales are constants in it
    plan_bytes = (folder / PLAN_FILE).stat().st_size
    return EngineParts(
        files=(PLAN_FILE,),
        tensors=tensors,
        weight_dtype=FP8 if fp8 else settings.precision,
        memory=_memory(checkpoint.architecture, settings, profiles, plan_bytes, activation_bytes),
        accepted_runtime=f"{library.name}=={library.version}",
        builder=library.name,
        builder_version=library.version,
        profiles=profiles,
        compiled_from=compiled_from,
        fp8=fp8 and fp8.linears,
        build={
            "compile_seconds": round(seconds, 3),
            "plan_bytes": plan_bytes,
            "built_on": host_platform(),
            "notes": _notes(settings),
            **({"calibration": fp8.facts(checkpoint)} if fp8 else {}),
        },
    )


def host_platform() -> str:
    """This machine as contracts name it, for example ``linux-x86_64``."""
    return f"{sys.platform}-{platform.machine()}"


def _notes(settings: BuildSettings) -> list[str]:
    """What the reader must know: a plan for another kind of host than this one has not been seen to load."""
    if settings.platform in ("any", host_platform()):
        return []
    return [
        f"built on {host_platform()} for a host of {settings.platform}: no plan built like this has been loaded yet. "
        "Where it does not load, build on that host"
    ]


def _tensors(decoder: DecoderFiles, settings: BuildSettings) -> tuple[TensorSpec, ...]:
    inputs = [TensorSpec(tensor.name, "input", tensor.dtype, tensor.shape) for tensor in decoder.inputs]
    outputs = [
        TensorSpec(tensor.name, "output", tensor.dtype, tensor.shape, tap=tap)
        for tensor, tap in zip(decoder.outputs, settings.taps, strict=True)
    ]
    return (*inputs, *outputs)


def _memory(
    a: Architecture, settings: BuildSettings, profiles: tuple[Profile, ...], plan_bytes: int, activation_bytes: int | None
) -> MemoryEstimate:
    if activation_bytes is not None:
        return MemoryEstimate(plan_bytes + activation_bytes, plan_bytes, FORMULA)
    rows = settings.limits.max_num_tokens * (3 * a.hidden_size + 3 * a.intermediate_size)
    slots = max(profile.max_batch_size * profile.max_seq_len for profile in profiles)
    heads = slots * 2 * (a.num_heads + 2 * a.num_kv_heads) * a.head_dim
    return MemoryEstimate(plan_bytes + _VALUE_BYTES * (rows + heads), plan_bytes, FORMULA_UNREPORTED)
