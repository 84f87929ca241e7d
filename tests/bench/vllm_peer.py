"""The peer vLLM, its pooling runner on a Llama checkpoint: a process that stays up and runs a round when told to.

So its rounds lie between ours though it does not give its memory back before it ends. The two ends of the pipe::

    VllmPeer(folder, …)   in the benchmark: starts the process, waits until it is ready, asks for rounds, ends it
    python vllm_peer.py   the process: says {"ready": version}, then for every line "round" its seconds and vectors

Ids go in as Python lists and vectors come out on the host, as users see it.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import numpy as np

NUM_BATCHES, LENGTH = 8, 128
MAX_MODEL_LEN = 2048
READY_S, ROUND_S, END_S = 300.0, 120.0, 30.0
KV_BATCHES = 2
"""Batches that the key-value cache holds, which vLLM cannot do without. It is given its size: to measure what is free would
take one process after another."""


class PeerFailed(Exception):
    """The process ended, was silent for too long, or answered something else; with the last lines that it printed."""


def is_installed(python: str = sys.executable) -> bool:
    """Say whether the environment of this interpreter has vLLM."""
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    return subprocess.run([python, "-c", look]).returncode == 0


class VllmPeer:
    """One setting of vLLM in a process of its own. It starts at once; ``wait_ready`` before the first round."""

    def __init__(
        self, folder: Path, *, quantization: str | None, max_num_batched_tokens: int, log: Path, python: str = sys.executable
    ) -> None:
        self.name = f"vllm {'fp8' if quantization else 'bf16'} {max_num_batched_tokens}"
        self.num_tokens = max_num_batched_tokens
        self.version: str | None = None
        self._log = log
        words = [python, __file__, str(folder), "--max-num-batched-tokens", str(max_num_batched_tokens)]
        with open(log, "wb") as errors:
            self._process = subprocess.Popen(
                words + (["--quantization", quantization] if quantization else []),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def wait_ready(self, timeout_s: float = READY_S) -> None:
        """Wait until the model is loaded and has run a batch. Raises PeerFailed."""
        self.version = self._answer("ready", timeout_s)

    def milliseconds(self, timeout_s: float = ROUND_S) -> float:
        """Run a round now; the time of one batch of ``num_tokens``. Raises PeerFailed, also for other tokens or vectors."""
        try:
            self._process.stdin.write("round\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._failed(error) from error
        answer = self._answer("round", timeout_s)
        num_vectors = NUM_BATCHES * self.num_tokens // LENGTH
        if answer["num_vectors"] != num_vectors:
            raise self._failed(f"{answer['num_vectors']} vectors for {num_vectors} prompts")
        return answer["seconds"] / NUM_BATCHES * 1e3

    def close(self) -> None:
        """End the process: kindly, then not."""
        self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _answer(self, key: str, timeout_s: float):
        is_there, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        line = self._process.stdout.readline() if is_there else None
        if not line:
            raise self._failed("the process ended" if is_there else f"no answer within {timeout_s:.0f} s")
        try:
            return json.loads(line)[key]
        except (ValueError, KeyError, TypeError) as error:
            raise self._failed(f"answered {line!r}") from error

    def _failed(self, why: object) -> PeerFailed:
        last = self._log.read_text(errors="replace").strip().splitlines()[-15:]
        return PeerFailed("\n  ".join([f"{self.name}: {why}", *last]))


def main() -> None:
    arguments = _arguments()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the library prints: its words go to the log, and the pipe is ours
    run, version = _loaded(arguments.folder, arguments.quantization, arguments.max_num_batched_tokens)
    _say(answers, {"ready": version})
    for line in sys.stdin:
        if line.strip() != "round":
            raise SystemExit(f"expected 'round', found {line!r}")
        _say(answers, {"round": run()})


def _loaded(folder: Path, quantization: str | None, num_tokens: int) -> tuple[Callable[[], dict], str]:
    """The model, warmed up, as a function that runs a round."""
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_ENABLE_V1_MULTIPROCESSING="0")
    import vllm  # reads the environment when it is imported

    config = json.loads((folder / "config.json").read_text())
    row_bytes = 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    model = vllm.LLM(
        str(folder),
        runner="pooling",
        convert="embed",
        dtype="bfloat16",
        quantization=quantization,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=num_tokens,
        max_num_seqs=num_tokens // LENGTH,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.1,  # what must be free when it starts; the cache has its own size
        kv_cache_memory_bytes=KV_BATCHES * num_tokens * row_bytes,
    )
    ids = np.random.default_rng(0).integers(0, config["vocab_size"], (NUM_BATCHES * num_tokens // LENGTH, LENGTH))
    prompts = [{"prompt_token_ids": row.tolist()} for row in ids]
    model.embed(prompts, use_tqdm=False)  # warm-up

    def run() -> dict:
        started = time.perf_counter()
        found = model.embed(prompts, use_tqdm=False)
        return {"seconds": time.perf_counter() - started, "num_vectors": len(found)}

    return run, vllm.__version__


def _say(answers: TextIO, value: dict) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="a Hugging Face checkpoint with any tokenizer")
    parser.add_argument("--quantization", choices=("fp8",), help="bfloat16 unless given")
    parser.add_argument("--max-num-batched-tokens", type=int, default=16384)
    return parser.parse_args()


if __name__ == "__main__":
    main()
