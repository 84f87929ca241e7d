"""The one real model: SmolLM2-135M from its GGUF gives transformers' float32 states at every tap."""

import numpy as np
import pytest
import tiny

from tensorrt_llm_ext.builder import build_engine
from tensorrt_llm_ext.checkpoint import open_checkpoint
from tensorrt_llm_ext.checks.reference import reference_states
from tensorrt_llm_ext.fingerprint import token_hash
from tensorrt_llm_ext.results.record import WorkItem
from tensorrt_llm_ext.runtime import Session

TAPS = "final@last,final@mean,final@all,layer:16@mean,layer:16@last,eagle3"
TEXTS = [
    "The capital of France is",
    "Water boils at a lower temperature on a mountain because the air presses less on its surface.",
    "def add(a, b):\n    return a + b\n",
    "Yes",
    "She opened the letter, read it twice, and put it back into the drawer without a word. " * 8,
    "¿Dónde está la biblioteca? 図書館はどこですか。",
]


@pytest.fixture(scope="module")
def found_and_expected(tmp_path_factory):
    """By tap: the engine's rows and transformers', one array a text."""
    engine = tmp_path_factory.mktemp("smollm2") / "engine"
    contract = build_engine(tiny.smollm2_gguf(), engine, recipe="smollm2-135m", taps=TAPS)
    with open_checkpoint(tiny.smollm2_gguf()) as checkpoint:
        sequences = checkpoint.tokenizer().encode_batch(TEXTS, special_tokens=True)
        states = {(layer, norm): rows for layer, norm, rows in reference_states(checkpoint, sequences)}
    items = [WorkItem(str(i), str(i), ids, token_hash(ids)) for i, ids in enumerate(sequences)]
    with Session.open(engine) as session:
        records = {record.request_id: record for record in session.extract(items)}
    found, expected = {}, {}
    for number, tap in enumerate(contract.taps):
        found[tap] = [records[item.request_id].states[number].rows for item in items]
        rows = {"last": lambda s: s[-1:], "all": lambda s: s, "mean": lambda s: s.mean(0, keepdims=True, dtype=np.float64)}
        expected[tap] = [rows[tap.rows](state) for state in states[tap.layer, tap.norm]]
    return found, expected


def test_every_tap_of_every_text_equals_transformers(found_and_expected):
    found, expected = found_and_expected
    assert len(found) == 9
    for tap in expected:
        for rows, right in zip(found[tap], expected[tap], strict=True):
            assert rows.shape == right.shape
            largest = np.abs(right).max(axis=1)
            assert (np.abs(rows - right).max(axis=1) <= np.maximum(1e-3, 2e-5 * largest)).all(), tap
            product = (rows.astype(np.float64) * right).sum(axis=1)
            assert (product >= 0.999999 * np.linalg.norm(rows, axis=1) * np.linalg.norm(right, axis=1)).all(), tap


def test_texts_differ_by_more_than_the_tolerance(found_and_expected):
    found, _ = found_and_expected
    for tap, rows in found.items():
        ends = np.stack([r[-1] for r in rows])
        distances = np.abs(ends[:, None] - ends[None]).max(axis=2)[~np.eye(len(ends), dtype=bool)]
        assert distances.min() > 10 * max(1e-3, 2e-5 * np.abs(ends).max()), tap
