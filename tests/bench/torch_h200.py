"""Speed of backend torch on a CUDA card beside the limit and the peers: one run, one table, one JSON file.

    python tests/bench/torch_h200.py [--json FILE] [--parts limits operations peers ...] [--trace] [--vllm-python PYTHON]

Weights are random: for speed only. Each part is a sitting: its contenders are timed in every round, one after another, and
its ratios are made of the medians; the file is written after each. The limit is the model's products alone, on the rows that
the engine's own pass left. Every hand-written operation is beside what takes its place without it. The peers, transformers and,
where it is installed, vLLM, are beside ours with ids in and vectors on the host out. vLLM pins other versions of packages that
QuACK stands on: it may live in an environment of its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import machine
import torch
from card_trace import batches_traced, traced
from contenders import Contender, on_device, sitting
from our_contenders import Sizes, deterministic, end_to_end, extraction, pass_over, passes_and_products, random_engines, swiglu_apart
from operation_contenders import operations
from random_checkpoint import write_checkpoint
from torch_models import DEVICE, LLAMA_2_7B, QWEN3_8B
from transformers_peer import transformers_calls
from vllm_peer import PeerFailed, VllmPeer, is_installed

from tensorrt_llm_ext.backends.torch.engine import TorchEngine
from tensorrt_llm_ext.checkpoint.architecture import Architecture

PARTS = {
    "limits": "the Llama shape: every kind of lengths, the products alone, SwiGLU apart, and the cost of determinism",
    "operations": "each hand-written operation beside its plain twin, compiled if it can be, and attention beside the libraries'",
    "peers": "ours beside transformers, and vLLM at as many tokens a batch",
    "wide-peers": "ours in FP8 beside vLLM's at twice as many tokens a batch",
    "qwen": "the Qwen3-8B shape: lengths and products",
}
SHAPES = {"llama-2-7b": LLAMA_2_7B, "qwen3-8b": QWEN3_8B}


def main() -> None:
    arguments = _arguments()
    on, options = machine.card(arguments.commit), {"has_trace": arguments.trace, "vllm_python": arguments.vllm_python}
    for report in measured(arguments.parts, on, **options):
        if arguments.json:
            with open(arguments.json, "w") as file:
                json.dump(report, file, indent=1)
        print(*[part["name"] for part in report["sittings"]], file=sys.stderr)
    print_report(report)


def measured(
    parts: list[str],
    on: dict,
    sizes: Sizes = Sizes(),
    shapes: dict[str, Architecture] = SHAPES,
    *,
    has_trace: bool = False,
    vllm_python: str = sys.executable,
) -> Iterator[dict]:
    """Run the parts; after each the report so far: machine, batch, sittings, notes on what was left out, the traces if asked for."""
    report = {"machine": on, "batch": vars(sizes), "sittings": [], "notes": []}
    (llama, a), (qwen, b) = shapes.items()
    with torch.inference_mode():
        if {*parts} - {"qwen"} or has_trace:
            with _engines(a, sizes) as engines, tempfile.TemporaryDirectory() as folder:
                if "limits" in parts:
                    contenders = passes_and_products(engines, llama, a, sizes)
                    contenders += swiglu_apart(engines, llama, a, sizes) + deterministic(engines, llama, a, sizes)
                    report["sittings"].append(sitting("limits", contenders))
                    del contenders
                    yield report
                if "operations" in parts:
                    report["sittings"].append(sitting("operations", operations(engines["fp8"], sizes, report["notes"])))
                    yield report
                if has_trace:
                    report["trace"] = traced(pass_over(engines["fp8"], sizes.even(sizes.length), a.vocab_size))
                    many = replace(sizes, num_batches=5 * sizes.num_batches)
                    report["trace of a session"] = batches_traced(extraction(engines["fp8"], a, "fp8", many), many.num_batches)
                    yield report
                if "peers" in parts:
                    _beside_peers(report, "peers", engines, llama, a, sizes, sizes.num_tokens, Path(folder), vllm_python)
                    yield report
                if "wide-peers" in parts:
                    fp8 = {"fp8": engines["fp8"]}
                    _beside_peers(report, "wide-peers", fp8, llama, a, sizes, 2 * sizes.num_tokens, Path(folder), vllm_python)
                    yield report
        if "qwen" in parts:
            with _engines(b, sizes) as engines:
                report["sittings"].append(sitting("qwen", passes_and_products(engines, qwen, b, sizes)))
                yield report


@contextmanager
def _engines(a: Architecture, sizes: Sizes) -> Iterator[dict[str, TorchEngine]]:
    engines = random_engines(a, sizes)
    try:
        yield engines
    finally:
        for engine in engines.values():
            engine.close()
        _free()


def _beside_peers(
    report: dict, part: str, engines: dict[str, TorchEngine], name: str, a: Architecture, sizes: Sizes, num_batched_tokens: int,
    folder: Path, python: str,
) -> None:  # fmt: skip
    _free()  # vLLM takes what is there
    with _vllm(report["notes"], a, num_batched_tokens, [*engines], folder, python) as started:
        peers = _transformers(a, name, sizes) if part == "peers" else []  # compiled while the others start
        for peer in started:
            try:
                peer.wait_ready()
            except PeerFailed as error:
                report["notes"].append(f"left out: {error}")
                continue
            report["machine"]["vllm"] = peer.version
            peers.append(Contender(f"{name} {peer.name}", peer.num_tokens, peer.milliseconds))
        ours = end_to_end(engines, name, a, sizes, against=tuple(peer.name for peer in peers))
        report["sittings"].append(sitting(part, ours + peers))
    del peers
    _free()


def _transformers(a: Architecture, name: str, sizes: Sizes) -> list[Contender]:
    calls = transformers_calls(a, sizes.num_tokens // sizes.length, sizes.length)
    return [Contender(f"{name} {peer}", sizes.num_tokens, on_device(call)) for peer, call in calls.items()]


@contextmanager
def _vllm(
    notes: list[str], a: Architecture, num_batched_tokens: int, precisions: list[str], folder: Path, python: str
) -> Iterator[list[VllmPeer]]:
    """vLLM in these precisions, starting at the same time, on a checkpoint in ``folder``; none where it is not installed, with a
    note."""
    started: list[VllmPeer] = []
    if not is_installed(python):
        notes.append(f"vLLM at {num_batched_tokens:,} tokens a batch is left out: it is not installed here")
        yield started
        return
    model = folder / "model"
    if not model.exists():
        write_checkpoint(model, a)
    try:
        for precision in reversed(precisions):
            setting = {"quantization": "fp8" if precision == "fp8" else None, "max_num_batched_tokens": num_batched_tokens}
            started.append(VllmPeer(model, **setting, log=folder / f"{precision}-{num_batched_tokens}.log", python=python))
        yield started
    finally:
        for peer in started:
            peer.close()


def _free() -> None:
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


def print_report(report: dict) -> None:
    print(json.dumps(report["machine"]))
    for part in report["sittings"]:
        clocks = [clock for clock in part["clocks_mhz"] if clock is not None]
        print(f"\n{part['name']}: SM clock {min(clocks, default=None)} to {max(clocks, default=None)} MHz")
        print(f"{'what':48}{'ms':>10}{'tokens/s':>12}{'TFLOP/s':>10}")
        for row in part["rows"]:
            print(f"{row['name']:48}{row['ms']:>10}{row['tokens_per_s']:>12,}{row.get('tflops', ''):>10}")
        for name, ratio in part["ratios"].items():
            print(f"{name:88}{ratio:8.3f}")
    print("\n".join(report["notes"]))
    print(json.dumps({what: found for what, found in report.items() if what.startswith("trace")}, indent=1))


def _arguments() -> argparse.Namespace:
    parser = machine.arguments(__doc__)
    described = "; ".join(f"{name}: {what}" for name, what in PARTS.items())
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=[*PARTS], help=described)
    parser.add_argument("--trace", action="store_true", help="profile two passes, and batches through a session")
    parser.add_argument("--vllm-python", default=sys.executable, help="the interpreter of the environment that has vLLM")
    arguments = parser.parse_args()
    if shutil.which(arguments.vllm_python) is None:
        parser.error(f"--vllm-python: expected an interpreter, found no program '{arguments.vllm_python}'")
    return arguments


if __name__ == "__main__":
    main()
