"""Works run side by side; what follows them comes in the order in which they were put, whatever fails."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from tensorrt_llm_ext.store import in_order
from tensorrt_llm_ext.store.in_order import InOrder


@pytest.fixture
def errors():
    return []


@pytest.fixture
def guard(errors):
    @contextmanager
    def kept():
        try:
            yield
        except BaseException as error:
            errors.append(error)

    return kept


def test_what_follows_comes_in_order_and_works_run_side_by_side(guard, errors):
    both, found = threading.Barrier(2), []

    def work(number):
        if number < 2:
            both.wait(10)  # two at once, or this fails
        time.sleep(0.02 * (number % 2 == 0))  # the next is ready before
        return number

    works = InOrder(2, guard)
    for number in range(7):
        works.put(lambda future: found.append(future.result()), lambda number=number: work(number))
        if number == 3:
            works.put(lambda future: found.append(future.result()))  # without a work
    works.wait()
    assert found == [0, 1, 2, 3, None, 4, 5, 6] and errors == []
    works.close()


def test_close_does_what_was_put(guard):
    found, works = [], InOrder(1, guard)
    works.put(lambda future: found.append(future.result()), lambda: time.sleep(0.05) or 1)
    works.close()
    assert found == [1]


def test_an_error_is_that_of_its_work_and_the_others_follow(guard, errors):
    found, works = [], InOrder(2, guard)
    for number in (1, 0, 2):
        works.put(lambda future: found.append(future.result()), lambda number=number: 2 / number)
    works.wait()
    works.close()
    assert found == [2, 1] and [type(error) for error in errors] == [ZeroDivisionError]


def test_a_thread_that_cannot_be_started_is_an_error_of_its_work(guard, errors, monkeypatch):
    class NoThreads(ThreadPoolExecutor):
        def submit(self, *arguments):
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(in_order, "ThreadPoolExecutor", NoThreads)
    works = InOrder(2, guard)
    works.put(lambda future: future.result(), lambda: 1)
    works.wait()
    works.close()
    assert [str(error) for error in errors] == ["can't start new thread"]
