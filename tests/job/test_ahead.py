"""Reading ahead changes nothing but the time."""

import threading
import time

import pytest

from tensorrt_llm_ext.errors import InputError
from tensorrt_llm_ext.job.ahead import Ahead


def wait_until(condition, timeout_s=5.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def test_results_come_in_order_and_then_the_end():
    with Ahead(iter(range(100)), 3, threading.Event()) as ahead:
        assert list(ahead) == list(range(100))


def test_no_more_than_the_depth_is_read_ahead():
    read = []
    source = (read.append(number) or number for number in range(100))
    with Ahead(source, 3, threading.Event()) as ahead:
        wait_until(lambda: len(read) == 4)  # three wait, one is in hand
        time.sleep(0.05)
        assert len(read) == 4
        assert next(iter(ahead)) == 0
        wait_until(lambda: len(read) == 5)


def test_an_error_comes_after_the_results_before_it():
    def source():
        yield 1
        raise InputError("broken", expected="more", found="less", fix="again")

    got = []
    with Ahead(source(), 3, threading.Event()) as ahead, pytest.raises(InputError, match="broken"):
        got.extend(ahead)
    with Ahead(source(), 3, threading.Event()) as ahead, pytest.raises(InputError):
        for result in ahead:
            got.append(result)
    assert got[-1] == 1


def test_leaving_ends_the_thread():
    def threads():
        return [thread for thread in threading.enumerate() if thread.name == "read ahead"]

    before = len(threads())
    with Ahead(iter(range(100)), 1, threading.Event()):
        assert len(threads()) == before + 1
    assert len(threads()) == before


def test_a_stop_ends_the_iterating_while_the_source_waits():
    stop, gate = threading.Event(), threading.Event()

    def source():
        yield 1
        gate.wait()

    with Ahead(source(), 3, stop) as ahead:
        results = iter(ahead)
        assert next(results) == 1
        threading.Timer(0.05, stop.set).start()
        began = time.monotonic()
        assert list(results) == [] and time.monotonic() - began < 5
    gate.set()
