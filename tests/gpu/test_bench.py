"""bench of an engine for a card runs transformers on that card."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests import tiny.py by name

import tiny

from tensorrt_llm_ext.builder import build_engine
from tensorrt_llm_ext.checkpoint import open_checkpoint
from tensorrt_llm_ext.checks import bench
from tensorrt_llm_ext.fingerprint import token_hash
from tensorrt_llm_ext.recipes import Card
from tensorrt_llm_ext.results import WorkItem
from tensorrt_llm_ext.runtime import Session

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA card", allow_module_level=True)


def test_transformers_runs_on_the_engine_s_card_and_agrees(tmp_path):
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    card = Card(name="here", title="the card of this machine", backend="torch", precisions=("bfloat16",), opt_num_tokens=1024, max_batch_size=64, compute_capability=capability)  # fmt: skip
    checkpoint = tiny.tiny_checkpoint(tmp_path / "checkpoint", "llama")
    build_engine(checkpoint, tmp_path / "engine", card=card, taps="final@last")
    rng = np.random.default_rng(0)
    sequences = [rng.integers(3, 260, length).astype(np.int32) for length in (5, 40, 1, 17)]
    items = [WorkItem(str(n), str(n), ids, token_hash(ids)) for n, ids in enumerate(sequences)]
    with open_checkpoint(checkpoint) as opened, Session.open(tmp_path / "engine") as session:
        result = bench(session, opened, items, num_threads=1, num_rounds=1)
    names = ["this engine", *["transformers"] * 6, "transformers compiled", "its products alone"]
    assert [timing.name for timing in result.timings] == names and len(result.notes) == 1
    assert "padded, batch 128, sorted by length" in {timing.batching for timing in result.timings}
    assert all(timing.min_cosine > 0.99 for timing in result.timings[:-1]) and result.timings[-1].min_cosine is None
    assert {"bfloat16_compiled", "products_alone"} < result.ratios.keys()
    assert result.machine["card"] == torch.cuda.get_device_name() and result.machine["driver"]
