"""A stand-in engine that answers in no time, for measuring what a record costs the host.

Its numbers are rows of one random table, chosen by the sum of a sequence's tokens up to the one that is read: right canaries
pass, wrong ones do not, and the gather convention is measured as on any engine. ``tokens_per_s`` makes it as slow as a card:
a batch then takes that time, waited out without the GIL, and the engine adds up how long it had nothing to do.
"""

from __future__ import annotations

import ctypes
import time
from pathlib import Path

import numpy as np

from tensorrt_llm_ext.backends import opening
from tensorrt_llm_ext.backends.torch.tensors import engine_tensors
from tensorrt_llm_ext.checkpoint.architecture import Architecture, Rope
from tensorrt_llm_ext.recipes import write_contract
from tensorrt_llm_ext.recipes.contract import Canary, CanaryState, Contract, Fingerprints, Limits, MemoryEstimate
from tensorrt_llm_ext.taps import parse_taps

SMOLLM2 = Architecture(
    family="llama",
    num_layers=30,
    hidden_size=576,
    intermediate_size=1536,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    vocab_size=49152,
    max_positions=8192,
    norm_eps=1e-5,
    rope=Rope("default", 100000.0, 8192),
    has_qkv_bias=False,
    has_o_bias=False,
    has_mlp_bias=False,
    has_qk_norm=False,
    is_tied=True,
    sliding_window=None,
)
TAPS = parse_taps("final@last", SMOLLM2.num_layers)
LIMITS = Limits(max_num_tokens=16384, max_batch_size=1024, max_seq_len=2048, max_padded_tokens=1 << 40)
_OUTPUT = TAPS[0].column(SMOLLM2.num_layers)
_NUM_ROWS = 4093  # a prime: tokens that differ by a round number do not meet


class InstantEngine:
    """See the module. Inputs and outputs are those of a torch engine."""

    def __init__(self) -> None:
        self.tokens_per_s: float | None = None
        self.reset()
        self._table = np.random.default_rng(1).standard_normal((_NUM_ROWS, SMOLLM2.hidden_size), dtype=np.float32)
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}

    def reset(self) -> None:
        """Forget what was counted: seconds of work, seconds without work between the first batch and the last, batches."""
        self.busy_s = self.idle_s = 0.0
        self.num_batches = 0
        self._ended: float | None = None

    def tensors(self):
        return engine_tensors(SMOLLM2, TAPS, "bfloat16")

    def set_shape(self, name: str, shape: tuple[int, ...]) -> None:
        self._shapes[name] = shape

    def set_address(self, name: str, address: int) -> None:
        self._addresses[name] = address

    def enqueue(self, stream: int) -> None:
        began = time.perf_counter()
        self.idle_s += began - self._ended if self._ended is not None else 0.0
        ids, lengths, last = (self._input(name) for name in ("input_ids", "sequence_lengths", "last_token_ids"))
        sums = np.concatenate([[0], np.cumsum(ids, dtype=np.int64)])
        starts = np.cumsum(lengths) - lengths
        rows = np.ctypeslib.as_array(
            ctypes.cast(self._addresses[_OUTPUT], ctypes.POINTER(ctypes.c_float)), (len(last), SMOLLM2.hidden_size)
        )
        np.take(self._table, (sums[last] - sums[starts]) % _NUM_ROWS, axis=0, out=rows, mode="clip")
        if self.tokens_per_s:
            time.sleep(max(0.0, len(ids) / self.tokens_per_s - (time.perf_counter() - began)))
        self._ended = time.perf_counter()
        self.busy_s += self._ended - began
        self.num_batches += 1

    def close(self) -> None:
        """Nothing is held."""

    def row(self, token_ids: tuple[int, ...]) -> np.ndarray:
        """What the engine answers for a sequence: float32 [1, hidden]."""
        return self._table[[sum(token_ids) % _NUM_ROWS]]

    def _input(self, name: str) -> np.ndarray:
        pointer = ctypes.cast(self._addresses[name], ctypes.POINTER(ctypes.c_int32))
        return np.ctypeslib.as_array(pointer, self._shapes[name])


ENGINE = InstantEngine()


class InstantBackend:
    """Opens the one engine of this process."""

    name = "instant"

    def runtime(self, contract: Contract) -> tuple[str, str]:
        return "numpy", np.__version__

    def open(self, path: Path, contract: Contract, *, num_threads: int | None) -> InstantEngine:
        return ENGINE


def write_instant_engine(folder: Path) -> Path:
    """Write the directory of an instant engine, and make its backend known to this process."""
    opening._BUILT_IN["instant"] = f"{__name__}:InstantBackend"
    sequences = (5, 6, 7), (900,), (41, 42)
    canaries = (
        Canary(ids, "the table", (CanaryState(TAPS[0], ENGINE.row(ids), 1e-4, 0.1, "previous row"),)) for ids in sequences
    )
    contract = Contract(
        model_name="instant",
        architecture=SMOLLM2,
        fingerprints=Fingerprints(*["sha256:none"] * 4),
        backend="instant",
        builder="bench",
        builder_version="0",
        accepted_runtime="numpy>=2",
        platform="any",
        compute_capabilities=(),
        weight_dtype="float32",
        activation_dtype="float32",
        taps=TAPS,
        tensors=ENGINE.tensors(),
        limits=LIMITS,
        memory=MemoryEstimate(0, 0, "none"),
        files=(),
        canaries=tuple(canaries),
        build={},
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_contract(folder, contract)
    return folder
