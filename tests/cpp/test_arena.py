"""The arena: one mapping, slots with one owner, and never more than the machine has."""

import gc
import resource
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pytest
from rig import PATIENCE_S

from tensorrt_llm_ext import _runtime
from tensorrt_llm_ext.errors import BackendError, DeadlineExceeded, OutOfMemory, SessionClosed


def test_slots_lie_apart_and_aligned_in_one_mapping():
    arena = _runtime.PinnedArena(1000, 3)
    slots = [arena.acquire(0) for _ in range(3)]
    addresses = sorted(slot.address for slot in slots)
    assert np.diff(addresses).tolist() == [1024, 1024]
    assert all(address % 256 == 0 for address in addresses)
    assert arena.slot_bytes == 1024 and sorted(slot.index for slot in slots) == [0, 1, 2]
    assert arena.stats()["slots_out"] == 3
    del slots
    assert arena.stats()["slots_out"] == 0


def test_a_large_arena_is_there_before_it_is_used():
    resident = psutil.Process().memory_info().rss  # not the peak, which earlier tests may have raised
    arena = _runtime.PinnedArena(16 << 20, 4)
    assert psutil.Process().memory_info().rss - resident > 60 << 20
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    slot = arena.acquire(0)
    import ctypes

    ctypes.memset(slot.address, 1, slot.num_bytes)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults < 200  # 4,096 pages were written


def test_waiting_for_a_slot_ends_when_one_comes_home_from_another_thread():
    arena = _runtime.PinnedArena(256, 1)
    held = [arena.acquire(0)]
    threading.Timer(0.5, held.clear).start()  # long enough for a busy machine to begin waiting before it
    started = time.monotonic()
    slot = arena.acquire(PATIENCE_S)
    assert 0.05 < time.monotonic() - started < 5
    assert slot.index == 0 and arena.stats()["waited"] == 1


def test_no_slot_in_time_is_an_error_that_says_who_has_them():
    arena = _runtime.PinnedArena(256, 2)
    slots = [arena.acquire(0), arena.acquire(0)]
    with pytest.raises(DeadlineExceeded, match="no slot came free in 0.1 s") as error:
        arena.acquire(0.1)
    assert error.value.found == "2 slots out" and "wait for a ticket" in error.value.fix
    del slots


def test_closing_wakes_who_waits_for_a_slot():
    arena = _runtime.PinnedArena(256, 1)
    slot = arena.acquire(0)
    threading.Timer(0.1, arena.close).start()
    with pytest.raises(SessionClosed, match="session was closed"):
        arena.acquire(PATIENCE_S)
    del slot


def test_more_than_the_machine_has_is_an_error_with_the_numbers_and_keeps_nothing():
    before = _runtime.stats()
    with pytest.raises(OutOfMemory) as error:
        _runtime.PinnedArena(1 << 40, 8)
    assert error.value.expected == f"{8 << 40} bytes"
    free = int(error.value.found.split()[0])
    assert 0 < free < 1 << 40 and error.value.found.endswith("bytes free")
    assert _runtime.stats()["mapped_bytes"] == before["mapped_bytes"]


@pytest.mark.parametrize(("slot_bytes", "num_slots"), [(0, 1), (1, 0), (1 << 62, 4)])
def test_an_arena_of_no_size_is_refused(slot_bytes, num_slots):
    with pytest.raises(OutOfMemory, match="cannot be"):
        _runtime.PinnedArena(slot_bytes, num_slots)


def test_a_limit_of_the_process_is_an_error_and_not_a_crash():
    script = (
        "import resource\n"
        "from tensorrt_llm_ext import _runtime, errors\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "try:\n    _runtime.PinnedArena(1 << 30, 1)\n"
        "except errors.OutOfMemory as error:\n    print(error.found)\n"
    )
    answer = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=60)
    assert answer.stdout.startswith("mmap: ")


def test_a_driver_that_refuses_the_memory_leaves_nothing_mapped(stand_in):
    for call in ("cuMemHostRegister_v2", "cuMemHostGetDevicePointer_v2"):
        driver = _runtime.Driver(stand_in.path)
        stand_in.fail(call)
        before = _runtime.stats()["mapped_bytes"]
        with pytest.raises(BackendError, match=call):
            _runtime.PinnedArena(1 << 20, 2, driver)
        assert _runtime.stats()["mapped_bytes"] == before
        assert stand_in.live()["registered"] == 0
    del driver
    gc.collect()


def test_an_arena_lives_as_long_as_a_slot_of_it():
    slot = _runtime.PinnedArena(4096, 1).acquire(0)
    gc.collect()
    assert _runtime.stats()["mapped_bytes"] > 0
    del slot
    gc.collect()


@pytest.mark.parametrize("timeout_s", [-1, float("nan"), float("inf")])
def test_a_timeout_is_a_number_of_seconds(timeout_s):
    with pytest.raises(ValueError, match="timeout_s"):
        _runtime.PinnedArena(256, 1).acquire(timeout_s)


@pytest.fixture
def ctrl_c():
    """Python's own handler, which a process started in the background does not have."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_gets_through_a_wait(ctrl_c):
    arena = _runtime.PinnedArena(256, 1)
    slot = arena.acquire(0)
    timer = threading.Timer(0.2, lambda: signal.raise_signal(signal.SIGINT))
    timer.start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        arena.acquire(PATIENCE_S)
    assert time.monotonic() - started < 5
    timer.join()
    del slot


def test_slots_go_round_among_many_threads_and_none_is_lost():
    arena = _runtime.PinnedArena(256, 3)
    errors, owners = [], {}

    def work():
        try:
            for _ in range(300):
                slot = arena.acquire(PATIENCE_S)
                assert owners.setdefault(slot.index, threading.get_ident()) == threading.get_ident()
                del owners[slot.index]
                del slot
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join(60) for thread in threads]
    assert errors == []
    assert arena.stats()["slots_out"] == 0 and arena.stats()["acquired"] == 1200
