"""A device that is lost in the middle of a run: what was proven is kept, the rest says why, and the next run ends the same."""

import sys
import time
from pathlib import Path

import pytest
from stand_in import ILLEGAL_ADDRESS
from toy_engines import LAST, MEAN, Toy
from toy_plans import write_ours

sys.path.append(str(Path(__file__).parents[2] / "job"))  # tests import toy_jobs.py by name

from toy_jobs import LIMITS, contents_of, ledger_of, run, table_of, write_input  # noqa: E402

from tensorrt_llm_ext.errors import BackendError, SessionClosed  # noqa: E402
from tensorrt_llm_ext.recipes.contract import Profile  # noqa: E402


class Breaking:
    """A session whose device breaks right after a batch was put in flight."""

    def __init__(self, session, driver, batch):
        self._session, self._driver, self._left = session, driver, batch

    def __getattr__(self, name):
        return getattr(self._session, name)

    def submit(self, items):
        ticket = self._session.submit(items)
        if self._left == 0:
            self._driver.break_device(ILLEGAL_ADDRESS)
        self._left -= 1
        return ticket


@pytest.fixture
def plan(library, tmp_path):
    profile = Profile(LIMITS.max_num_tokens, LIMITS.max_batch_size, LIMITS.max_seq_len)
    return write_ours(tmp_path / "engine", Toy(taps=(LAST, MEAN), limits=LIMITS), facts={"profiles": (profile,)}, profiles=(profile,))


@pytest.mark.parametrize("batch", [0, 1, 6, 13])
def test_a_device_lost_mid_run_fails_what_was_not_proven_and_the_next_run_ends_with_the_same_bytes(plan, driver, tmp_path, batch):
    prompts = write_input(tmp_path / "prompts.jsonl")
    run(plan, prompts, tmp_path / "undisturbed")
    expected = contents_of(tmp_path / "undisturbed")
    driver.delay(2000)  # batches are in flight when it breaks
    started = time.monotonic()
    report = run(plan, prompts, tmp_path / "out", wrap=lambda session: Breaking(session, driver, batch))
    assert time.monotonic() - started < 30  # a batch's deadline is 600 s
    assert isinstance(report.stopped_by, (BackendError, SessionClosed)) and report.shortfall == 0
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in str(report.stopped_by) and "new process" in report.stopped_by.fix
    stored = table_of(tmp_path / "out").to_pylist()
    assert stored == expected[0][: len(stored)] and bool(stored) == (batch > 5)
    lost = [line for line in ledger_of(tmp_path / "out" / "failed.jsonl") if line["code"] != "not_finite"]
    assert lost and all("CUDA_ERROR_ILLEGAL_ADDRESS" in line["reason"] for line in lost)
    driver.reset()  # as in a new process
    resumed = run(plan, prompts, tmp_path / "out", resume=True)
    assert resumed.stopped_by is None and resumed.already_stored == len(stored)
    assert contents_of(tmp_path / "out") == expected
