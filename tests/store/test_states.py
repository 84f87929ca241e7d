"""The dataset of states: shards and index in groups of whole windows, resumed to the same bytes, read by safetensors alone."""

import gc
import json
import threading
import time
import weakref
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import safetensors.numpy
import xxhash
from states_folders import check_rows, filled, files_of, index_of
from store_answers import SHARD_ROWS, make_answer, make_header, make_states_header

from tensorrt_llm_ext.errors import ForeignDataset, LineageError, StoreError, TapError
from tensorrt_llm_ext.results import side_by_side
from tensorrt_llm_ext.store import SHARD_BYTES, StatesStore, VectorStore, states

NUM_TOKENS = [1 + row * 7 % 6 for row in range(200)]


@pytest.fixture
def header():
    return make_states_header()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_every_row_lies_where_the_index_says(tmp_path, fill, dtype):
    header = make_states_header(dtype)
    filled(tmp_path, header, fill)
    check_rows(tmp_path, header, range(96))
    shards = {entry["shard"] for entry in index_of(tmp_path)}
    assert len(shards) > 4, "this test needs several shards"


def test_bfloat16_stays_bfloat16(tmp_path, fill):
    header = make_states_header("bfloat16")
    filled(tmp_path, header, fill, num_windows=2)
    torch = pytest.importorskip("safetensors.torch")
    entry = index_of(tmp_path)[5]
    shard = torch.load_file(tmp_path / "states" / entry["shard"])
    rows = shard["final_pre_all"][entry["first_row"] : entry["first_row"] + entry["num_rows"]]
    assert str(rows.dtype) == "torch.bfloat16"
    assert np.array_equal(rows.float().numpy(), make_answer(header, 5)[1].states[1].rows.astype(np.float32))


@pytest.mark.parametrize("window_rows", [2, 8, 24])
def test_no_shard_is_too_large_and_a_small_one_only_ends_a_window_that_filled_others(tmp_path, header, fill, window_rows):
    filled(tmp_path, header, fill, num_windows=192 // window_rows, window_rows=window_rows)
    paths = sorted((tmp_path / "states").glob("shard-*"))
    sizes = [len(safetensors.numpy.load_file(path)["token_ids"]) for path in paths]
    assert len(sizes) > 10 and max(sizes) <= SHARD_ROWS
    for before, size in zip(sizes, sizes[1:-1]):
        assert size >= SHARD_ROWS / 2 or before > SHARD_ROWS - 6, sizes


def test_windows_larger_than_a_shard_are_published_whole(tmp_path, header, fill):
    with StatesStore.create(tmp_path, header) as store:
        for row in range(60):  # four shards' worth
            store.append(row, *make_answer(header, row))
        store._disk.wait()
        assert store.num_rows == 0 and index_of(tmp_path) == []
        store.commit(60)
        store._disk.wait()
        assert store.num_rows == 60 and store.settled_end == store.settled_rows == 60
    check_rows(tmp_path, header, range(60))


def test_the_manifest_comes_last_and_names_every_byte(tmp_path, header, fill):
    with StatesStore.create(tmp_path, header) as store:
        fill(store, range(30))
        store.flush()
        assert not (tmp_path / "states" / "manifest.json").exists()
        store.seal()
    manifest = json.loads((tmp_path / "states" / "manifest.json").read_text())
    assert manifest["contract"]["taps"] == [{"layer": 1, "norm": "pre", "rows": "all"}, {"layer": 3, "norm": "pre", "rows": "all"}]
    assert (manifest["num_sequences"], manifest["num_rows"]) == (30, sum(NUM_TOKENS[:30]))
    assert manifest["settled_rows"] == 30 and len(manifest["shards"]) > 1
    for shard in manifest["shards"]:
        for name, digest in ((shard["name"], shard["hash"]), (shard["index"], shard["index_hash"])):
            assert digest == "xxh3-128:" + xxhash.xxh3_128_hexdigest((tmp_path / "states" / name).read_bytes())
        assert (tmp_path / "states" / shard["name"]).stat().st_size == shard["bytes"]


@pytest.mark.parametrize("stop_after", [1, 2, 3, 5, 8, 11])
def test_a_dataset_that_was_stopped_and_resumed_has_the_same_files(tmp_path, header, fill, stop_after):
    expected = filled(tmp_path / "whole", header, fill)
    filled(tmp_path / "out", header, fill, num_windows=stop_after, seal=stop_after % 2 == 0)
    with StatesStore.open(tmp_path / "out", header) as store:
        assert store.settled_rows == store.settled_end == 8 * stop_after and store.num_rows == 8 * stop_after
        for start in range(8 * stop_after, 96, 8):
            fill(store, range(start, start + 8))
        store.flush()
        store.seal()
    assert files_of(tmp_path / "out") == expected


@pytest.mark.parametrize("window_rows, num_unproven", [(3, 1), (3, 60), (8, 7), (8, 30), (40, 1), (40, 60)])
def test_what_no_canary_has_proven_is_not_kept_and_what_one_has_is(tmp_path, header, fill, window_rows, num_unproven):
    expected = filled(tmp_path / "whole", header, fill, num_windows=120 // window_rows, window_rows=window_rows)
    settled = 80 // window_rows * window_rows
    with StatesStore.create(tmp_path / "out", header) as store:
        for start in range(0, settled, window_rows):
            fill(store, range(start, start + window_rows))
        for row in range(settled, settled + num_unproven):
            store.append(row, *make_answer(header, row))
        store.flush()
        assert store.num_rows == store.settled_end == settled
    check_rows(tmp_path / "out", header, range(settled))
    with StatesStore.open(tmp_path / "out", header) as store:
        for start in range(settled, 120 // window_rows * window_rows, window_rows):
            fill(store, range(start, start + window_rows))
        store.flush()
        store.seal()
    assert files_of(tmp_path / "out") == expected


def test_a_store_that_is_dropped_without_a_flush_has_whole_windows(tmp_path, header, fill):
    with StatesStore.create(tmp_path, header) as store:
        for start in range(0, 63, 7):
            fill(store, range(start, start + 7))
    with StatesStore.open(tmp_path, header) as store:
        settled = store.settled_rows
        assert 0 < settled < 63 and settled % 7 == 0 and store.num_rows == settled
        assert [row for row, *_ in store.identities()] == list(range(settled))


def test_batches_in_any_order_and_windows_with_gaps(tmp_path, header, fill):
    with StatesStore.create(tmp_path, header) as store:
        fill(store, [5, 0, 3], window_end=8)
        fill(store, [9, 8], window_end=16)
        store.commit(24)  # of a window whose rows were all refused
        store.flush()
        assert store.settled_end == 24
        assert [row for row, *_ in store.identities()] == [0, 3, 5, 8, 9]
    check_rows(tmp_path, header, [0, 3, 5, 8, 9])


def test_windows_without_a_row_are_settled_at_once(tmp_path, header):
    with StatesStore.create(tmp_path, header) as store:
        store.commit(8)
        assert store.settled_end == 8 and store.settled_rows == 0
        store.flush()
        store.seal()
    assert json.loads((tmp_path / "states" / "manifest.json").read_text())["num_sequences"] == 0


def test_a_record_that_is_not_its_work_item_s_is_not_taken(tmp_path, header):
    with StatesStore.create(tmp_path, header) as store:
        item, record = make_answer(header, 3)
        wrong = record.states[0].rows.copy()
        wrong[0, 0] += 1
        states_changed = (replace(record.states[0], rows=wrong), record.states[1])
        for broken in (
            replace(record, token_hash="sha256:0"),
            replace(record, states=states_changed),
            replace(record, states=record.states[::-1]),
            replace(record, states=tuple(replace(state, rows=state.rows[:-1]) for state in record.states)),
        ):
            with pytest.raises(LineageError):
                store.append(3, item, broken)
        for mask in (None, item.loss_mask[1:]):
            with pytest.raises(LineageError, match="no loss mask for its tokens"):
                store.append(3, replace(item, loss_mask=mask), record)
        store.commit(4)
        store.flush()
        assert store.num_rows == 0


def test_the_buffers_of_a_store_go_with_it(tmp_path, header, fill):
    gc.disable()  # they are gigabytes: not to wait for it is the point
    try:
        with StatesStore.create(tmp_path, header) as store:
            for start in range(0, 96, 8):
                fill(store, range(start, start + 8))
            store.flush()
        buffer = weakref.ref(store._open)
        del store
        assert buffer() is None
    finally:
        gc.enable()


def test_shards_that_are_written_side_by_side_make_the_same_dataset(tmp_path, header, fill, monkeypatch):
    expected = filled(tmp_path / "one by one", header, fill)
    write, both = states.write_shard, threading.Barrier(2)

    def slow_now_and_then(path, *arguments):
        if path.name.endswith(("0", "1")):
            both.wait(10)  # two shards are in writing at once, or this fails
        if path.name.endswith(("0", "2", "4")):
            time.sleep(0.05)  # the next is ready before
        return write(path, *arguments)

    monkeypatch.setattr(states, "write_shard", slow_now_and_then)
    assert filled(tmp_path / "side by side", header, fill) == expected


@pytest.mark.parametrize("num_cores", [2, 16])
@pytest.mark.parametrize("wrong", [None, 0, 41, 59])
def test_many_are_taken_at_once_as_one_by_one_up_to_the_first_that_is_refused(tmp_path, header, num_cores, wrong, monkeypatch):
    monkeypatch.setattr(side_by_side, "_threads", lru_cache(side_by_side._threads.__wrapped__))
    monkeypatch.setattr(side_by_side.os, "sched_getaffinity", lambda process: set(range(num_cores)))
    rows = range(60)  # four shards' worth
    items, records = zip(*(make_answer(header, row) for row in rows), strict=True)
    with StatesStore.create(tmp_path, header) as store:
        if wrong is None:
            store.extend(rows, items, records)
        else:
            broken = [replace(record, token_hash="sha256:0") if row >= wrong else record for row, record in enumerate(records)]
            with pytest.raises(LineageError, match=f"request '{items[wrong].request_id}'"):
                store.extend(rows, items, broken)
        store.extend([], [], [])
        store.commit(60)
        store.flush()
    if wrong != 0:
        check_rows(tmp_path, header, rows[:wrong])


def test_values_that_are_not_finite_are_not_taken_in_bfloat16_either(tmp_path):
    header = make_states_header("bfloat16")
    from tensorrt_llm_ext.results import rows_hash

    with StatesStore.create(tmp_path, header) as store:
        item, record = make_answer(header, 3)
        for value in (np.nan, np.inf, -np.inf):
            rows = record.states[0].rows.copy()
            rows[-1, -1] = value
            state = replace(record.states[0], rows=rows, payload_hash=rows_hash(rows))
            with pytest.raises(LineageError, match="not the answer to its work item") as caught:
                store.append(3, item, replace(record, states=(state, record.states[1])))
            assert "1 that are NaN or Inf" in caught.value.found


def test_a_shard_that_could_not_hold_the_longest_sequence_is_refused(tmp_path):
    with pytest.raises(StoreError, match="could not hold the longest sequence") as caught:
        StatesStore.create(tmp_path / "out", make_states_header(shard_rows=39))
    assert "--shard-mib" in caught.value.fix and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "change, name",
    [
        (lambda header: replace(header, job={**header.job, SHARD_BYTES: header.job[SHARD_BYTES] + 1}), "job.shard_bytes"),
        (lambda header: replace(header, origin=replace(header.origin, engine_fingerprint="x")), "origin.engine_fingerprint"),
    ],
)
def test_another_engine_or_another_shard_size_is_refused(tmp_path, header, fill, change, name):
    filled(tmp_path, header, fill, num_windows=1)
    with pytest.raises(ForeignDataset) as caught:
        StatesStore.open(tmp_path, change(header))
    assert name in caught.value.found


def test_folders_that_hold_something_else_are_not_touched(tmp_path, header):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ForeignDataset, match="already holds something else"):
        StatesStore.create(tmp_path, header)
    with pytest.raises(ForeignDataset, match="holds no dataset of states"):
        StatesStore.open(tmp_path, header)
    (tmp_path / "header.json").write_text('{"format": "other", "format_version": 1}')
    with pytest.raises(ForeignDataset, match="a format that this release does not read"):
        StatesStore.open(tmp_path, header)
    (tmp_path / "header.json").write_text("[]")
    with pytest.raises(ForeignDataset, match="not one of hidden states"):
        StatesStore.open(tmp_path, header)


def test_a_second_writer_is_refused(tmp_path, header):
    with StatesStore.create(tmp_path, header), pytest.raises(StoreError, match="another run is writing"):
        StatesStore.open(tmp_path, header)


def test_vectors_and_states_do_not_go_into_the_wrong_store(tmp_path):
    with pytest.raises(TapError, match="one for each request"):
        StatesStore.create(tmp_path / "out", make_header())
    with pytest.raises(TapError, match="one for each token"):
        VectorStore.create(tmp_path / "out", make_states_header())
    assert not (tmp_path / "out").exists()
