"""An engine that gives the wrong vector for a known sequence never serves, and a drift is found before a commit."""

import ctypes
from dataclasses import replace

import numpy as np
import pytest
from toy_engines import (
    ALL,
    HIDDEN_SIZE,
    LAST,
    MEAN,
    NAN_TOKEN,
    Toy,
    random_items,
    toy_canary,
    toy_contract,
    work_item,
    write_engine,
)

from tensorrt_llm_ext.errors import CanaryError, ContractError
from tensorrt_llm_ext.recipes.contract import Limits
from tensorrt_llm_ext.runtime import Session

TAPS = (LAST, MEAN, ALL)
SMALL = Limits(max_num_tokens=20, max_batch_size=5, max_seq_len=8, max_padded_tokens=25)


def canary_with(tap, change):
    """The toy's first canary with the right rows of one tap replaced."""
    canary = toy_canary((7, 8, 9, 10), TAPS)
    states = tuple(replace(s, rows=change(s.rows.copy())) if s.tap == tap else s for s in canary.states)
    return replace(canary, states=states)


def nudged(rows):
    rows[-1] *= 1.001  # of the order of five tolerances
    return rows


def test_every_canary_is_compared_for_every_tap(engine_path):
    with Session.open(engine_path) as session:
        distances = session.check_canaries()
    assert {(d.canary, d.tap) for d in distances} == {(i, tap) for i in range(3) for tap in TAPS}
    assert all(d.distance <= d.tolerance == 1e-4 and d.source == "toy reference" for d in distances)


@pytest.mark.parametrize("tap", TAPS, ids=lambda tap: tap.rows)
def test_an_engine_with_other_numbers_than_its_canaries_is_not_opened(tmp_path, tap):
    path = write_engine(tmp_path, Toy(taps=TAPS), canaries=(canary_with(tap, nudged),))
    with pytest.raises(CanaryError, match="canary 0 came back with other numbers") as error:
        Session.open(path)
    assert f"every row of final@{tap.rows} within 0.0001 of toy reference" in error.value.expected
    row = 3 if tap is ALL else 0
    assert f"row {row}, " in error.value.found and "previous row would be 0.1 away" in error.value.found


def test_a_canary_of_another_shape_is_wrong_too(tmp_path):
    path = write_engine(tmp_path, Toy(taps=TAPS), canaries=(canary_with(ALL, lambda rows: rows[:1]),))
    with pytest.raises(CanaryError, match="shape"):
        Session.open(path)


def test_a_canary_that_is_not_finite_is_wrong(tmp_path):
    canary = replace(canary_with(LAST, lambda rows: rows), token_ids=(NAN_TOKEN,))
    path = write_engine(tmp_path, Toy(taps=TAPS), canaries=(canary,))
    with pytest.raises(CanaryError, match="NaN or Inf"):
        Session.open(path)


def test_a_promise_of_nan_is_not_a_promise(tmp_path):
    path = write_engine(tmp_path, Toy(taps=TAPS), canaries=(canary_with(LAST, lambda rows: rows * np.nan),))
    with pytest.raises(CanaryError):
        Session.open(path)


@pytest.mark.parametrize("canaries", [(), (toy_canary((1, 2), (LAST,)),)], ids=["none", "not for every tap"])
def test_without_a_canary_for_every_tap_nothing_is_proven(tmp_path, canaries):
    path = write_engine(tmp_path, Toy(taps=TAPS), canaries=canaries)
    with pytest.raises(CanaryError, match="no canary for every tap"):
        Session.open(path)


def test_a_canary_that_its_engine_does_not_take_is_a_contract_error(tmp_path):
    path = write_engine(tmp_path, Toy(), canaries=(toy_canary((1,) * 41, (LAST,)),))
    with pytest.raises(ContractError, match="canary:0 is not a batch its own engine takes"):
        Session.open(path)


def test_a_canary_rides_behind_the_batches_before_it(watched):
    session, engine = watched()
    ticket = session.submit(random_items(5))
    canary = session.submit_canaries()
    assert {d.canary for d in canary.wait()} == {0, 1, 2}
    assert engine.num_running == 2 and len(ticket.wait()) == 5


def test_a_drift_is_found_by_the_canary_behind_it(watched):
    session, engine = watched()
    assert session.submit_canaries().wait()

    def drift():
        row = ctypes.cast(engine.addresses["final_post_last"], ctypes.POINTER(ctypes.c_float))
        for column in range(HIDDEN_SIZE):
            row[column] += 0.01

    engine.after = drift
    ticket, riding = session.submit(random_items(5)), session.submit_canaries()
    assert len(ticket.wait()) == 5  # finite rows with an identity: nothing but a canary can tell that they are wrong
    with pytest.raises(CanaryError, match="came back with other numbers"):
        riding.wait()


def test_canaries_that_do_not_fit_one_batch_take_turns(tmp_path):
    canaries = tuple(
        toy_canary(ids, (LAST,)) for ids in ((7, 8, 9, 10, 11, 12, 13, 14), (3, 4, 5, 6, 7, 8, 9), (40,) * 8)
    )
    path = write_engine(tmp_path, Toy(limits=SMALL), canaries=canaries)
    with Session.open(path) as session:
        assert {d.canary for d in session.check_canaries()} == {0, 1, 2}
        turns = [{d.canary for d in session.submit_canaries().wait()} for _ in range(3)]
    assert turns[0] | turns[1] == {0, 1, 2} and turns[2] == turns[0] != turns[1]


def test_canaries_do_not_mix_with_requests_of_the_same_name(engine_path):
    with Session.open(engine_path) as session:
        (record,) = session.submit([work_item("canary:0", [1])]).wait()
        assert record.num_tokens == 1 and session.check_canaries()


def test_the_toy_contract_is_the_one_on_disk(engine_path):
    with Session.open(engine_path) as session:
        assert len(session.contract.canaries) == len(toy_contract(Toy(taps=TAPS)).canaries) == 3
