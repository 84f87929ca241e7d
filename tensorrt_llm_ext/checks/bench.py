"""bench: packed batches of our engine against transformers with padding, same token ids, same threads or card, one run.

Every contender answers every prompt once a round, rounds are interleaved so that a slow minute of the machine meets all
of them, and the median round counts; a contender that is far slower than ours runs once. Tokens are real tokens: padding
is work, not output. transformers is given the easier task: no output head, and no state but the last. On a card it runs
compiled, too, and backend torch beside its own limit.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import psutil

from tensorrt_llm_ext import __version__
from tensorrt_llm_ext.checkpoint import Checkpoint
from tensorrt_llm_ext.checks.padded import padded_last_states
from tensorrt_llm_ext.checks.reference import whole_model
from tensorrt_llm_ext.checks.verify import refuse_foreign
from tensorrt_llm_ext.errors import InputError, VerificationFailed
from tensorrt_llm_ext.recipes.contract import row_cosines
from tensorrt_llm_ext.results.record import Failure, WorkItem
from tensorrt_llm_ext.runtime import Session, batches_of_windows
from tensorrt_llm_ext.taps import Tap

if TYPE_CHECKING:
    import torch

EAGER, COMPILED, LIMIT = "transformers", "transformers compiled", "its products alone"
PRODUCTS_ALONE = "products_alone"
NUM_ROUNDS = 3
SLOW = 8.0  # times ours: who took longer in the first round is not run again
SLOW_BFLOAT16 = 4.0  # times float32: a CPU without its instructions, where nobody would run bfloat16
PADDED_BATCH = 16  # as given: what a user writes first
SORTED_BATCHES = (8, 16)  # sorted by length: the better of the two counts
CARD_BATCHES = (32, 128)  # the same on a card, which more sequences keep busy
_BYTES_PER_PARAMETER = 4 + 2  # float32 and bfloat16 beside each other
_WARM_UP_ITEMS = 8

States = dict[str, np.ndarray | None]
"""``final@last`` by request id: float32 ``[hidden]``; None from an engine that lacks this tap."""


@dataclass(frozen=True, eq=False)
class Contender:
    """A way to get the last hidden state of every prompt. ``run`` answers all items once; the limit answers none."""

    name: str
    dtype: str
    batching: str
    run: Callable[[Sequence[WorkItem]], States]


@dataclass(frozen=True)
class Timing:
    """One contender's rounds. ``min_cosine`` is against transformers float32; None where the engine lacks ``final@last``."""

    name: str
    dtype: str
    batching: str
    tokens_per_s: float
    prompts_per_s: float
    round_seconds: tuple[float, ...]
    min_cosine: float | None


@dataclass(frozen=True)
class BenchResult:
    """All timings of one run and the machine it ran on. ``ratios`` are our speed over transformers', and over the limit's."""

    model: str
    num_prompts: int
    num_tokens: int
    longest: int
    num_threads: int
    num_rounds: int
    timings: tuple[Timing, ...]
    ratios: dict[str, float]
    notes: tuple[str, ...]
    machine: dict[str, str | int | None]

    def to_dict(self) -> dict:
        return dataclasses.asdict(self)


def bench(
    session: Session,
    checkpoint: Checkpoint,
    items: Sequence[WorkItem],
    *,
    num_threads: int,
    num_rounds: int = NUM_ROUNDS,
    on_round: Callable[[str, int, int], None] = lambda contender, done, of: None,
) -> BenchResult:
    """Time the session, opened with ``num_threads``, and transformers with as many, on the same items.

    Raises CheckpointError for a checkpoint that the engine was not built from, InputError when the whole model does not fit
    into memory twice (float32 and bfloat16), VerificationFailed when a contender does not answer every item.
    """
    refuse_foreign(session.contract, checkpoint)
    device = "cuda" if session.contract.compute_capabilities else "cpu"
    _refuse_too_large(checkpoint, device)
    contenders, notes = [_packed(session), *_padded(whole_model(checkpoint, "float32").to(device), "float32", device)], []
    exact = contenders[1]  # transformers float32
    import torch

    torch.set_num_threads(num_threads)
    if device == "cuda" or (cost := _bfloat16_cost()) <= SLOW_BFLOAT16:
        model = whole_model(checkpoint, "bfloat16").to(device)
        contenders += _padded(model, "bfloat16", device)
        if device == "cuda":
            _add_compiled(contenders, notes, model, items)
    else:
        notes.append(f"transformers bfloat16 is left out: here torch multiplies matrices {cost:.1f} times slower than in float32")
    if isinstance(engine := session.engine, HasProducts):
        contenders.append(_products_alone(engine, session))
        notes.append("its products alone are launched by the host one by one, which may bound those of a small model")
    for contender in contenders:
        contender.run(items[:_WARM_UP_ITEMS])
    seconds: dict[Contender, list[float]] = {contender: [] for contender in contenders}
    states: dict[Contender, States] = {}
    for done in range(num_rounds):
        for contender in contenders:
            if done and seconds[contender][0] > SLOW * seconds[contenders[0]][0]:
                continue
            on_round(f"{contender.name} {contender.dtype}, {contender.batching}", done, num_rounds)
            start = time.perf_counter()
            states[contender] = contender.run(items)
            seconds[contender].append(time.perf_counter() - start)
            if contender.name != LIMIT:
                _refuse_lost(contender, items, states[contender])
    lengths = [len(item.token_ids) for item in items]
    timings = tuple(
        _timing(contender, seconds[contender], lengths, _min_cosine(states[exact], states[contender]))
        for contender in contenders
    )
    return BenchResult(
        model=session.contract.model_name,
        num_prompts=len(items),
        num_tokens=sum(lengths),
        longest=max(lengths),
        num_threads=num_threads,
        num_rounds=num_rounds,
        timings=timings,
        ratios=_ratios(timings),
        notes=tuple(notes),
        machine=_machine(device),
    )


def usable_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _packed(session: Session) -> Contender:
    contract = session.contract
    tap = Tap(contract.architecture.num_layers, "post", "last")

    def run(items: Sequence[WorkItem]) -> States:
        states: States = {}
        for answer in session.extract(items):
            if not isinstance(answer, Failure):
                rows = [state.rows[0] for state in answer.states if state.tap == tap]
                states[answer.request_id] = rows[0] if rows else None
        return states

    return Contender("this engine", contract.activation_dtype, "packed by token budget", run)


@runtime_checkable
class HasProducts(Protocol):
    """An engine that can run the matrix products of batches alone."""

    def run_products(self, num_tokens: Sequence[int]) -> None: ...


def _products_alone(engine: HasProducts, session: Session) -> Contender:
    """The limit: the products of every batch, by the library's first choice of algorithm where the engine fuses one."""
    contract = session.contract

    def run(items: Sequence[WorkItem]) -> States:
        batches = batches_of_windows(items, contract.limits)
        engine.run_products([sum(len(item.token_ids) for item in batch) for batch in batches])
        return {}

    return Contender(LIMIT, contract.activation_dtype, "as ours", run)


def _add_compiled(contenders: list[Contender], notes: list[str], model: torch.nn.Module, items: Sequence[WorkItem]) -> None:
    """Add transformers compiled, once every shape of the items has been; where that fails, a note."""
    import torch

    batch_size = CARD_BATCHES[-1]
    run = partial(padded_last_states, torch.compile(model, dynamic=True), batch_size=batch_size, is_sorted=True)
    try:
        run(items)
    except Exception as error:  # the compiler's own, or of what it calls
        notes.append(f"transformers compiled is left out: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
        return
    contenders.append(Contender(COMPILED, "bfloat16", f"padded, batch {batch_size}, sorted by length", run))


def _padded(model: torch.nn.Module, dtype: str, device: str) -> list[Contender]:
    """transformers in the order given, and sorted by length."""
    contenders = []
    sizes = CARD_BATCHES if device == "cuda" else SORTED_BATCHES
    for batch_size, is_sorted in ((PADDED_BATCH, False), *((size, True) for size in sizes)):
        order = "sorted by length" if is_sorted else "in the order given"
        run = partial(padded_last_states, model, batch_size=batch_size, is_sorted=is_sorted)
        contenders.append(Contender(EAGER, dtype, f"padded, batch {batch_size}, {order}", run))
    return contenders


def _bfloat16_cost() -> float:
    """How many times longer torch takes to multiply matrices in bfloat16 than in float32, here."""
    import torch

    def fastest(dtype: torch.dtype) -> float:
        rows, weight = torch.ones(256, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
        times = []
        for _ in range(7):
            start = time.perf_counter()
            torch.nn.functional.linear(rows, weight)
            times.append(time.perf_counter() - start)
        return min(times)

    return fastest(torch.bfloat16) / fastest(torch.float32)


def _refuse_too_large(checkpoint: Checkpoint, device: str) -> None:
    wanted = sum(int(np.prod(info.shape)) for info in checkpoint.tensors()) * _BYTES_PER_PARAMETER
    free = {"memory": psutil.virtual_memory().available}
    if device == "cuda":
        import torch

        free["device memory"] = torch.cuda.mem_get_info()[0]
    for where, num_bytes in free.items():
        if wanted > num_bytes:
            raise InputError(
                "bench runs transformers with the whole model in memory, in float32 and in bfloat16, and it does not fit",
                expected=f"{wanted / 2**30:.1f} GiB of free {where}",
                found=f"{num_bytes / 2**30:.1f} GiB",
                fix="bench on a larger machine; verify works layer by layer and fits",
            )


def _refuse_lost(contender: Contender, items: Sequence[WorkItem], states: States) -> None:
    if states.keys() != {item.request_id for item in items}:
        raise VerificationFailed(
            f"{contender.name} ({contender.batching}) did not answer every prompt, so its time says nothing",
            expected=f"{len(items)} answers",
            found=f"{len(states)} answers",
            fix="verify the engine first: trtllm-extract verify",
        )


def _min_cosine(expected: States, found: States) -> float | None:
    if not found or any(row is None for row in found.values()):
        return None
    request_ids = list(expected)
    return float(row_cosines(np.stack([expected[i] for i in request_ids]), np.stack([found[i] for i in request_ids])).min())


def _timing(contender: Contender, seconds: list[float], lengths: list[int], min_cosine: float | None) -> Timing:
    median = statistics.median(seconds)
    return Timing(
        name=contender.name,
        dtype=contender.dtype,
        batching=contender.batching,
        tokens_per_s=sum(lengths) / median,
        prompts_per_s=len(lengths) / median,
        round_seconds=tuple(seconds),
        min_cosine=min_cosine,
    )


def _ratios(timings: Sequence[Timing]) -> dict[str, float]:
    """Our tokens/s over transformers', in the order given and sorted (the better batch size), by type; compiled; and the limit's."""
    ours, *others = timings
    eager = [timing for timing in others if timing.name == EAGER]
    ratios = {}
    for dtype in dict.fromkeys(timing.dtype for timing in eager):
        in_order, *by_length = [timing.tokens_per_s for timing in eager if timing.dtype == dtype]
        ratios[f"{dtype}_in_order"] = ours.tokens_per_s / in_order
        ratios[f"{dtype}_sorted"] = ours.tokens_per_s / max(by_length)
    names = {COMPILED: "bfloat16_compiled", LIMIT: PRODUCTS_ALONE}
    return ratios | {names[other.name]: ours.tokens_per_s / other.tokens_per_s for other in others if other.name in names}


def _machine(device: str) -> dict[str, str | int | None]:
    versions = {name: importlib.metadata.version(name) for name in ("onnxruntime", "torch", "transformers", "numpy")}
    return {
        **(_card() if device == "cuda" else {}),
        "cpu": _cpu_name(),
        "cores": usable_cores(),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "tensorrt_llm_ext": __version__,
        "commit": _commit(),
        **versions,
    }


def _card() -> dict[str, str | None]:
    import torch

    found = {"card": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return found | {"driver": subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]}
    except (OSError, subprocess.CalledProcessError, IndexError):
        return found


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str | None:
    """The commit this package runs from, with ``+`` where files differ from it; None outside a checkout."""
    run = partial(subprocess.run, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    try:
        run(["git", "ls-files", "--error-unmatch", Path(__file__).name])  # not a checkout that only surrounds us
        return run(["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
