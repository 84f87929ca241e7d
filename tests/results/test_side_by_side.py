"""Threads side by side: the answers are those of one after another, an error comes out, and a forked process has its own."""

import subprocess
import sys
from functools import lru_cache

import pytest

from tensorrt_llm_ext.results import side_by_side as module

FORKED = """
import os, signal
from tensorrt_llm_ext.results.side_by_side import _threads, side_by_side
os.sched_getaffinity = lambda process: set(range(16))
assert side_by_side(abs, [-1]) == [1] and _threads() is not None
if not (child := os.fork()):
    signal.alarm(10)
    os._exit(side_by_side(abs, [-1]) != [1])
raise SystemExit(os.waitpid(child, 0)[1])
"""


@pytest.mark.parametrize("num_cores", [1, 2, 16])
def test_answers_come_in_order_and_errors_come_out(num_cores, monkeypatch):
    monkeypatch.setattr(module, "_threads", lru_cache(module._threads.__wrapped__))
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda process: set(range(num_cores)))
    assert module.side_by_side(divmod, range(100), [7] * 100) == [divmod(n, 7) for n in range(100)]
    assert (module._threads() is None) == (num_cores < 4)
    with pytest.raises(ZeroDivisionError):
        module.side_by_side(divmod, [1, 1, 1], [1, 0, 1])


def test_a_forked_process_has_threads_of_its_own():
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED], timeout=60).returncode == 0
