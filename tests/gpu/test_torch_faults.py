"""Faults on a card: a kernel that traps in the middle of a run, and memory that runs out at load. A trap ends its process's context."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import lance
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests import tiny.py by name

import tiny

from tensorrt_llm_ext.backends import open_engine
from tensorrt_llm_ext.builder import build_engine
from tensorrt_llm_ext.errors import OutOfMemory
from tensorrt_llm_ext.recipes import Card, read_contract

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA card", allow_module_level=True)

CARD = Card(
    name="here",
    title="the card of this machine",
    backend="torch",
    precisions=("bfloat16", "fp8"),
    opt_num_tokens=128,
    max_batch_size=16,
    compute_capability=".".join(map(str, torch.cuda.get_device_capability())),
)
ROOT = Path(__file__).parents[2]

RUN = """
import sys
import torch
from tensorrt_llm_ext.backends.torch.engine import TorchEngine
from tensorrt_llm_ext.cli import main
from tensorrt_llm_ext.job.run import _Run

trapping_window, num_windows = int(sys.argv.pop(1)), 0
forward, submit = TorchEngine._forward, _Run._submit

def submit_counted(run, window):
    global num_windows
    num_windows += 1
    submit(run, window)

def forward_or_trap(engine, batch):
    if num_windows == trapping_window:
        torch._assert_async(torch.zeros(1, device="cuda"))
    forward(engine, batch)

TorchEngine._forward, _Run._submit = forward_or_trap, submit_counted
main()
"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    checkpoint = tiny.tiny_checkpoint(folder / "checkpoint", "llama")
    build_engine(checkpoint, folder / "engine", taps="final@last", card=CARD, max_seq_len=64, max_num_tokens=128)
    return folder / "engine"


def command(engine, prompts, out, *words, trapping_window=-1):
    """``run`` in a process of its own, which traps in every batch of a window."""
    words = [trapping_window, "run", engine, "--input", prompts, "--out", out, *words]
    return subprocess.run([sys.executable, "-c", RUN, *map(str, words)], capture_output=True, text=True, timeout=240, cwd=ROOT)


def table(out):
    return lance.dataset(str(out / "vectors.lance")).to_table().to_pylist()


def test_a_kernel_that_traps_mid_run_ends_it_in_words_and_resume_ends_with_the_same_bytes(engine, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"text": f"prompt {n} of several windows"}) + "\n" for n in range(800)))
    undisturbed = command(engine, prompts, tmp_path / "undisturbed")
    assert undisturbed.returncode == 0, undisturbed.stderr
    failed = command(engine, prompts, tmp_path / "out", trapping_window=5)
    assert failed.returncode == 1, (failed.returncode, failed.stderr[-4000:])
    assert "the device failed" in failed.stderr and "resume" in failed.stderr, failed.stderr[-4000:]
    assert "assert" in failed.stderr.lower()  # CUDA_ERROR_ASSERT, or torch's words for it
    stored, expected = table(tmp_path / "out"), table(tmp_path / "undisturbed")
    assert 0 < len(stored) < 800 and stored == expected[: len(stored)]
    lost = (tmp_path / "out" / "failed.jsonl").read_text().splitlines()
    assert f"stored + already stored + refused + failed = read: {len(stored)} + 0 + 0 + {len(lost)}" in failed.stdout
    resumed = command(engine, prompts, tmp_path / "out", "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert table(tmp_path / "out") == expected


def test_a_card_that_is_full_is_told_with_the_numbers_and_nothing_is_left_behind(engine):
    """First what the engine needs is more than is free; then it would fit, and runs out while it loads."""
    contract = read_contract(engine)
    torch.cuda.empty_cache()
    before, (free, _) = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()
    filler = torch.empty(free - (64 << 20), dtype=torch.uint8, device="cuda")
    full = torch.cuda.memory_allocated()  # torch may count more than the filler's bytes: it takes whole pages
    larger = replace(contract, limits=replace(contract.limits, max_num_tokens=1 << 20))
    with pytest.raises(OutOfMemory, match="does not fit on the card") as error:
        open_engine(engine, larger)
    assert "GB of device memory" in error.value.expected and "GB free on" in error.value.found
    assert "max_num_tokens" in error.value.fix
    assert torch.cuda.memory_allocated() == full
    del filler
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() == before
    open_engine(engine, contract).close()


def test_memory_that_runs_out_while_loading_leaves_nothing_behind(engine, monkeypatch):
    from tensorrt_llm_ext.backends.torch import engine as engine_module

    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    monkeypatch.setattr(engine_module, "make_workspace", lambda *_: torch.empty(1 << 50, dtype=torch.uint8, device="cuda"))
    with pytest.raises(OutOfMemory, match="does not fit on the card") as error:
        open_engine(engine, read_contract(engine))
    assert "GB of device memory" in error.value.expected and "Tried to allocate" in error.value.found
    del error
    assert torch.cuda.memory_allocated() == before
