"""Faults in the middle of a run on backend torch: a device that fails or is full, and rows that are NaN."""

import json
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

sys.path.append(str(Path(__file__).parents[2] / "job"))  # tests import toy_jobs.py by name

from toy_jobs import contents_of, ledger_of, run, table_of  # noqa: E402

from tensorrt_llm_ext import job  # noqa: E402
from tensorrt_llm_ext.backends import open_engine  # noqa: E402
from tensorrt_llm_ext.backends.torch import engine as engine_module  # noqa: E402
from tensorrt_llm_ext.backends.torch import plain  # noqa: E402
from tensorrt_llm_ext.cli import main  # noqa: E402
from tensorrt_llm_ext.errors import BackendError, OutOfMemory  # noqa: E402
from tensorrt_llm_ext.job.run import _Run  # noqa: E402
from tensorrt_llm_ext.recipes import read_contract  # noqa: E402

NUM_ROWS = 60
LOST = "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported"
FULL = "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"


@pytest.fixture(scope="module")
def engine(engines):
    return engines("llama", taps="final@last", max_seq_len=64, max_num_tokens=128, opt_num_tokens=128)


@pytest.fixture
def prompts(tmp_path):
    """Rows of token ids below 200."""
    rng = np.random.default_rng(0)
    rows = [{"id": f"r{n}", "ids": rng.integers(3, 200, rng.integers(1, 30)).tolist()} for n in range(NUM_ROWS)]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def command(engine, prompts, out, *words):
    words = ["run", engine, "--input", prompts, "--out", out, "--ids-field", "ids", "--id-field", "id", *words]
    return CliRunner().invoke(main, [str(word) for word in words])


@pytest.fixture
def small_windows(monkeypatch):
    """Windows of 16 rows, so that some are committed before a fault."""
    monkeypatch.setattr(job, "window_limits", lambda limits: job.WindowLimits(max_rows=16, max_tokens=10_000))


@contextmanager
def device_failing_in_window(number, message):
    """From the first batch of this window on every pass fails, as on a lost context; canaries too."""
    embed, submit = plain.embed, _Run._submit
    begun = []

    def submit_counted(run, window):
        begun.append(window)
        submit(run, window)

    def embed_or_fail(*arguments):
        if len(begun) > number:
            raise torch.AcceleratorError(message)
        embed(*arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_Run, "_submit", submit_counted)
        patched.setattr(plain, "embed", embed_or_fail)
        yield


@pytest.mark.parametrize(
    ("window", "message", "told"),
    [
        (0, LOST, ("the device failed", "nvidia-smi", "resume the run")),
        (2, LOST, ("the device failed", "nvidia-smi", "resume the run")),
        (2, FULL, ("the device ran out of memory during a batch", "lower max_num_tokens", "resume the run")),
    ],
    ids=["lost at once", "lost", "full"],
)
def test_a_device_that_fails_ends_the_run_in_words_and_resume_ends_with_the_same_bytes(
    engine, prompts, small_windows, tmp_path, window, message, told
):
    found = message.partition("\n")[0]
    assert command(engine, prompts, tmp_path / "undisturbed").exit_code == 0
    with device_failing_in_window(window, message):
        failed = command(engine, prompts, tmp_path / "out")
    assert failed.exit_code == 1
    for words in (found, *told):
        assert words in failed.stderr, failed.stderr
    expected, (stored, _, lost) = contents_of(tmp_path / "undisturbed"), contents_of(tmp_path / "out")
    assert stored == expected[0][: len(stored)] and len(stored) % 16 == 0
    assert len(stored) == 0 if window == 0 else 16 <= len(stored) <= 16 * window  # the window before may still have been in flight
    assert lost and all(found in line["reason"] for line in lost)
    assert f"{len(stored)} + 0 + 0 + {len(lost)} = {len(stored) + len(lost)}\n" in failed.stdout
    resumed = command(engine, prompts, tmp_path / "out", "--resume")
    assert resumed.exit_code == 0 and contents_of(tmp_path / "out") == expected


def test_a_row_that_is_nan_fails_by_name_and_every_other_row_keeps_its_bytes(engine, prompts, tmp_path):
    poisoned = next(token for token in range(200, 263) if all(token not in c.token_ids for c in read_contract(engine).canaries))
    lines = [json.loads(line) for line in prompts.read_text().splitlines()]
    lines[7]["ids"][0] = poisoned
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def poison(session):
        with torch.inference_mode():
            session._pipeline._engine._decoder.embedding[poisoned] = float("nan")
        return session

    run(engine, prompts, tmp_path / "clean")
    report = run(engine, prompts, tmp_path / "out", wrap=poison)
    assert report.stopped_by is None and report.failed == {"not_finite": 1} and report.stored == NUM_ROWS - 1
    (failed,) = ledger_of(tmp_path / "out" / "failed.jsonl")
    assert failed["request_id"] == "r7" and "48 of 48 values are NaN or Inf" in failed["reason"]
    clean = [row for row in table_of(tmp_path / "clean").to_pylist() if row["request_id"] != "r7"]
    assert table_of(tmp_path / "out").to_pylist() == clean


@pytest.fixture
def streams(monkeypatch):
    """Stands in for torch's streams: of the device that stream 1 is on nothing works any more."""

    class Stream:
        def __init__(self, stream, device):
            self.is_lost = stream == 1

        def query(self):
            if self.is_lost:
                raise torch.AcceleratorError(LOST)
            return False

    monkeypatch.setattr(engine_module.torch.cuda, "ExternalStream", Stream)


def test_an_error_after_which_the_device_answers_no_more_is_the_device_s(streams):
    """Triton and cuBLASLt say it in errors of their own; the stream tells."""
    error, device = RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), torch.device("cuda")
    assert isinstance(engine_module._device_error(error, 1, device), torch.AcceleratorError)
    assert engine_module._device_error(error, 2, device) is None
    assert engine_module._device_error(error, 1, torch.device("cpu")) is None


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError(FULL),  # of a graph
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_device_that_is_full_has_not_failed(streams, error):
    device = torch.device("cuda")
    told = engine_module._failed(error, engine_module._device_error(error, 2, device))
    assert isinstance(told, OutOfMemory) and told.found == str(error).partition("\n")[0]
    assert "weights and buffers" in told.expected and "free device memory" in told.fix
    lost = engine_module._failed(error, engine_module._device_error(error, 1, device))
    assert isinstance(lost, BackendError) and "the device failed" in lost.what


def test_an_engine_whose_device_failed_closes(engine, monkeypatch):
    opened = open_engine(engine, read_contract(engine))
    emptied = []

    def empty_cache():
        emptied.append(True)
        raise torch.AcceleratorError(LOST)

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    opened._device = torch.device("cuda")
    opened.close()
    opened.close()
    assert emptied == [True]
    with pytest.raises(BackendError, match="a closed engine"):
        opened.enqueue(0)
