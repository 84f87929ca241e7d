"""A batch goes through a stream: bind, copy in, run, copy out, ring. The same claims for every kind of stream."""

import gc
import threading
import time

import numpy as np
import pytest
from rig import DIGEST, PATIENCE_S, check_outputs, some_sequences

from tensorrt_llm_ext import _runtime
from tensorrt_llm_ext.errors import DeadlineExceeded, PlanError, SessionClosed


def test_a_batch_comes_back_with_its_own_rows_and_its_own_identity(rig):
    sequences = [[5, 6, 7], [8], [9, 10]]
    ticket = rig.submit(sequences)
    check_outputs(rig.wait(ticket), sequences)
    assert ticket.came_back == (0, 6, DIGEST)
    assert ticket.is_done


def test_many_batches_of_many_shapes_come_back_in_any_order_of_waiting(rig):
    random = np.random.default_rng(0)
    for _ in range(40):
        batches = [some_sequences(int(random.integers(1 << 30))) for _ in range(2)]
        tickets = [rig.submit(sequences) for sequences in batches]
        for i in random.permutation(2):
            check_outputs(rig.wait(tickets[i]), batches[i])
        assert [ticket.came_back[0] for ticket in tickets] == [ticket.batch for ticket in tickets]
        del tickets  # the slots go home
    assert rig.engine.num_runs == 80


@pytest.mark.parametrize("first_value", [2**31 - 3, 2**32 - 3])
def test_the_doorbell_counts_across_the_places_where_its_number_wraps(open_rig, first_value):
    rig = open_rig(first_value=first_value)
    values = []
    for batch in range(6):
        ticket = rig.submit([[batch + 1, batch + 2]])
        check_outputs(rig.wait(ticket), [[batch + 1, batch + 2]])
        values.append(ticket.value)
        del ticket
    assert values == [(first_value + 1 + i) % 2**32 for i in range(6)]
    assert rig.stream.written == values[-1]


def test_a_batch_that_does_not_come_back_is_an_error_with_the_batch_the_time_and_the_last_value(open_rig, request):
    rig = open_rig()
    if rig.kind == "cuda":
        pytest.skip("a torch kernel cannot be held by a test")
    check_outputs(rig.wait(rig.submit([[1]])), [[1]])
    gate = threading.Event()
    rig.engine.before = lambda: gate.wait(PATIENCE_S)
    sequences = [[3, 4]]
    ticket = rig.submit(sequences)
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded) as error:
        ticket.wait(0.2)
    assert 0.2 <= time.monotonic() - started < 2
    assert "batch 1 did not come back in 0.2" in error.value.what
    assert "value 2" in error.value.expected
    assert "last wrote 1" in error.value.found and "still running" in error.value.found
    gate.set()
    check_outputs(rig.wait(ticket), sequences)  # the batch goes on, and may be waited for again


def test_verbs_out_of_order_are_refused_and_harm_nothing(rig):
    slot = rig.pack([[1, 2]])
    for verb in (rig.stream.copy_out, rig.stream.ring):
        with pytest.raises(PlanError, match="out of order"):
            verb(slot)
    rig.stream.copy_in(slot)
    for verb in (rig.stream.copy_in, rig.stream.copy_out, rig.stream.ring):
        with pytest.raises(PlanError, match="out of order"):
            verb(slot)
    del slot
    check_outputs(rig.wait(rig.submit([[7, 8]])), [[7, 8]])


def test_a_slot_without_a_batch_goes_through_no_stream(rig):
    slot = rig.arena.acquire(1.0)
    with pytest.raises(PlanError, match="out of order"):
        rig.stream.copy_in(slot)
    with pytest.raises(PlanError, match="nothing was packed"):
        rig.stream.tensors(slot)


def test_a_slot_that_a_stream_has_used_is_not_packed_again(rig):
    slot = rig.pack([[1]])
    ticket = rig.enqueue(slot)
    rig.wait(ticket)
    with pytest.raises(PlanError, match="used by a stream"):
        _runtime.pack(
            rig.layout,
            np.zeros(1, np.int32),
            np.array([0, 1], np.int32),
            slot,
            convention="index",
            batch=9,
            digest=DIGEST,
        )


def test_a_ticket_that_is_dropped_gives_its_slot_back_only_when_the_stream_is_past_it(open_rig):
    rig = open_rig(num_slots=1)
    if rig.kind == "cuda":
        pytest.skip("a torch kernel cannot be held by a test")
    gate = threading.Event()
    rig.engine.before = lambda: gate.wait(PATIENCE_S)
    ticket = rig.submit([[1, 2, 3]])
    del ticket
    with pytest.raises(DeadlineExceeded, match="no slot came free"):
        rig.arena.acquire(0.1)
    gate.set()
    rig.engine.before = lambda: None
    check_outputs(rig.wait(rig.submit([[4]])), [[4]])


def test_a_batch_that_was_begun_and_given_up_frees_its_slot(open_rig):
    rig = open_rig(num_slots=1)
    slot = rig.pack([[1, 2]])
    rig.stream.copy_in(slot)  # and no more: the batch is never rung for
    del slot
    check_outputs(rig.wait(rig.submit([[4]])), [[4]])


def test_after_close_nothing_is_enqueued_and_what_came_back_is_still_there(rig):
    sequences = [[1, 2], [3]]
    ticket = rig.submit(sequences)
    outputs = rig.wait(ticket)
    other = rig.pack([[9]])
    rig.close()
    rig.close()
    check_outputs(outputs, sequences)
    assert ticket.is_done
    for act in (lambda: rig.stream.copy_in(other), lambda: rig.stream.run(other, rig.bind), lambda: rig.arena.acquire(1.0)):
        with pytest.raises(SessionClosed):
            act()


def test_views_outlive_everything_that_made_them(open_rig):
    rig = open_rig()
    sequences = [[11, 12], [13, 14, 15]]
    outputs = rig.wait(rig.submit(sequences))
    last = outputs["last"][1:]
    rig.close()
    rig.arena = rig.stream = rig.layout = rig.driver = None
    rig.close = lambda: None
    del outputs
    gc.collect()
    np.testing.assert_array_equal(last[0], (15 * 64 + 2) + np.arange(8, dtype=np.float32) / 8)
    assert _runtime.stats()["slots_out"] == 1


def test_two_streams_run_at_once_without_touching_each_other(open_rig):
    rigs = [open_rig() for _ in range(2)]
    errors = []
    barrier = threading.Barrier(len(rigs))

    def work(seed, rig):
        try:
            barrier.wait(PATIENCE_S)
            for step in range(30):
                sequences = some_sequences(1000 * seed + step)
                check_outputs(rig.wait(rig.submit(sequences)), sequences)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=each) for each in enumerate(rigs)]
    [thread.start() for thread in threads]
    [thread.join(60) for thread in threads]
    assert errors == [] and not any(thread.is_alive() for thread in threads)


def test_threads_that_wait_and_a_thread_that_submits_share_one_stream(open_rig):
    rig = open_rig(num_slots=4)
    lock, errors, done = threading.Lock(), [], []

    def work(seed):
        try:
            for step in range(20):
                sequences = some_sequences(100 * seed + step)
                with lock:  # a session's lock: the verbs of one batch stay together
                    ticket = rig.submit(sequences)
                check_outputs(rig.wait(ticket), sequences)
                done.append(ticket.batch)
                del ticket
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    [thread.start() for thread in threads]
    [thread.join(60) for thread in threads]
    assert errors == [] and sorted(done) == list(range(60))


def test_a_batch_is_packed_while_another_runs(open_rig):
    rig = open_rig()
    if rig.kind == "cuda":
        pytest.skip("a torch kernel cannot be held by a test")
    gate = threading.Event()
    rig.engine.before = lambda: gate.wait(PATIENCE_S)
    first = rig.submit([[1, 2]])
    second = rig.submit([[3], [4, 5]])  # does not wait for the first
    assert not first.is_done and not second.is_done
    gate.set()
    check_outputs(rig.wait(second), [[3], [4, 5]])
    check_outputs(rig.wait(first), [[1, 2]])


def test_nothing_is_allocated_and_nothing_synchronised_between_the_first_batch_and_the_last(rig):
    rig.wait(rig.submit([[1]]))
    before = _runtime.stats()
    tickets = []
    for step in range(50):
        tickets.append(rig.submit(some_sequences(step)))
        if len(tickets) == 2:
            rig.wait(tickets.pop(0))
    rig.wait(tickets.pop())
    after = _runtime.stats()
    for name in ("allocations", "synchronisations", "mapped_bytes", "device_bytes"):
        assert after[name] == before[name], name
    if rig.stand_in:
        assert sum(rig.stand_in.calls(f"cu{what}Synchronize") for what in ("Stream", "Ctx", "Event")) == 0


def test_leaving_the_interpreter_with_work_in_flight_does_not_hang(tmp_path):
    import subprocess
    import sys
    from pathlib import Path

    script = (
        "import sys, time; sys.path.insert(0, sys.argv[1])\n"
        "from rig import Rig\n"
        "rig = Rig('host')\n"
        "rig.engine.before = lambda: time.sleep(0.2)\n"
        "tickets = [rig.submit([[1, 2]]) for _ in range(2)]\n"
    )
    subprocess.run([sys.executable, "-c", script, str(Path(__file__).parent)], check=True, timeout=60)
