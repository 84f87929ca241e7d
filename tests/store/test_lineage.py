"""A record is stored only when it answers its work item: each way in which it may not is named."""

from dataclasses import replace

import numpy as np
import pytest

from store_answers import make_answer
from tensorrt_llm_ext.errors import LineageError
from tensorrt_llm_ext.results import rows_hash
from tensorrt_llm_ext.store import VectorStore, check_lineage


def test_the_right_record_passes(header):
    item, record = make_answer(header, 4)
    check_lineage(record, item, header)


def changed_rows(record, change):
    state = record.states[1]
    rows = change(state.rows.copy())
    return replace(record, states=(record.states[0], replace(state, rows=rows, payload_hash=rows_hash(rows))))


def flipped(record):
    rows = record.states[0].rows.copy()
    rows.view(np.uint32)[0, 7] ^= 1  # one bit
    return replace(record, states=(replace(record.states[0], rows=rows), record.states[1]))


WRONG = {
    "request_id": lambda record: replace(record, request_id="id 5"),
    "work_item_id": lambda record: replace(record, work_item_id="file#5"),
    "token_hash": lambda record: replace(record, token_hash="sha256:0"),
    "num_tokens": lambda record: replace(record, num_tokens=4),
    "truncated_from": lambda record: replace(record, truncated_from=None),
    "engine_fingerprint": lambda record: replace(record, origin=replace(record.origin, engine_fingerprint="sha256:e")),
    "convention": lambda record: replace(record, origin=replace(record.origin, convention="index")),
    "tokenizer_fingerprint": lambda record: replace(record, origin=replace(record.origin, tokenizer_fingerprint="x")),
    "taps": lambda record: replace(record, states=record.states[::-1]),
    "taps [": lambda record: replace(record, states=record.states[:1]),
    "final_post_mean ('float32', (1, 24))": lambda record: changed_rows(record, lambda rows: rows.astype(np.float64)),
    "final_post_mean ('float32', (1, 24)) ": lambda record: changed_rows(record, lambda rows: rows[:, :-1]),
    "final_post_mean finite values": lambda record: changed_rows(record, lambda rows: rows + np.float32(np.inf)),
    "final_post_last_hash": flipped,
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(header, name):
    item, record = make_answer(header, 4)
    with pytest.raises(LineageError, match="request 'id 4' is not the answer") as caught:
        check_lineage(WRONG[name](record), item, header)
    assert caught.value.expected.startswith(name.strip())


@pytest.mark.parametrize("name", WRONG)
def test_one_wrong_record_among_many_is_named_and_none_is_taken(header, tmp_path, name):
    items, records = map(list, zip(*(make_answer(header, row) for row in range(9)), strict=True))
    with VectorStore.create(tmp_path / "right", header) as store:
        store.extend(range(9), items, records)
        assert store.commit(9) == 9
    records[4] = WRONG[name](records[4])
    with VectorStore.create(tmp_path / "wrong", header) as store:
        with pytest.raises(LineageError, match="request 'id 4' is not the answer") as caught:
            store.extend(range(9), items, records)
        assert caught.value.expected.startswith(name.strip())
        assert store.commit(9) == 0


def test_everything_that_is_wrong_is_named_at_once(header):
    item, record = make_answer(header, 4)
    with pytest.raises(LineageError) as caught:
        check_lineage(replace(flipped(record), request_id="x", num_tokens=1), item, header)
    assert [part.split(" ")[0] for part in caught.value.found.split("; ")] == [
        "request_id",
        "num_tokens",
        "final_post_last_hash",
    ]


def test_a_newer_release_may_go_on(header, tmp_path):
    item, record = make_answer(header, 4)
    newer = replace(record, origin=replace(record.origin, code_version="9.0"))
    check_lineage(newer, item, header)
    with VectorStore.create(tmp_path, header) as store:
        store.extend([4], [item], [newer])
        assert store.commit(5) == 1
