"""The dataset of vectors: whole commits in input order, one engine, one writer, and nothing else in the folder."""

import dataclasses
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pytest
from store_answers import JOB, make_answer, make_header
from toy_engines import ALL, LAST

from tensorrt_llm_ext.errors import DiskFull, ForeignDataset, LineageError, StoreError, TapError
from tensorrt_llm_ext.store import VectorStore, folder, holds_dataset, open_vectors, vectors


def rows_of(folder):
    return lance.dataset(str(folder / "vectors.lance")).to_table()


def data_files(folder):
    return {path.name for path in (folder / "vectors.lance" / "data").iterdir()}


def test_a_commit_is_in_row_order_whatever_the_order_of_the_batches(tmp_path, header, fill):
    with VectorStore.create(tmp_path, header) as store:
        assert fill(store, [3, 0, 2]) == 3 and fill(store, [7, 5]) == 2
        assert store.num_rows == 5
    table = rows_of(tmp_path)
    assert table["row"].to_pylist() == [0, 2, 3, 5, 7]
    assert table["request_id"].to_pylist() == ["id 0", "id 2", "id 3", "id 5", "id 7"]
    assert table["window_end"].to_pylist() == [4, 4, 4, 8, 8]
    item, record = make_answer(header, 5)
    assert table["token_hash"][3].as_py() == item.token_hash
    assert table["final_post_last"][3].as_py() == record.states[0].rows[0].tolist()
    assert table["final_post_mean_hash"][3].as_py() == record.states[1].payload_hash


def test_a_commit_s_data_and_manifest_are_on_the_disk_when_it_is_done(tmp_path, header, fill, monkeypatch):
    synced, original = [], os.fsync
    with VectorStore.create(tmp_path, header) as store:
        before = set(store.path.rglob("*"))
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", lambda fd: (synced.append(Path(os.readlink(f"/proc/self/fd/{fd}"))), original(fd)))
            fill(store, range(3))
        made = {path for path in set(store.path.rglob("*")) - before if path.suffix in (".lance", ".manifest")}
    assert {path.suffix for path in made} == {".lance", ".manifest"}
    assert made | {path.parent for path in made} <= set(synced)


def test_what_is_not_committed_is_not_there(tmp_path, header, fill):
    with VectorStore.create(tmp_path, header) as store:
        fill(store, [0, 1])
        store.append(2, *make_answer(header, 2))
        assert rows_of(tmp_path)["row"].to_pylist() == [0, 1]
    with VectorStore.open(tmp_path, header) as store:
        assert store.num_rows == 2 and store.commit(3) == 0


def test_a_record_that_is_not_its_work_item_s_is_not_taken(tmp_path, header):
    with VectorStore.create(tmp_path, header) as store:
        item, record = make_answer(header, 0)
        with pytest.raises(LineageError):
            store.append(0, item, replace(record, token_hash="sha256:0"))
        assert store.commit(1) == 0


def test_a_reopened_dataset_says_what_is_settled_and_goes_on(tmp_path, header, fill):
    with VectorStore.create(tmp_path, header) as store:
        assert store.settled_rows == 0
        fill(store, [0, 2], window_end=4)
        num_bytes = store.num_bytes
        assert store.settled_rows == 4
    with VectorStore.open(tmp_path, header) as store:
        assert store.settled_rows == 4 and store.num_bytes == num_bytes > 0
        assert list(store.identities()) == [(row, f"id {row}", make_answer(header, row)[0].token_hash, None) for row in (0, 2)]
        fill(store, [5])
    assert rows_of(tmp_path)["row"].to_pylist() == [0, 2, 5]


def test_an_index_made_in_between_does_not_hide_what_is_settled(tmp_path, header, fill):
    with VectorStore.create(tmp_path, header) as store:
        fill(store, range(8))
    lance.dataset(str(tmp_path / "vectors.lance")).create_scalar_index("request_id", "BTREE")
    lance.dataset(str(tmp_path / "vectors.lance")).optimize.compact_files()
    with VectorStore.open(tmp_path, header) as store:
        assert store.settled_rows == 8
        fill(store, [8])
    assert rows_of(tmp_path)["row"].to_pylist() == list(range(9))


@pytest.mark.parametrize("dtype, stored", [("float32", pa.float32()), ("float16", pa.float16()), ("bfloat16", pa.float32())])
def test_values_are_stored_without_loss(tmp_path, fill, dtype, stored):
    header = make_header(dtype=dtype)
    with VectorStore.create(tmp_path, header) as store:
        fill(store, range(3))
    table = rows_of(tmp_path)
    assert table.schema.field("final_post_last").type.value_type == stored
    for row, values in enumerate(table["final_post_last"].to_pylist()):
        assert np.array_equal(np.array(values), make_answer(header, row)[1].states[0].rows[0].astype(np.float64))


def test_taps_of_many_rows_are_refused_before_anything_is_written(tmp_path):
    with pytest.raises(TapError, match="one for each token") as caught:
        VectorStore.create(tmp_path / "out", make_header(taps=(ALL,)))
    assert caught.value.found == "final@all" and not (tmp_path / "out").exists()


def test_taps_of_which_some_give_a_row_a_token_are_refused_with_a_choice(tmp_path):
    with pytest.raises(TapError, match="these taps give both") as caught:
        VectorStore.create(tmp_path / "out", make_header(taps=(LAST, ALL)))
    assert "--taps final@all" in caught.value.fix and not (tmp_path / "out").exists()


def changed_origin(header, **fields):
    return replace(header, origin=replace(header.origin, **fields))


OTHER = {
    "origin.engine_fingerprint": lambda header: changed_origin(header, engine_fingerprint="sha256:e"),
    "taps": lambda header: make_header(taps=(LAST,)),
    "job.windows.max_rows": lambda header: replace(header, job={**JOB, "windows": {"max_rows": 5}}),
    "job.policy.max_length": lambda header: replace(header, job={**JOB, "policy": {**JOB["policy"], "max_length": 3}}),
    "job.policy.prefix": lambda header: replace(header, job={**JOB, "policy": {**JOB["policy"], "prefix": "q"}}),
    "origin.tokenizer_fingerprint": lambda header: changed_origin(header, tokenizer_fingerprint="x"),
}


@pytest.mark.parametrize("name", OTHER)
def test_another_engine_or_another_condition_is_refused_with_the_difference(tmp_path, header, fill, name):
    with VectorStore.create(tmp_path, header) as store:
        fill(store, [0])
    with pytest.raises(ForeignDataset, match="rows of another engine or another way") as caught:
        VectorStore.open(tmp_path, OTHER[name](header))
    assert f"{name} = " in caught.value.expected and f"{name} = " in caught.value.found
    assert rows_of(tmp_path).num_rows == 1
    with VectorStore.open(tmp_path, header) as store:  # the lock went with the refusal
        assert store.num_rows == 1


def test_all_differences_are_said(tmp_path, header):
    VectorStore.create(tmp_path, header).close()
    with pytest.raises(ForeignDataset) as caught:
        VectorStore.open(tmp_path, replace(make_header(taps=(LAST,)), job={}))
    names = {part.split(" = ")[0] for part in caught.value.found.split("; ")}
    assert {"taps", "origin.engine_fingerprint", "job.windows.max_rows", "job.policy.max_length"} <= names


def test_a_newer_release_may_go_on(tmp_path, header):
    VectorStore.create(tmp_path, header).close()
    VectorStore.open(tmp_path, replace(header, origin=replace(header.origin, code_version="9"))).close()


def test_a_folder_that_holds_something_else_is_not_touched(tmp_path, header):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ForeignDataset, match="already holds something else") as caught:
        VectorStore.create(tmp_path, header)
    assert "thesis.tex" in caught.value.found
    with pytest.raises(ForeignDataset, match="holds no dataset"):
        VectorStore.open(tmp_path, header)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_folder_with_a_dataset_asks_for_resume(tmp_path, header):
    VectorStore.create(tmp_path, header).close()
    assert holds_dataset(tmp_path)
    with pytest.raises(ForeignDataset, match="already holds a dataset") as caught:
        VectorStore.create(tmp_path, header)
    assert "--resume" in caught.value.fix


def test_somebody_else_s_lance_dataset_is_refused(tmp_path, header):
    lance.write_dataset(pa.table({"a": [1]}), str(tmp_path / "vectors.lance"))
    with pytest.raises(ForeignDataset, match="but not one of hidden states"):
        VectorStore.open(tmp_path, header)


def test_a_folder_that_only_looks_like_a_dataset_is_refused(tmp_path, header):
    (tmp_path / "vectors.lance").mkdir()
    with pytest.raises(ForeignDataset, match="cannot be opened"):
        VectorStore.open(tmp_path, header)


def test_another_format_version_is_refused(tmp_path, header, monkeypatch):
    monkeypatch.setattr("tensorrt_llm_ext.store.header.FORMAT_VERSION", 2)
    VectorStore.create(tmp_path, header).close()
    monkeypatch.undo()
    with pytest.raises(ForeignDataset, match="a format that this release does not read"):
        VectorStore.open(tmp_path, header)


def test_a_second_writer_is_refused_while_the_first_is_there(tmp_path, header):
    with VectorStore.create(tmp_path, header):
        with pytest.raises(StoreError, match="another run is writing"):
            VectorStore.open(tmp_path, header)
    VectorStore.open(tmp_path, header).close()


def test_a_file_system_without_locks_is_said_to_be_the_trouble(tmp_path, header, monkeypatch):
    def no_locks(*args):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(folder.fcntl, "flock", no_locks)
    with pytest.raises(StoreError, match="cannot be written") as caught:
        VectorStore.create(tmp_path, header)
    assert "No locks available" in caught.value.found


def test_what_a_creation_that_died_left_behind_does_not_block_the_next(tmp_path, header):
    (tmp_path / ".part-abc" / "vectors.lance").mkdir(parents=True)
    VectorStore.create(tmp_path, header).close()
    assert [path.name for path in tmp_path.iterdir()] == ["vectors.lance"]


def test_files_of_a_commit_that_did_not_happen_are_removed_when_the_dataset_is_opened(tmp_path, header, fill):
    with VectorStore.create(tmp_path, header) as store:
        fill(store, [0])
        committed = data_files(tmp_path)
        store.append(1, *make_answer(header, 1))
        vectors.write_fragments(store._table(store._pending, 2), store._dataset, schema=store._schema)
        assert len(data_files(tmp_path)) == 2
    VectorStore.open(tmp_path, header).close()
    assert data_files(tmp_path) == committed


def test_old_versions_do_not_pile_up(tmp_path, header, fill, monkeypatch):
    monkeypatch.setattr(vectors, "_COMMITS_PER_SWEEP", 5)
    monkeypatch.setattr(vectors, "_KEPT_VERSIONS_AGE", vectors.timedelta(0))
    with VectorStore.create(tmp_path, header) as store:
        for row in range(12):
            fill(store, [row])
    assert len(list((tmp_path / "vectors.lance" / "_versions").glob("*.manifest"))) <= 5
    assert rows_of(tmp_path)["row"].to_pylist() == list(range(12))


def test_a_full_disk_keeps_the_last_commit_and_nothing_else(tmp_path, header, fill):
    with VectorStore.create(tmp_path, header) as store:
        fill(store, [0, 1])
        before = {path: path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()}
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))  # a file may not grow beyond: as on a full disk
        try:
            with pytest.raises(DiskFull, match="no space is left") as caught:
                fill(store, range(2, 200))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert "--resume" in caught.value.fix
        after = {path: path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()}
        assert after.items() <= before.items()  # old versions may have gone, nothing has come
        assert fill(store, [2]) == 1  # the store itself is still good
    assert rows_of(tmp_path)["row"].to_pylist() == [0, 1, 2]


@pytest.mark.parametrize("step", ["write_fragments", "commit", "_sync"])
@pytest.mark.parametrize("number, error", [(28, DiskFull), (122, DiskFull), (5, StoreError)])
def test_a_failure_at_any_step_of_a_commit_is_typed_and_the_rows_are_either_there_or_not(
    tmp_path, header, fill, monkeypatch, step, number, error
):
    place = {"write_fragments": vectors, "commit": lance.LanceDataset, "_sync": VectorStore}[step]

    def failing(*args, **kwargs):
        raise OSError(f"LanceError(IO): … (os error {number})") if step != "_sync" else OSError(number, "…")

    with VectorStore.create(tmp_path, header) as store:
        fill(store, [0])
        with monkeypatch.context() as patched, pytest.raises(StoreError) as caught:
            patched.setattr(place, step, failing)
            fill(store, [1])
        assert type(caught.value) is error
        assert len(data_files(tmp_path)) == 1 and store.num_rows == 1
        fill(store, [2])
    assert rows_of(tmp_path)["row"].to_pylist() == [0, 2]


def test_an_error_after_the_commit_happened_does_not_count_its_rows_as_lost(tmp_path, header, fill, monkeypatch):
    commit = lance.LanceDataset.commit

    def commits_then_fails(*args, **kwargs):
        commit(*args, **kwargs)
        raise OSError("LanceError(IO): the version hint … (os error 28)")

    with VectorStore.create(tmp_path, header) as store:
        with monkeypatch.context() as patched:
            patched.setattr(lance.LanceDataset, "commit", commits_then_fails)
            assert fill(store, [0, 1]) == 2
        assert store.num_rows == 2 and fill(store, [2]) == 1
    assert rows_of(tmp_path)["row"].to_pylist() == [0, 1, 2]


def test_a_folder_that_cannot_be_made_is_an_error_of_the_store(tmp_path, header):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be written"):
        VectorStore.create(tmp_path / "file" / "out", header)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_disk_that_is_really_full(tmp_path):
    """A file system of one megabyte, filled commit by commit, in a process and a mount of its own."""
    script = f"""
import sys; sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1] / "backends")]!r}
from pathlib import Path
from store_answers import make_answer, make_header
from tensorrt_llm_ext.errors import DiskFull
from tensorrt_llm_ext.store import VectorStore, open_vectors
header, row = make_header(), 0
store = VectorStore.create(Path({str(tmp_path)!r}) / "out", header)
try:
    while True:
        for row in range(row, row + 500):
            store.append(row, *make_answer(header, row))
        row += 1
        store.commit(row)
except DiskFull:
    store.close()
    left = VectorStore.open(Path({str(tmp_path)!r}) / "out", header)
    records = [record.request_id for record in open_vectors(Path({str(tmp_path)!r}) / "out").records()]
    assert records == [f"id {{number}}" for number in range(len(records))] and len(records) % 500 == 0
    print(left.num_rows, len(records), row)
"""
    mounted = ["unshare", "--mount", "sh", "-c", f"mount -t tmpfs -o size=1m tmpfs {tmp_path} && exec \"$@\"", "sh"]
    if subprocess.run([*mounted, "true"], capture_output=True).returncode:
        pytest.skip("this system does not let a test mount a file system")
    result = subprocess.run([*mounted, sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    num_rows, num_records, row = map(int, result.stdout.split())
    assert 0 < num_rows == num_records < row


def test_the_header_is_enough_to_read_a_dataset_alone(tmp_path, header, fill):
    with VectorStore.create(tmp_path, header) as store:
        fill(store, range(6))
    for path in (tmp_path, tmp_path / "vectors.lance"):
        opened = open_vectors(path)
        assert opened.header.origin == header.origin and opened.header.job == JOB
        assert opened.header.contract == replace(header.contract, canaries=())
        assert opened.header.contract.engine_fingerprint() == header.origin.engine_fingerprint
        assert dataclasses.asdict(opened.columns["final_post_last"])["tap"] == dataclasses.asdict(LAST)
