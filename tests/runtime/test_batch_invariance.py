"""The batch is invisible on real decoders: alone, among others, anywhere in the order, twice: the same states."""

import numpy as np
import pytest
import tiny
import torch

from tensorrt_llm_ext.builder import build_engine
from tensorrt_llm_ext.fingerprint import token_hash
from tensorrt_llm_ext.results import Failure, WorkItem
from tensorrt_llm_ext.runtime import Session

TAPS = "final@last,layer:3@mean,layer:5@all"
NUM_ITEMS = 64

TOLERANCE = 5e-6
"""Largest difference relative to a row's largest magnitude. float32 sums may be ordered otherwise in another batch: on
the tiny models that moved means by 3.2e-7 and other rows not at all. Deeper sums on another machine may move more."""

POISON_TOKEN = 2  # <pad>: no prompt and no canary holds it


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def session(request, tmp_path_factory):
    """A tiny engine whose POISON_TOKEN turns its sequence to NaN inside the model."""
    folder = tmp_path_factory.mktemp(request.param)
    model = tiny.tiny_model(request.param)
    with torch.no_grad():
        model.model.embed_tokens.weight[POISON_TOKEN] = torch.nan
    model.save_pretrained(folder / "checkpoint")
    tiny.byte_tokenizer().save_pretrained(folder / "checkpoint")
    limits = dict(max_seq_len=128, max_num_tokens=4096, max_padded_tokens=4096)
    build_engine(folder / "checkpoint", folder / "engine", taps=TAPS, **limits)
    with Session.open(folder / "engine", num_threads=2) as session:
        yield session
    assert session.stats()["cross_request"] == 0


def item_of(request_id, token_ids):
    token_ids = np.asarray(token_ids, dtype=np.int32)
    return WorkItem(request_id, request_id, token_ids, token_hash(token_ids))


@pytest.fixture(scope="module")
def items():
    rng = np.random.default_rng(7)
    lengths = [1, 1, 2, 60, *rng.integers(1, 50, size=NUM_ITEMS - 4).tolist()]
    return [item_of(str(i), rng.integers(3, 259, size=length)) for i, length in enumerate(lengths)]


@pytest.fixture(scope="module")
def together(session, items):
    return answers_by_id(session.submit(items))


def answers_by_id(ticket):
    return {answer.request_id: answer for answer in ticket.wait()}


def distances(one, other):
    """Per tap: the largest difference, relative to each row's largest magnitude."""
    pairs = [(left.rows, right.rows) for left, right in zip(one.states, other.states, strict=True)]
    assert len(pairs) == 3
    return [float((np.abs(a - b) / np.abs(b).max(axis=1, keepdims=True)).max()) for a, b in pairs]


def bytes_of(record):
    return [state.rows.tobytes() for state in record.states]


def test_a_sequence_alone_is_what_it_is_among_64(session, items, together):
    alone = [answers_by_id(session.submit([item]))[item.request_id] for item in items]
    largest = np.max([distances(record, together[record.request_id]) for record in alone], axis=0)
    assert len(alone) == NUM_ITEMS and largest.max() <= TOLERANCE


def test_the_order_of_a_batch_does_not_matter(session, items, together):
    order = np.random.default_rng(1).permutation(NUM_ITEMS)
    reordered = answers_by_id(session.submit([items[i] for i in order]))
    assert max(max(distances(reordered[name], together[name])) for name in together) <= TOLERANCE


def test_formed_batches_answer_every_item_with_its_own_states(session, items, together):
    extracted = {answer.request_id: answer for answer in session.extract(items)}
    assert extracted.keys() == together.keys()
    assert max(max(distances(extracted[name], together[name])) for name in together) <= TOLERANCE


def test_different_requests_differ_by_far_more_than_the_tolerance(items, together):
    same_length = {}
    for item in items:
        same_length.setdefault(len(item.token_ids), []).append(together[item.request_id])
    pairs = [(a, b) for records in same_length.values() for a, b in zip(records, records[1:])]
    assert len(pairs) > 10
    assert min(min(distances(a, b)) for a, b in pairs) > 1000 * TOLERANCE


def test_the_same_batch_twice_gives_the_same_bytes(session, items, together):
    again = answers_by_id(session.submit(items))
    assert all(bytes_of(again[name]) == bytes_of(together[name]) for name in together)


def test_a_sequence_twice_in_one_batch_gives_the_same_states_twice(session, items, together):
    twins = [item_of("twin", items[3].token_ids), *items[:-1]]
    answers = answers_by_id(session.submit(twins))
    assert max(distances(answers["twin"], answers["3"])) <= TOLERANCE


@pytest.mark.parametrize("place", [0, 3, NUM_ITEMS - 1], ids=["first", "longest", "last"])
@pytest.mark.parametrize("position", [0, -1], ids=["first token", "last token"])
def test_a_sequence_that_turns_nan_leaves_every_other_row_bit_unchanged(session, items, together, place, position):
    ids = items[place].token_ids.copy()
    ids[position] = POISON_TOKEN
    answers = session.submit([*items[:place], item_of("poisoned", ids), *items[place + 1 :]]).wait()
    failed = [answer for answer in answers if isinstance(answer, Failure)]
    assert [(failure.request_id, failure.code) for failure in failed] == [("poisoned", "not_finite")]
    others = [answer for answer in answers if not isinstance(answer, Failure)]
    assert len(others) == NUM_ITEMS - 1
    assert all(bytes_of(record) == bytes_of(together[record.request_id]) for record in others)
