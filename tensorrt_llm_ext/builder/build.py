"""From a checkpoint and a recipe to a published engine directory.

::

    settings = settings_from_recipe(recipe, cards, architecture)
    with published(out) as folder:
        write(checkpoint, folder, settings)             # what the backend runs: model.onnx and weights, or weights
        checkpoint.tokenizer().save(folder)
        canaries = make_canaries(checkpoint, …)         # float32, layer by layer
        write_contract(folder, contract)                # what the engine promises
"""

from __future__ import annotations

import dataclasses
import errno
import resource
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import onnxruntime

from tensorrt_llm_ext.builder.canaries import make_canaries
from tensorrt_llm_ext.builder.fp8_canaries import Fp8Oracle, check_fp8_canaries
from tensorrt_llm_ext.builder.layerwise import layer_states
from tensorrt_llm_ext.builder.ort_engine import write_ort_engine
from tensorrt_llm_ext.builder.parts import EngineParts, Progress
from tensorrt_llm_ext.builder.torch_engine import write_torch_engine
from tensorrt_llm_ext.builder.trt_engine import TRT_PRECISIONS, write_trt_engine
from tensorrt_llm_ext.checkpoint import Checkpoint, open_checkpoint
from tensorrt_llm_ext.errors import BuildError, DiskFull, RecipeError
from tensorrt_llm_ext.fingerprint import file_fingerprint, fingerprint
from tensorrt_llm_ext.recipes import (
    BuildSettings,
    Card,
    Contract,
    Recipe,
    load_card,
    load_recipe,
    published,
    settings_from_recipe,
    write_contract,
)
from tensorrt_llm_ext.recipes.contract import Canary, EngineFile, Fingerprints

ORT_PRECISIONS = ("float32", "float16", "fp8")  # ONNX Runtime has no bfloat16 kernels on a CPU

Writer = Callable[[Checkpoint, Path, BuildSettings, Progress], EngineParts]
"""Writes what a backend runs into an empty folder; tells of its steps."""


def build_engine(
    checkpoint_path: Path | str,
    out: Path | str,
    *,
    recipe: Recipe | Path | str | None = None,
    card: Card | Path | str | Sequence[Card | Path | str] = "cpu",
    taps: str | None = None,
    precision: str | None = None,
    max_seq_len: int | None = None,
    opt_num_tokens: int | None = None,
    max_num_tokens: int | None = None,
    max_batch_size: int | None = None,
    max_padded_tokens: int | None = None,
    is_deterministic: bool | None = None,
    calibration: Path | str | None = None,
    progress: Progress | None = None,
) -> Contract:
    """Build the engine of a checkpoint for a card and publish it as the directory ``out``; return its contract.

    What is given here goes before the recipe, what the recipe leaves open the card and the model decide. Of several
    cards one engine serves all, or it is refused.
    ``calibration`` is text for fp8 to be measured on (default: the demo's prompts). Raises
    CheckpointError, RecipeError, TapError, BuildError or DiskFull; ``out`` then does not exist, or is as it was.
    """
    given = dict(
        taps=taps,
        precision=precision,
        max_seq_len=max_seq_len,
        opt_num_tokens=opt_num_tokens,
        max_num_tokens=max_num_tokens,
        max_batch_size=max_batch_size,
        max_padded_tokens=max_padded_tokens,
        is_deterministic=is_deterministic,
    )
    recipe = Recipe() if recipe is None else recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    recipe = dataclasses.replace(recipe, **{name: value for name, value in given.items() if value is not None})
    cards = tuple(one if isinstance(one, Card) else load_card(one) for one in _several(card))
    with open_checkpoint(checkpoint_path) as checkpoint:
        settings = settings_from_recipe(recipe, cards, checkpoint.architecture)
        write = _writer(settings, cards, calibration)
        try:
            return _build(checkpoint, Path(out), settings, write, progress or (lambda step, done, total: None))
        except OSError as error:
            raise _file_error(error, Path(out)) from error


def _several(card: Card | Path | str | Sequence[Card | Path | str]) -> Sequence[Card | Path | str]:
    return (card,) if isinstance(card, (Card, Path, str)) else card


def _writer(settings: BuildSettings, cards: Sequence[Card], calibration: Path | str | None) -> Writer:
    """Find what writes the engine of a backend.

    Raises BuildError when nothing here does, RecipeError for a calibration that nothing would use.
    """
    if calibration is not None and (settings.precision != "fp8" or (settings.backend, settings.fp8_harm) == ("torch", None)):
        raise RecipeError(
            "a calibration is given, and nothing of this engine is measured",
            expected="precision fp8; on backend torch, by a recipe without fp8_kept",
            found=f"precision {settings.precision} of backend {settings.backend}",
            fix="leave the calibration out, or build with --precision fp8",
        )
    if settings.backend == "ort" and settings.precision in ORT_PRECISIONS:
        return partial(write_ort_engine, calibration=calibration)
    if settings.backend == "torch":
        return partial(write_torch_engine, calibration=calibration)
    if settings.backend == "trt" and settings.precision in TRT_PRECISIONS:
        return partial(write_trt_engine, calibration=calibration)
    raise BuildError(
        f"there is no builder for the card '{', '.join(card.name for card in cards)}' here",
        expected=f"backend torch, backend ort with {' or '.join(ORT_PRECISIONS)}, or backend trt with "
        f"{' or '.join(TRT_PRECISIONS)}",
        found=f"backend {settings.backend} with {settings.precision}",
        fix="build for another card, for example --card cpu",
    )


def _build(
    checkpoint: Checkpoint, out: Path, settings: BuildSettings, write: Writer, progress: Progress
) -> Contract:
    started = time.monotonic()
    with published(out) as folder:
        parts = write(checkpoint, folder, settings, progress)
        checkpoint.tokenizer().save(folder)
        oracle = Fp8Oracle(parts.fp8) if parts.fp8 else layer_states
        canaries = make_canaries(
            checkpoint,
            settings.taps,
            settings.precision,
            lambda done, total: progress("canaries", done, total),
            max_seq_len=settings.limits.max_seq_len,
            oracle=oracle,
        )
        if parts.fp8:
            distance = check_fp8_canaries(checkpoint, settings, canaries, oracle.rounded)
            parts.build["canary_distance_of_fp8"] = round(distance, 4)
        files = _hashed(folder, parts, lambda done, total: progress("fingerprint", done, total + 1))
        contract = _contract(checkpoint, settings, parts, canaries, files, started)
        progress("fingerprint", len(files) + 1, len(files) + 1)
        write_contract(folder, contract)
    return contract


def _contract(
    checkpoint: Checkpoint,
    settings: BuildSettings,
    parts: EngineParts,
    canaries: tuple[Canary, ...],
    files: tuple[EngineFile, ...],
    started: float,
) -> Contract:
    plan = parts.compiled_from or {file.name: file.sha256 for file in files if file.name in parts.files}
    return Contract(
        model_name=checkpoint.name,
        architecture=checkpoint.architecture,
        fingerprints=Fingerprints(
            checkpoint=checkpoint.fingerprint(),
            tokenizer=checkpoint.tokenizer().fingerprint(),
            recipe=settings.fingerprint(),
            plan=fingerprint(plan),
        ),
        backend=settings.backend,
        builder=parts.builder,
        builder_version=parts.builder_version,
        accepted_runtime=parts.accepted_runtime,
        platform=settings.platform,
        compute_capabilities=settings.compute_capabilities,
        weight_dtype=parts.weight_dtype,
        activation_dtype=settings.precision,
        taps=settings.taps,
        tensors=parts.tensors,
        limits=settings.limits,
        memory=parts.memory,
        files=files,
        canaries=canaries,
        build={
            "seconds": round(time.monotonic() - started, 3),
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "onnxruntime": onnxruntime.__version__,  # which gave the canaries
            **parts.build,
        },
        profiles=parts.profiles,
    )


def _hashed(folder: Path, parts: EngineParts, progress: Callable[[int, int], None]) -> tuple[EngineFile, ...]:
    compiled = () if parts.compiled_from is None else parts.files
    files = sorted(folder.iterdir())
    hashed = []
    for number, path in enumerate(files):
        progress(number, len(files))
        is_reproducible = path.name not in compiled
        hashed.append(EngineFile(path.name, path.stat().st_size, file_fingerprint(path), is_reproducible))
    return tuple(hashed)


def _file_error(error: OSError, out: Path) -> BuildError | DiskFull:
    """A file operation's error as one of ours."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(
            f"the disk filled up while '{out}' was built",
            expected="space for the engine's weights",
            found=error,
            fix="free space, or name an --out on another disk; the half-built engine was removed",
        )
    return BuildError(
        f"a file could not be read or written while '{out}' was built",
        expected="the checkpoint's files, and a folder that can be written to",
        found=error,
        fix="check the file that is named, its permissions and its disk",
    )
