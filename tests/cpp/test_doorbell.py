"""The other way round: a stream that waits for the host, armed only where that cannot deadlock."""

import time

import numpy as np
import pytest
from rig import DIGEST, PATIENCE_S, check_outputs

from tensorrt_llm_ext import _runtime
from tensorrt_llm_ext.errors import BackendError, DeadlineExceeded, PlanError


def test_an_armed_stream_waits_for_the_host_and_no_longer(open_rig, request):
    rig = open_rig()
    if not has_memory_operations(rig):
        pytest.skip("without stream memory operations a stream cannot wait: the refusal has its own test")
    rig.wait(rig.submit([[1, 2]]))
    slot = rig.pack([[3, 4]])
    rig.stream.arm(slot, shape_has_run=True)
    ticket = rig.enqueue(slot)
    with pytest.raises(DeadlineExceeded):
        ticket.wait(0.2)
    assert not rig.stream.is_idle()
    rig.stream.release()
    check_outputs(rig.wait(ticket), [[3, 4]])


@pytest.mark.parametrize("first_value", [2**31 - 2, 2**32 - 2])
def test_arming_counts_across_the_places_where_its_number_wraps(open_rig, first_value):
    rig = open_rig(first_value=first_value)
    if not has_memory_operations(rig):
        pytest.skip("without stream memory operations a stream cannot wait: the refusal has its own test")
    rig.wait(rig.submit([[0, 0]]))
    for step in range(5):
        slot = rig.pack([[step, step]])
        rig.stream.arm(slot, shape_has_run=True)
        ticket = rig.enqueue(slot)
        time.sleep(0.01)
        assert not ticket.is_done
        rig.stream.release()
        check_outputs(rig.wait(ticket), [[step, step]])
        del slot, ticket


def test_a_shape_that_has_never_run_is_not_armed(rig):
    slot = rig.pack([[1]])
    with pytest.raises(PlanError, match="never run") as error:
        rig.stream.arm(slot, shape_has_run=False)
    assert "load lazily" in error.value.fix
    check_outputs(rig.wait(rig.enqueue(slot)), [[1]])


def test_an_engine_that_reads_host_inputs_at_enqueue_is_never_armed(rig):
    layout = _runtime.Layout(
        [("input_ids", "input", "int32", ("T",)), ("host_request_types", "input", "int32", ("B",)), ("out", "output", "float32", ("T",))],
        vocab_size=10,
        max_num_tokens=8,
        max_batch_size=8,
        max_seq_len=8,
        max_padded_tokens=64,
    )
    slot = rig.arena.acquire(1.0)
    _runtime.pack(layout, np.zeros(2, np.int32), np.array([0, 2], np.int32), slot, convention="none", batch=0, digest=DIGEST)
    with pytest.raises(PlanError, match="host_"):
        rig.stream.arm(slot, shape_has_run=True)


def test_a_driver_without_stream_memory_operations_refuses_to_arm_and_goes_on(open_rig):
    rig = open_rig()
    if has_memory_operations(rig):
        pytest.skip("this stream can wait for the host")
    slot = rig.pack([[1]])
    with pytest.raises(PlanError, match="no stream memory operations"):
        rig.stream.arm(slot, shape_has_run=True)
    check_outputs(rig.wait(rig.enqueue(slot)), [[1]])
    assert rig.stand_in.calls("cuLaunchHostFunc") == 1


def test_closing_lets_go_of_a_stream_that_is_armed(open_rig):
    rig = open_rig()
    if not has_memory_operations(rig):
        pytest.skip("without stream memory operations a stream cannot wait: the refusal has its own test")
    rig.wait(rig.submit([[1]]))
    slot = rig.pack([[2]])
    rig.stream.arm(slot, shape_has_run=True)
    ticket = rig.enqueue(slot)
    started = time.monotonic()
    rig.close(PATIENCE_S)
    assert time.monotonic() - started < 5
    del ticket, slot


def test_a_device_that_breaks_while_armed_is_seen(stand_in):
    from rig import Rig
    from stand_in import ILLEGAL_ADDRESS

    rig = Rig("stand_in", stand_in=stand_in)
    rig.wait(rig.submit([[1]]))
    slot = rig.pack([[2]])
    rig.stream.arm(slot, shape_has_run=True)
    ticket = rig.enqueue(slot)
    stand_in.break_device(ILLEGAL_ADDRESS)
    with pytest.raises(BackendError):
        ticket.wait(PATIENCE_S)
    del ticket, slot
    rig.close()


def test_releasing_a_stream_wakes_the_card_once_by_a_write_of_another_stream(stand_in):
    from rig import Rig

    rig = Rig("stand_in", stand_in=stand_in)
    rig.wait(rig.submit([[1]]))
    rig.stream.release()  # nothing is armed
    slot = rig.pack([[2]])
    rig.stream.arm(slot, shape_has_run=True)
    ticket = rig.enqueue(slot)
    num_writes = stand_in.calls("cuStreamWriteValue32_v2")
    for _ in range(2):
        rig.stream.release()
        assert stand_in.calls("cuStreamWriteValue32_v2") == num_writes + 1
    check_outputs(rig.wait(ticket), [[2]])
    del slot, ticket
    rig.close()


def test_a_card_that_cannot_be_woken_finds_the_number_by_itself(stand_in):
    from rig import Rig

    rig = Rig("stand_in", stand_in=stand_in)
    rig.wait(rig.submit([[1]]))
    slot = rig.pack([[2]])
    rig.stream.arm(slot, shape_has_run=True)
    ticket = rig.enqueue(slot)
    stand_in.fail("cuStreamWriteValue32_v2")
    rig.stream.release()
    assert stand_in.failed_call() == "cuStreamWriteValue32_v2"
    check_outputs(rig.wait(ticket), [[2]])
    del slot, ticket
    rig.close()


def test_closing_waits_for_the_write_that_wakes(stand_in):
    from rig import Rig

    for _ in range(8):  # each write comes after a random while
        rig = Rig("stand_in", stand_in=stand_in)
        rig.wait(rig.submit([[1]]))
        rig.stream.arm(None, shape_has_run=True)
        stand_in.delay(20_000)
        rig.stream.release()
        rig.close()
        stand_in.delay(0)
    assert stand_in.violations() == ""


def test_a_ring_without_a_slot_says_when_all_before_it_has_finished(rig):
    first = rig.submit([[1, 2]])
    ticket = rig.stream.ring()
    assert ticket.wait(PATIENCE_S) == {} and ticket.batch is None
    assert first.is_done and ticket.value == first.value + 1
    with pytest.raises(PlanError, match="nothing came back"):
        ticket.came_back  # noqa: B018


def has_memory_operations(rig) -> bool:
    return rig.kind == "host" or rig.stream.has_memory_operations
