"""What only a real card can show; the other files of this folder run their own claims on it as well (`-m gpu`)."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from rig import PATIENCE_S, check_outputs, some_sequences

from tensorrt_llm_ext import _runtime
from tensorrt_llm_ext.errors import OutOfMemory

pytestmark = pytest.mark.gpu


@pytest.fixture
def cuda_rig():
    from rig import Rig

    rig = Rig("cuda", num_slots=3)
    yield rig
    rig.close()
    vars(rig).clear()


def test_the_real_driver_has_stream_memory_operations_and_every_entry_point(cuda_rig):
    assert cuda_rig.stream.has_memory_operations
    assert cuda_rig.driver.version >= 12000
    sequences = [[1, 2, 3]]
    check_outputs(cuda_rig.wait(cuda_rig.submit(sequences)), sequences)
    calls = cuda_rig.driver.calls()
    assert calls["cuStreamWriteValue32_v2"] >= 2 and calls["cuLaunchHostFunc"] == 0


def test_the_runtime_and_torch_share_one_context(cuda_rig):
    import torch

    before = torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream
    cuda_rig.wait(cuda_rig.submit([[1]]))
    assert (torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream) == before
    tensor = torch.ones(4, device="cuda")
    torch.cuda.synchronize()
    assert tensor.sum().item() == 4


def test_many_armed_batches_run_once_their_shape_has_run(cuda_rig):
    guard = threading.Timer(PATIENCE_S, cuda_rig.stream.release)  # a deadlock becomes a failure, not a hang
    guard.start()
    sequences = some_sequences(3)
    cuda_rig.wait(cuda_rig.submit(sequences))
    for _ in range(50):
        slot = cuda_rig.pack(sequences)
        cuda_rig.stream.arm(slot, shape_has_run=True)
        ticket = cuda_rig.enqueue(slot)
        assert not ticket.is_done
        cuda_rig.stream.release()
        check_outputs(cuda_rig.wait(ticket), sequences)
        del slot, ticket
    guard.cancel()


def test_more_device_memory_than_there_is_is_an_error_with_the_numbers():
    driver = _runtime.Driver()
    with pytest.raises(OutOfMemory) as error:
        _runtime.CudaStream(driver, 1 << 46)
    assert f"{1 << 46} bytes of device memory" in error.value.expected
    assert "bytes are free" in error.value.found


def test_a_kernel_that_fails_ends_the_session_within_milliseconds_and_in_words(tmp_path):
    """In a process of its own: a device assertion is the end of a context."""
    script = """
import sys, time
sys.path.insert(0, sys.argv[1])
import torch
from rig import Rig
from tensorrt_llm_ext.errors import BackendError, SessionClosed

rig = Rig("cuda", num_slots=3)
rig.wait(rig.submit([[1, 2]]))
bad = torch.tensor([99], device="cuda")
table = torch.zeros(4, device="cuda")
spin = lambda: torch.cuda._sleep(100_000_000)
rig.engine.before = lambda: (spin(), table[bad])
first = rig.submit([[1, 2]])
rig.engine.before = lambda: None
second = rig.submit([[3, 4]])
started = time.monotonic()
try:
    first.wait(20.0)
except BackendError as error:
    print("first", error.found)
print("seconds", time.monotonic() - started)
try:
    second.wait(20.0)
except SessionClosed as error:
    print("second", error.what)
try:
    rig.submit([[5]])
except SessionClosed as error:
    print("third", error.what)
"""
    answer = subprocess.run(
        [sys.executable, "-c", script, str(Path(__file__).parent)], capture_output=True, text=True, timeout=120
    )
    lines = dict(line.split(" ", 1) for line in answer.stdout.splitlines() if " " in line)
    assert "CUDA_ERROR_ASSERT (710)" in lines["first"], answer.stdout + answer.stderr
    assert float(lines["seconds"]) < 5
    assert "batch 2 did not come back" in lines["second"]
    assert "session failed earlier" in lines["third"]


def test_a_trace_of_batches_in_flight_has_no_call_that_waits_or_allocates(cuda_rig):
    from torch.profiler import ProfilerActivity, profile, record_function

    batches = [some_sequences(seed) for seed in range(12)]
    for sequences in batches:  # every shape has run
        check_outputs(cuda_rig.wait(cuda_rig.submit(sequences)), sequences)
    before = _runtime.stats()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
        with record_function("batches"):
            tickets = []
            for sequences in batches:
                tickets.append((cuda_rig.submit(sequences), sequences))
                if len(tickets) == 3:
                    ticket, expected = tickets.pop(0)
                    check_outputs(cuda_rig.wait(ticket), expected)
                    del ticket
            for ticket, expected in tickets:
                check_outputs(cuda_rig.wait(ticket), expected)
            del ticket
            tickets.clear()
    after = _runtime.stats()
    events = profiled.events()
    window = next(e.time_range for e in events if e.name == "batches" and e.device_type.name == "CPU")
    calls = [e.name for e in events if e.name.startswith("cu") and window.start <= e.time_range.start < window.end]
    assert len(calls) > 3 * len(batches)  # the trace saw the launches
    words = ("Synchronize", "Malloc", "MemAlloc", "Free", "HostRegister")
    assert [name for name in calls if any(word in name for word in words)] == []
    assert (after["synchronisations"], after["allocations"]) == (before["synchronisations"], before["allocations"])
