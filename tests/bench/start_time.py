"""Seconds from nothing to an open engine of backend torch: Llama-2-7B's shape, random weights that lie in the page cache.

    python tests/bench/start_time.py FOLDER [--precision fp8|bfloat16] [--json FILE]

FOLDER takes the checkpoint, 13.5 GB. Every start is a process of its own, from the interpreter to the engine that takes a batch;
what a session measures and proves then is left out: random weights have no canaries. The first start finds no compiled kernel
and no trial of an algorithm that an earlier one kept, the second finds those of the first. One start of each: seconds, not shares.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import machine
from random_checkpoint import write_checkpoint
from torch_models import LLAMA_2_7B, contract_of

from tensorrt_llm_ext.backends.torch import engine as engine_module
from tensorrt_llm_ext.builder.torch_engine import write_torch_engine
from tensorrt_llm_ext.checkpoint import open_checkpoint
from tensorrt_llm_ext.checkpoint.architecture import Architecture
from tensorrt_llm_ext.recipes import BuildSettings
from tensorrt_llm_ext.recipes.contract import Contract, Limits

STARTS = ("first", "second")
LIMITS = Limits(16384, 1024, 2048, 1 << 40)


def main() -> None:
    arguments = _arguments()
    if arguments.open:
        print(json.dumps(opened(arguments.folder, arguments.precision)), flush=True)
        return
    report = {"machine": machine.card(arguments.commit), **measured(arguments.folder, arguments.precision)}
    print(json.dumps(report, indent=1))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report, indent=1))


def measured(folder: Path, precision: str, a: Architecture = LLAMA_2_7B) -> dict:
    """Write an engine's folder, and start it twice."""
    folder.mkdir(parents=True, exist_ok=True)
    engine = Path(tempfile.mkdtemp(prefix=f"{precision}-", dir=folder))
    settings, checkpoint_folder = _settings(contract(a, precision)), folder / "checkpoint"
    if not checkpoint_folder.exists():
        write_checkpoint(checkpoint_folder, a)
    with open_checkpoint(checkpoint_folder) as checkpoint:
        write_torch_engine(checkpoint, engine, settings)
    with tempfile.TemporaryDirectory() as caches:
        environment = os.environ | {"XDG_CACHE_HOME": caches, "TRITON_CACHE_DIR": f"{caches}/triton"}
        environment.pop("QUACK_CACHE_DIR", None)
        return {"precision": precision, "starts": {start: _started(engine, precision, environment) for start in STARTS}}


def opened(engine: Path, precision: str, a: Architecture = LLAMA_2_7B) -> dict[str, float]:
    """Open the engine here: the seconds that its weights took, and all the rest."""
    spent = {}

    def timed(*arguments, **options):
        start = time.perf_counter()
        decoder = load_decoder(*arguments, **options)
        spent["weights"] = time.perf_counter() - start
        return decoder

    load_decoder = engine_module.load_decoder
    start = time.perf_counter()
    with mock.patch.object(engine_module, "load_decoder", timed):
        opened_engine = engine_module.TorchBackend().open(engine, contract(a, precision), num_threads=None)
    seconds = time.perf_counter() - start
    opened_engine.close()
    return {**spent, "the rest of opening": seconds - spent["weights"]}


def contract(a: Architecture, precision: str) -> Contract:
    return contract_of(a, taps="final@last", precision=precision, limits=LIMITS)


def _started(engine: Path, precision: str, environment: dict[str, str]) -> dict[str, float]:
    command = [sys.executable, __file__, str(engine), "--precision", precision, "--open"]
    start = time.perf_counter()
    child = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    seconds, found = time.perf_counter() - start, json.loads(child.stdout.splitlines()[-1])
    return {"all": seconds, "interpreter and imports": seconds - sum(found.values()), **found}  # and the end of the process


def _settings(contract: Contract) -> BuildSettings:
    """Every product in FP8: what it does to random weights is not asked."""
    kept = () if contract.activation_dtype == "fp8" else None
    where = "torch", contract.platform, contract.compute_capabilities
    return BuildSettings(contract.taps, contract.activation_dtype, contract.limits, *where, fp8_kept=kept)


def _arguments() -> argparse.Namespace:
    parser = machine.arguments(__doc__)
    parser.add_argument("folder", type=Path, help="where checkpoint and engine are written")
    parser.add_argument("--precision", choices=["fp8", "bfloat16"], default="fp8")
    parser.add_argument("--open", action="store_true", help="open the engine that is FOLDER, and say how long that took")
    return parser.parse_args()


if __name__ == "__main__":
    main()
