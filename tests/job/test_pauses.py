"""Pauses: put off while a run lasts, and nothing of it stays."""

import gc
import sys
import weakref

import pytest

from tensorrt_llm_ext.job.pauses import without_pauses


@pytest.fixture(autouse=True)
def nothing_set_aside():
    """As a program has it; the tests set aside what they import."""
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


def interpreter():
    return sys.getswitchinterval(), gc.get_threshold(), gc.get_freeze_count()


@pytest.mark.parametrize("first_to_end", [0, 1])
def test_runs_that_overlap_leave_the_interpreter_as_the_first_found_it(first_to_end):
    before = interpreter()
    runs = [without_pauses(), without_pauses()]
    for run in runs:
        run.__enter__()
    runs.pop(first_to_end).__exit__(None, None, None)
    turn, thresholds, num_frozen = interpreter()
    assert turn < before[0] / 10 and thresholds[0] > 3 * before[1][0] and thresholds[1:] == before[1][1:] and num_frozen > 0
    runs.pop().__exit__(None, None, None)
    assert interpreter() == before


class Engine:
    """Something large that is in a cycle with itself, as models are."""

    def __init__(self):
        self.itself = self


def test_what_was_garbage_before_a_run_does_not_keep_its_memory_until_its_end():
    gc.disable()
    try:
        gone = weakref.ref(Engine())
        assert gone() is not None
        with without_pauses():
            assert gone() is None
    finally:
        gc.enable()


def test_objects_that_somebody_else_has_set_aside_stay_there():
    gc.freeze()
    try:
        with without_pauses():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("own", [(0, 10, 10), (50_000, 5, 5)])
def test_a_program_that_collects_less_often_or_never_is_left_alone(own):
    before = gc.get_threshold()
    gc.set_threshold(*own)
    try:
        with without_pauses():
            assert gc.get_threshold() == own
        assert gc.get_threshold() == own
    finally:
        gc.set_threshold(*before)
