"""Sessions end: at a deadline, by a failure, closed or forgotten; whoever waits is told, and nothing is left behind."""

import gc
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import toy_engines
from toy_engines import assert_right, work_item

from tensorrt_llm_ext import _runtime
from tensorrt_llm_ext.errors import BackendError, DeadlineExceeded, SessionClosed
from tensorrt_llm_ext.runtime import Session

def test_without_a_free_slot_submit_ends_at_its_deadline_and_says_what_to_do(engine_path):
    with Session.open(engine_path, num_slots=2, deadline_s=0.3) as session:
        tickets = [session.submit([work_item(str(i), [i])]) for i in range(2)]
        with pytest.raises(DeadlineExceeded, match="no slot came free in 0.3 s") as error:
            session.submit([work_item("c", [1])])
        assert error.value.found == "2 slots out" and "wait for a ticket" in error.value.fix
        assert [len(ticket.wait()) for ticket in tickets] == [1, 1]


def test_a_submit_that_waits_for_a_slot_goes_on_when_another_thread_frees_one(session):
    tickets = [session.submit([work_item(str(i), [i])]) for i in range(session.num_slots)]
    timer = threading.Timer(0.1, tickets[0].wait)
    timer.start()
    assert len(session.submit([work_item("c", [1])]).wait()) == 1
    timer.join()


def test_a_batch_that_takes_too_long_is_a_deadline_exceeded_and_may_be_waited_for_again(watched):
    session, engine = watched()
    engine.is_open.clear()
    ticket = session.submit([work_item("a", [1])])
    with pytest.raises(DeadlineExceeded, match="did not come back in 0.05 s"):
        ticket.wait(timeout_s=0.05)
    engine.is_open.set()
    assert_right(ticket.wait()[0], work_item("a", [1]))


class Broken(Exception):
    pass


@pytest.mark.parametrize(
    "raised", [Broken("the card fell off"), BackendError("b", expected=1, found="the card fell off", fix="f")]
)
def test_an_error_of_the_engine_fails_the_batches_in_flight_and_closes_the_session(watched, raised):
    session, engine = watched(num_slots=3)

    def fail_the_second():
        if engine.num_running == 2:
            raise raised

    engine.before = fail_the_second
    engine.is_open.clear()
    first, second, third = (session.submit([work_item(name, [1])]) for name in "abc")
    engine.is_open.set()
    with pytest.raises(BackendError, match="the card fell off"):
        second.wait()
    assert_right(first.wait()[0], work_item("a", [1]))  # it came back before the failure
    with pytest.raises(SessionClosed, match="the card fell off"):
        third.wait()
    assert engine.num_running == 2  # the third never ran
    with pytest.raises(SessionClosed, match="the card fell off"):
        session.submit([work_item("d", [1])])


def test_a_failure_wakes_a_submit_that_waits_for_a_slot(watched):
    session, engine = watched(num_slots=1)

    def fail():
        raise Broken("power")

    engine.before = fail
    engine.is_open.clear()
    ticket = session.submit([work_item("a", [1])])
    engine.wait_until_running(1)
    threading.Timer(0.1, engine.is_open.set).start()
    started = time.monotonic()
    with pytest.raises(SessionClosed, match="power"):
        session.submit([work_item("b", [1])])
    assert time.monotonic() - started < 10  # not at the deadline, which is 20 s
    del ticket


def test_after_close_everything_is_session_closed(watched):
    session, engine = watched()
    engine.is_open.clear()
    tickets = [session.submit([work_item(name, [1])]) for name in "ab"]
    threading.Timer(0.1, engine.is_open.set).start()
    session.close()
    session.close()
    assert engine.num_closed == 1 and engine.num_running <= 1
    for ticket in tickets:
        with pytest.raises(SessionClosed, match="the session was closed"):
            ticket.wait()
    with pytest.raises(SessionClosed):
        session.submit([work_item("c", [1])])
    with pytest.raises(SessionClosed):
        session.submit_canaries()


def test_closing_wakes_whoever_waits_for_a_ticket(watched):
    session, engine = watched(deadline_s=0.2)
    engine.is_open.clear()
    ticket = session.submit([work_item("a", [1])])
    engine.wait_until_running(1)
    threading.Timer(0.1, session.close).start()
    started = time.monotonic()
    with pytest.raises(SessionClosed):
        ticket.wait(timeout_s=15)
    assert time.monotonic() - started < 10


def test_closing_over_a_batch_that_never_ends_leaves_its_memory_alone(watched):
    session, engine = watched(deadline_s=0.2)
    engine.is_open.clear()
    ticket = session.submit([work_item("a", [1])])
    engine.wait_until_running(1)
    session.close()
    with pytest.raises(SessionClosed):
        ticket.wait()
    assert engine.num_closed == 0  # the library still reads and writes there
    engine.is_open.set()


def test_a_session_that_is_forgotten_ends_its_thread_and_frees_the_engine(engine_path):
    gc.collect()
    before = _runtime.stats()
    session = Session.open(engine_path)
    assert _runtime.stats()["streams_open"] == before["streams_open"] + 1
    gone = weakref.ref(session)
    del session
    gc.collect()
    after = _runtime.stats()
    assert gone() is None
    assert after["streams_open"] == before["streams_open"] and after["mapped_bytes"] <= before["mapped_bytes"]


def test_a_process_that_forgets_to_close_ends_cleanly(engine_path):
    script = (
        "import sys; from toy_engines import random_items; from tensorrt_llm_ext.runtime import Session\n"
        "session = Session.open(sys.argv[1]); ticket = session.submit(random_items(20)); print('submitted')"
    )
    folder = str(Path(toy_engines.__file__).parent)
    command = [sys.executable, "-c", script, str(engine_path)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "submitted\n", "")
