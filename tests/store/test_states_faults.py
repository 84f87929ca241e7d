"""What breaks while states are written, and what is found broken when a run goes on: nothing half written counts, and nobody waits."""

import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from states_folders import check_rows, filled, files_of
from store_answers import make_answer, make_states_header

from tensorrt_llm_ext.errors import DiskFull, StoreError
from tensorrt_llm_ext.store import StatesStore, in_order, states


@pytest.fixture
def header():
    return make_states_header()


def test_rows_of_a_commit_that_broke_off_are_not_settled(tmp_path, header, fill, monkeypatch):
    with StatesStore.create(tmp_path, header) as store:
        fill(store, range(4))
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            for row in range(4, 24):  # the rest of one shard, and a part of the next
                store.append(row, *make_answer(header, row))
            patched.setattr(store, "_close_shard", raise_interrupt)
            store.commit(24)
        store.flush()
        assert store.settled_rows == store.settled_end == store.num_rows == 4
    check_rows(tmp_path, header, range(4))


def raise_interrupt():
    raise KeyboardInterrupt


def test_a_thread_that_cannot_be_started_is_an_error_and_nothing_is_published(tmp_path, header, fill, monkeypatch):
    class NoThreads(ThreadPoolExecutor):
        def submit(self, *arguments):
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(in_order, "ThreadPoolExecutor", NoThreads)
    with StatesStore.create(tmp_path, header) as store, pytest.raises(RuntimeError, match="can't start"):
        for start in range(0, 96, 8):
            fill(store, range(start, start + 8))
        store.flush()
    assert not list((tmp_path / "states").glob("*shard-*"))


def test_a_disk_that_lets_nothing_go_is_an_error_and_nobody_waits(tmp_path, header, fill, monkeypatch):
    def refused(self, **options):
        raise OSError(30, "read-only")

    with StatesStore.create(tmp_path, header) as store:
        with monkeypatch.context() as patched, pytest.raises(StoreError, match="read-only"):
            patched.setattr(states, "write_part", lambda *_, **__: refused(None))
            patched.setattr(Path, "unlink", refused)
            for start in range(0, 96, 8):
                fill(store, range(start, start + 8))
            store.flush()
    with StatesStore.open(tmp_path, header) as store:
        assert store.num_rows == 0 and not list((tmp_path / "states").glob("*shard-*"))


def test_what_is_written_beside_a_shard_that_fails_is_not_published(tmp_path, header, fill, monkeypatch):
    write, is_written = states.write_shard, threading.Event()

    def failing(path, *arguments):
        if path.name.endswith("0"):
            assert is_written.wait(10)
            raise OSError(5, "a broken disk")
        file = write(path, *arguments)
        is_written.set()
        return file

    with StatesStore.create(tmp_path, header) as store:
        fill(store, range(4))
        store.flush()
        before = files_of(tmp_path)
        monkeypatch.setattr(states, "write_shard", failing)
        with pytest.raises(StoreError, match="a broken disk"):
            for start in range(4, 100, 8):
                fill(store, range(start, start + 8))
            store.flush()
    assert is_written.is_set() and files_of(tmp_path) == before


@pytest.mark.parametrize("step", ["write_shard", "write_part", "publish_part"])
@pytest.mark.parametrize(
    "raised, error, place",
    [
        (OSError(28, "…"), DiskFull, 0),
        (OSError(28, "…"), DiskFull, 2),
        (OSError(5, "…"), StoreError, 1),
        (RuntimeError("a defect"), RuntimeError, 1),  # of the thread that writes: nobody waits for it for ever
    ],
)
def test_a_failure_while_a_shard_is_written_keeps_what_was_published(
    tmp_path, header, fill, monkeypatch, step, raised, error, place
):
    expected = filled(tmp_path / "whole", header, fill)
    original, calls = getattr(states, step), iter(range(100))

    def failing(*args, **kwargs):
        if next(calls) >= place:
            raise raised
        return original(*args, **kwargs)

    with monkeypatch.context() as patched, StatesStore.create(tmp_path / "out", header) as store:
        patched.setattr(states, step, failing)
        with pytest.raises((StoreError, RuntimeError)) as caught:
            for start in range(0, 96, 8):
                fill(store, range(start, start + 8))
            store.flush()
        assert type(caught.value) is error
        settled, num_rows = store.settled_end, store.num_rows
        assert settled == num_rows and (settled == 0 or place > 0)
    with StatesStore.open(tmp_path / "out", header) as store:
        assert store.settled_rows == settled and store.num_rows == num_rows
        for start in range(settled, 96, 8):
            fill(store, range(start, start + 8))
        store.flush()
        store.seal()
    assert files_of(tmp_path / "out") == expected


def test_a_disk_that_takes_no_more_is_full_and_nothing_half_written_is_left(tmp_path, header, fill):
    with StatesStore.create(tmp_path, header) as store:
        fill(store, range(8))
        store.flush()
        before = files_of(tmp_path)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        try:
            with pytest.raises(DiskFull):
                fill(store, range(8, 40))
                store.flush()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert files_of(tmp_path) == before


def test_a_shard_that_is_short_or_gone_is_refused_when_the_run_goes_on(tmp_path, header, fill):
    filled(tmp_path, header, fill)
    path = sorted((tmp_path / "states").glob("shard-*"))[1]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StoreError, match="is damaged"):
        StatesStore.open(tmp_path, header)
    path.unlink()
    with pytest.raises(StoreError, match="is damaged") as caught:
        StatesStore.open(tmp_path, header)
    assert caught.value.found == "no such file"


def test_an_index_with_a_gap_or_a_damaged_part_is_refused(tmp_path, header, fill):
    filled(tmp_path, header, fill)
    part = tmp_path / "states" / "index" / "000001.parquet"
    content = part.read_bytes()
    part.unlink()
    with pytest.raises(StoreError, match="has gaps"):
        StatesStore.open(tmp_path, header)
    part.write_bytes(content[:-20])
    with pytest.raises(StoreError, match="000001.parquet' is damaged"):
        StatesStore.open(tmp_path, header)
