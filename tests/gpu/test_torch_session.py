"""Backend torch through Session on a card: the C++ pipeline's stream and addresses, the measured convention, the canaries."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "bench")]  # imported by name

import tiny
from card_trace import batches_traced

from tensorrt_llm_ext.builder import build_engine
from tensorrt_llm_ext.fingerprint import token_hash
from tensorrt_llm_ext.recipes import Card
from tensorrt_llm_ext.results import Record, WorkItem
from tensorrt_llm_ext.runtime import Session

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA card", allow_module_level=True)

TAPS = dict.fromkeys(tiny.FAMILIES, "final@last,final@all,layer:4@all")
TAPS["qwen2"] = "final@all,layer:4@all"  # at bfloat16's tolerance the canaries of this tiny model cannot tell its last rows
CARD = Card(
    name="here",
    title="the card of this machine",
    backend="torch",
    precisions=("bfloat16", "fp8"),
    opt_num_tokens=1024,
    max_batch_size=64,
    compute_capability=".".join(map(str, torch.cuda.get_device_capability())) if torch.cuda.is_available() else None,
)


def items(num_items=40):
    rng = np.random.default_rng(0)
    sequences = [rng.integers(3, 260, size=1 + 53 * i % 200).astype(np.int32) for i in range(num_items)]
    return [WorkItem(str(i), str(i), ids, token_hash(ids)) for i, ids in enumerate(sequences)]


def answers(path):
    with Session.open(path) as session:
        records = list(session.extract(items()))
        assert all(isinstance(record, Record) for record in records), records
        session.submit_canaries().wait()
        return {record.request_id: {state.tap: state.rows.astype(np.float32) for state in record.states} for record in records}


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_records_on_the_card_are_near_those_of_backend_ort(family, tmp_path):
    checkpoint = tiny.tiny_checkpoint(tmp_path / "checkpoint", family)
    build_engine(checkpoint, tmp_path / "ort", taps=TAPS[family])
    build_engine(checkpoint, tmp_path / "torch", taps=TAPS[family], card=CARD)
    right, found = answers(tmp_path / "ort"), answers(tmp_path / "torch")
    assert right.keys() == found.keys() and len(right) == 40
    for request_id, states in right.items():
        for tap, rows in states.items():
            other = found[request_id][tap]
            assert other.shape == rows.shape
            cosines = (rows * other).sum(-1) / np.linalg.norm(rows, axis=-1) / np.linalg.norm(other, axis=-1)
            assert cosines.min() > 0.995, (request_id, tap, cosines.min())


def test_no_call_waits_for_the_card_or_asks_for_memory_between_the_first_batch_and_the_last(tmp_path):
    build_engine(tiny.tiny_checkpoint(tmp_path / "checkpoint", "llama"), tmp_path / "engine", card=CARD)
    with Session.open(tmp_path / "engine") as session:
        work = items(200)
        list(session.extract(work[:40]))
        found = batches_traced(lambda: list(session.extract(work)), 20)
    assert found["calls"] > 3 * 20  # the trace saw the launches
    assert not any(found[what] for what in found if "wait" in what or "allocate" in what or "runtime" in what), found
