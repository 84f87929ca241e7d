"""Steps of the stand-in model: work items, the prompts they are upstream, and the check of what was captured."""

import numpy as np
from upstream_torch import VOCAB, AttentionMetadata, expected_rows, write_step

from tensorrt_llm_ext.fingerprint import token_hash
from tensorrt_llm_ext.recipes import Limits
from tensorrt_llm_ext.results import Record, WorkItem
from tensorrt_llm_ext.taps import Tap

LIMITS = Limits(max_num_tokens=8192, max_batch_size=64, max_seq_len=512, max_padded_tokens=64 * 512)
ALL, LAST = Tap(8, "post", "all"), Tap(8, "post", "last")
TOLERANCE = 1e-5  # the stand-in sums in another order when its rows lie elsewhere: one rounding of float32


def items(count, seed=0, prefix="request"):
    """Work items of different tokens, the first of a single one."""
    rng = np.random.default_rng(seed)
    tokens = [rng.integers(20, VOCAB, size=rng.integers(2, 20)).astype(np.int32) for _ in range(count)]
    tokens[0] = np.array([3 + seed], dtype=np.int32)
    return [WorkItem(f"{prefix}-{n}", f"row-{n}", ids, token_hash(ids)) for n, ids in enumerate(tokens)]


def step(model, prompts, generations=(), metadata=None, **arguments):
    metadata = metadata or AttentionMetadata()
    input_ids = write_step(metadata, prompts, generations)
    return model.forward(metadata, **{"input_ids": input_ids, **arguments})


def prompts_of(wanted, first_id=70):
    return [(first_id + n, item.token_ids.tolist()) for n, item in enumerate(wanted)]


def check(model, answers, wanted):
    """Every answer is its own request's record, near its own states and far from every other request's."""
    assert sorted(answer.request_id for answer in answers) == sorted(item.request_id for item in wanted) and wanted
    states = {item.request_id: expected_rows(model, item.token_ids.tolist()).numpy() for item in wanted}
    by_id = {item.request_id: item for item in wanted}
    for answer in answers:
        assert isinstance(answer, Record) and answer.token_hash == by_id[answer.request_id].token_hash
        rows = {state.tap: state.rows for state in answer.states}
        own = states[answer.request_id]
        np.testing.assert_allclose(rows[ALL], own, atol=TOLERANCE)
        np.testing.assert_array_equal(rows[LAST], rows[ALL][-1:])
        others = [rows_of[-1] for request_id, rows_of in states.items() if request_id != answer.request_id]
        assert all(np.abs(rows[LAST][0] - other).max() > 100 * TOLERANCE for other in others)
