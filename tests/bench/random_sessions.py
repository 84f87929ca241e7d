"""Sessions over engines of random weights: the real pipeline and records. Their canaries are the engine's own answers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tensorrt_llm_ext.backends.torch.engine import TorchEngine
from tensorrt_llm_ext.fingerprint import token_hash
from tensorrt_llm_ext.recipes.contract import Canary, CanaryState, Contract
from tensorrt_llm_ext.results.record import Tokenisation, WorkItem, origin_from_contract
from tensorrt_llm_ext.runtime.convention import ConventionEvidence
from tensorrt_llm_ext.runtime.pipeline import Pipeline
from tensorrt_llm_ext.runtime.session import DEADLINE_S, NUM_SLOTS, Session

CANARY_LENGTHS = (5, 2, 9)
TOLERANCE = 0.25  # bfloat16 in another batch; random states are 1 apart


class _Lent:
    """An engine that a session may use and not close."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    def close(self) -> None:
        """Its owner closes it."""


def random_session(engine: TorchEngine, contract: Contract, tokenizer_fingerprint: str = "sha256:none") -> Session:
    """Serve ``engine`` by ``contract``, whose limits may be lower than the engine's. The engine stays its owner's to close."""
    pipeline = Pipeline(_Lent(engine), contract, num_slots=NUM_SLOTS, deadline_s=DEADLINE_S)
    has_last = any(tap.rows == "last" for tap in contract.taps)
    evidence = ConventionEvidence("prefix_sum" if has_last else "none", (), 0)
    contract = replace(
        contract,
        canaries=_canaries(pipeline, contract, evidence),
        fingerprints=replace(contract.fingerprints, tokenizer=tokenizer_fingerprint),
    )
    origin = origin_from_contract(contract, evidence.convention, Tokenisation("given"))
    return Session(pipeline, contract, evidence, origin)


def random_items(num_items: int, length: int, vocab_size: int) -> list[WorkItem]:
    """Work items of random token ids, all ``length`` long."""
    ids = np.random.default_rng(0).integers(0, vocab_size, (num_items, length), dtype=np.int32)
    return [WorkItem(str(number), str(number), row, token_hash(row)) for number, row in enumerate(ids)]


def _canaries(pipeline: Pipeline, contract: Contract, evidence: ConventionEvidence) -> tuple[Canary, ...]:
    rng = np.random.default_rng(1)
    sequences = [rng.integers(0, contract.architecture.vocab_size, length, dtype=np.int32) for length in CANARY_LENGTHS]
    found = pipeline.run(sequences, evidence.convention)
    ends = np.cumsum(CANARY_LENGTHS)

    def state(number: int, tap) -> CanaryState:
        first, end = (ends[number] - CANARY_LENGTHS[number], ends[number]) if tap.rows == "all" else (number, number + 1)
        rows = found[tap.column(contract.architecture.num_layers)][first:end].astype(np.float32)
        return CanaryState(tap, rows, TOLERANCE, 4 * TOLERANCE, "none: random weights")

    return tuple(
        Canary(tuple(map(int, ids)), "the engine itself", tuple(state(number, tap) for tap in contract.taps))
        for number, ids in enumerate(sequences)
    )
