"""A record is stored only when it answers its work item: each way in which it may not is named."""

from dataclasses import replace

import numpy as np
import pytest

from store_answers import make_answer
from tensorrt_llm_ext.errors import LineageError
from tensorrt_llm_ext.results import Records, row_hashes, rows_hash
from tensorrt_llm_ext.store import VectorStore, check_lineage, open_vectors


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
    records[4] = WRONG[name](records[4])
    with VectorStore.create(tmp_path, header) as store:
        with pytest.raises(LineageError, match="request 'id 4' is not the answer") as caught:
            store.extend(range(9), items, records)
        assert caught.value.expected.startswith(name.strip())
        assert store.commit(9) == 0


def other(records, **changed):
    return replace(records, **changed)


def other_states(records, **changed):
    return replace(records, states=(replace(records.states[0], **changed), records.states[1]))


def with_a_flipped_bit(records):
    rows = records.states[0].rows.copy()
    rows.view(np.uint32)[4, 7] ^= 1
    return other_states(records, rows=rows)


def with_infinity(records):
    rows = records.states[0].rows.copy()
    rows[4, 7] = np.inf
    return other_states(records, rows=rows, payload_hashes=row_hashes(rows))


WRONG_COLUMNS = {
    "request_id": lambda records: other(records, request_ids=[*records.request_ids[:4], "x", *records.request_ids[5:]]),
    "work_item_id": lambda records: other(records, work_item_ids=records.work_item_ids[::-1]),
    "token_hash": lambda records: other(records, token_hashes=records.token_hashes[::-1]),
    "num_tokens": lambda records: other(records, num_tokens=[3] * 8 + [4]),
    "truncated_from": lambda records: other(records, truncated_from=[None] * 9),
    "engine_fingerprint": lambda records: other(records, origin=replace(records.origin, engine_fingerprint="sha256:e")),
    "taps": lambda records: other(records, states=records.states[::-1]),
    "final_post_last (": lambda records: other_states(records, rows=records.states[0].rows.astype(np.float64)),
    "final_post_last ( ": lambda records: other_states(records, rows=records.states[0].rows[:, :-1]),
    "final_post_last_hash": with_a_flipped_bit,
    "final_post_last finite values": with_infinity,
}


@pytest.mark.parametrize("name", WRONG_COLUMNS)
def test_what_is_wrong_in_columns_is_named_and_none_is_taken(header, tmp_path, name):
    items, records = map(list, zip(*(make_answer(header, row) for row in range(9)), strict=True))
    with VectorStore.create(tmp_path / "wrong", header) as store:
        with pytest.raises(LineageError) as caught:
            store.extend(range(9), items, WRONG_COLUMNS[name](Records.of(records)))
        assert caught.value.expected.startswith(name.strip().replace("(", "('float32', (1, 24))"))
        assert store.commit(9) == 0


def test_rows_are_stored_in_their_order_however_they_came(header, tmp_path):
    items, records = map(list, zip(*(make_answer(header, row) for row in range(9)), strict=True))
    with VectorStore.create(tmp_path / "one by one", header) as store:
        for row in (8, 0, 3, 2, 1, 7, 4, 6, 5):
            store.append(row, items[row], records[row])
        assert store.commit(9) == 9
    with VectorStore.create(tmp_path / "columns", header) as store:
        for rows in ((6, 2, 8), (0, 1), (7, 5, 4, 3)):
            store.extend(rows, [items[row] for row in rows], Records.of([records[row] for row in rows]))
        assert store.commit(9) == 9
    stored = [open_vectors(tmp_path / name).records() for name in ("one by one", "columns")]
    for row, (single, column) in enumerate(zip(*stored, strict=True)):
        assert repr(single) == repr(column) and single.request_id == f"id {row}"


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
