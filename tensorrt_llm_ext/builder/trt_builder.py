"""Compile an ONNX graph into a TensorRT plan. Everything that is asked of TensorRT's builder is asked here.

The library reports its reasons to a logger only, and its callbacks must not raise: what went wrong in one is kept and
raised when the build has ended.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensorrt_llm_ext.builder.trt_library import Library
from tensorrt_llm_ext.errors import BuildError
from tensorrt_llm_ext.recipes import TensorSpec
from tensorrt_llm_ext.recipes.contract import Profile

_WORDS_SHOWN = 3  # messages of the library: the first say what is wrong, later ones that something was
_ACTIVATIONS = re.compile(r"Total Activation Memory: (\d+) bytes")  # told of each profile
_SYMBOLS = {"T": "max_num_tokens", "B": "max_batch_size", "S": "max_seq_len"}


def compile_plan(
    library: Library,
    network: Path,
    plan: Path,
    *,
    tensors: tuple[TensorSpec, ...],
    compute_capabilities: tuple[str, ...],
    profiles: tuple[Profile, ...],
    opt_num_tokens: int,
    progress: Callable[[int, int], None],
) -> int | None:
    """Compile the ONNX file ``network`` for all these cards at once and stream the plan into the file ``plan``; return
    the bytes of device memory that its largest profile computes in, None where the library does not tell.

    ``tensors`` are the network's, as the contract lists them; the parsed network must have the same. ``progress`` hears
    of the compiler's steps. Raises BuildError with the library's words, OSError for what a disk refuses, and whatever
    ``progress`` raises, which ends the build.
    """
    trt = library.module
    log = _log(trt)
    builder = _required(trt.Builder(log), "make a builder", log)
    definition = builder.create_network(_strongly_typed(trt))
    parser = trt.OnnxParser(definition, log)
    if not parser.parse_from_file(str(network)):
        words = [f"{error.node_name()}: {error.desc()}" for error in map(parser.get_error, range(parser.num_errors))]
        raise _failed("parse the graph", words or log.words)
    _check_tensors(trt, definition, tensors)
    config = builder.create_builder_config()
    if library.names_targets:
        config.num_compute_capabilities = len(compute_capabilities)
        for index, capability in enumerate(compute_capabilities):
            name = "SM" + capability.replace(".", "")
            config.set_compute_capability(getattr(trt.ComputeCapability, name), index)
    for profile in profiles:
        _add_profile(builder, config, profile, tensors, opt_num_tokens)
    monitor = _monitor(trt, progress)
    config.progress_monitor = monitor
    with open(plan, "wb") as out:
        writer = _writer(trt, out)
        is_built = builder.build_serialized_network_to_stream(definition, config, writer)
    for error in (monitor.error, writer.error):
        if error is not None:
            raise error
    if not is_built or not plan.stat().st_size:
        raise _failed(f"compile for {', '.join(compute_capabilities)}", log.words)
    return max(log.activation_bytes, default=None)


def _strongly_typed(trt: Any) -> int:
    """Types are the graph's own, in every version: from TensorRT 11 on there is no other kind of network, and no flag."""
    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return 0 if flag is None else 1 << int(flag)


def _check_tensors(trt: Any, definition: Any, tensors: tuple[TensorSpec, ...]) -> None:
    """Raise BuildError unless the parsed network has the tensors that the contract will list."""
    types = {trt.DataType.INT32: "int32", trt.DataType.FLOAT: "float32", trt.DataType.HALF: "float16"}
    parsed = {}
    for role, count, get in (
        ("input", definition.num_inputs, definition.get_input),
        ("output", definition.num_outputs, definition.get_output),
    ):
        for tensor in map(get, range(count)):
            parsed[tensor.name] = (role, types.get(tensor.dtype, str(tensor.dtype)), len(tensor.shape))
    wanted = {tensor.name: (tensor.role, tensor.dtype, len(tensor.shape)) for tensor in tensors}
    if parsed != wanted:
        raise BuildError(
            "TensorRT reads other tensors from the graph than were written into it",
            expected=wanted,
            found=parsed,
            fix="use a version of TensorRT that is served, and report this",
        )


def _add_profile(
    builder: Any, config: Any, profile: Profile, tensors: tuple[TensorSpec, ...], opt_num_tokens: int
) -> None:
    most = {symbol: getattr(profile, field) for symbol, field in _SYMBOLS.items()}
    num_tokens = min(opt_num_tokens, profile.max_num_tokens)
    best = {"T": num_tokens, "S": most["S"], "B": min(most["B"], -(-num_tokens // most["S"]))}
    described = builder.create_optimization_profile()
    for tensor in tensors:
        if tensor.role == "input":
            shapes = [tuple(sizes[symbol] for symbol in tensor.shape) for sizes in (best, most)]
            described.set_shape(tensor.name, (1,) * len(tensor.shape), *shapes)
    if config.add_optimization_profile(described) < 0:
        raise BuildError(
            "TensorRT refuses an optimization profile",
            expected="a profile that it can use",
            found=f"{profile}",
            fix="build with other limits",
        )


def _log(trt: Any) -> Any:
    """A logger that keeps the words of errors and the sizes of profiles, and prints nothing."""

    class Log(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.words: list[str] = []
            self.activation_bytes: list[int] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self.words.append(message)
            elif told := _ACTIVATIONS.fullmatch(message):
                self.activation_bytes.append(int(told[1]))

    return Log()


def _monitor(trt: Any, progress: Callable[[int, int], None]) -> Any:
    """Reports the steps of the longest parts of a build; an error of ``progress`` ends the build and is kept."""

    class Monitor(trt.IProgressMonitor):
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.error: BaseException | None = None
            self._phases: dict[str, int] = {}  # number of steps of the outermost phase
            self._report(0, 1)

        def phase_start(self, name: str, parent: str | None, num_steps: int) -> None:
            if parent is None:
                self._phases[name] = num_steps

        def step_complete(self, name: str, step: int) -> bool:
            if name in self._phases:
                self._report(step + 1, self._phases[name] + 1)
            return self.error is None

        def phase_finish(self, name: str) -> None:
            if self._phases.pop(name, None):
                self._report(1, 1)

        def _report(self, done: int, total: int) -> None:
            try:
                if self.error is None:
                    progress(done, total)
            except BaseException as error:  # KeyboardInterrupt too: it is raised once the library has let go
                self.error = error

    return Monitor()


def _writer(trt: Any, out: Any) -> Any:
    """Writes a plan piece by piece, so that it is never whole in memory; an error of the disk is kept."""

    class Writer(trt.IStreamWriter):
        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)
            self.error: OSError | None = None

        def write(self, piece: bytes) -> int:
            try:
                return out.write(piece)
            except OSError as error:
                self.error = error
                return 0

    return Writer()


def _required(value: Any, what: str, log: Any) -> Any:
    if value is None:
        raise _failed(what, log.words)
    return value


def _failed(what: str, words: list[str]) -> BuildError:
    return BuildError(
        f"TensorRT could not {what}",
        expected="a graph that TensorRT compiles",
        found="; ".join(words[:_WORDS_SHOWN]) or "no reason given",
        fix="free memory if it ran out; otherwise build another precision, or for another card",
    )
