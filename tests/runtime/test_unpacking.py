"""A request's rows become a record of its own, or a failure that says why not."""

import numpy as np
import pytest
from toy_engines import HIDDEN_SIZE, LAST, MEAN, Toy, toy_contract, work_item

from tensorrt_llm_ext.results.record import Failure, Record, Tokenisation, origin_from_contract
from tensorrt_llm_ext.runtime.unpacking import record

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
