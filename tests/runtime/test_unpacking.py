"""A request's rows become a record of its own, or a failure that says why not."""

from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
from toy_engines import ALL, HIDDEN_SIZE, LAST, MEAN, Toy, toy_contract, work_item

from tensorrt_llm_ext.results import side_by_side
from tensorrt_llm_ext.results.record import Failure, Record, Tokenisation, origin_from_contract
from tensorrt_llm_ext.runtime.pipeline import Returned
from tensorrt_llm_ext.runtime.unpacking import record, records, unpack

CONTRACT = toy_contract(Toy(taps=(LAST, MEAN)))
ORIGIN = origin_from_contract(CONTRACT, "prefix_sum", Tokenisation())
ITEM = work_item("a", [1, 2])


def made(rows):
    return record(ITEM, ITEM.token_ids, rows, CONTRACT, ORIGIN)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("tap", [0, 1])
def test_one_value_that_is_not_finite_fails_the_request_and_says_where(value, tap):
    rows = [np.ones((1, HIDDEN_SIZE), dtype=np.float32) for _ in range(2)]
    assert isinstance(made(rows), Record)
    rows[tap][0, 7] = value
    failure = made(rows)
    assert isinstance(failure, Failure) and failure.code == "not_finite"
    name = ("final@last", "final@mean")[tap]
    assert failure.reason == f"{name}: 1 of 24 values are NaN or Inf, the first at row 0, column 7"


ITEMS = [work_item(f"r{i}", range(1, i + 2)) for i in range(4)]


def a_batch(contract):
    """What comes back for ITEMS: other values in every row."""
    offsets = np.array([0, 1, 3, 6, 10], dtype=np.int32)
    rng = np.random.default_rng(0)
    sizes = {tensor.name: 10 if tensor.shape[0] == "T" else 4 for tensor in contract.tensors if tensor.tap}
    outputs = {name: rng.normal(size=(size, HIDDEN_SIZE)).astype(np.float32) for name, size in sizes.items()}
    return Returned(offsets, np.concatenate([item.token_ids for item in ITEMS]), outputs)


def as_text(answers):
    """Answers in a form that compares: every field, the bytes of every row."""
    return [
        repr(answer) if isinstance(answer, Failure) else (repr(answer), [state.rows.tobytes() for state in answer.states])
        for answer in answers
    ]


@pytest.mark.parametrize("taps", [(LAST,), (LAST, MEAN), (ALL,), (LAST, ALL)])
@pytest.mark.parametrize("fault", ["none", "not finite", "another token", "another hash"])
@pytest.mark.parametrize("num_cores", [2, 16])
def test_a_batch_answers_as_its_requests_do_one_by_one(taps, fault, num_cores, monkeypatch):
    monkeypatch.setattr(side_by_side, "_threads", lru_cache(side_by_side._threads.__wrapped__))
    monkeypatch.setattr(side_by_side.os, "sched_getaffinity", lambda process: set(range(num_cores)))
    contract = toy_contract(Toy(taps=taps))
    batch, items = a_batch(contract), list(ITEMS)
    if fault == "not finite":
        batch.outputs[contract.output_of(taps[-1]).name][2, 3] = np.inf
    elif fault == "another token":
        batch.token_ids[7] += 1
    elif fault == "another hash":
        items[1] = replace(items[1], token_hash="sha256:0")
    answers = records(items, batch, contract, ORIGIN)
    expected = [
        record(item, ran, rows, contract, ORIGIN)
        for item, (ran, rows) in zip(items, unpack(batch, contract), strict=True)
    ]
    assert as_text(answers) == as_text(expected) and len(answers) == 4
    assert side_by_side._threads.cache_info().currsize == (ALL in taps)
    assert sum(isinstance(answer, Failure) for answer in answers) == (fault != "none")
    for answer in answers:
        for state in answer.states if isinstance(answer, Record) else ():
            assert not state.rows.flags.writeable and not np.shares_memory(state.rows, batch.outputs[contract.output_of(state.tap).name])
