"""A plan is what a batch must bring back: consumed once, by rows of its own batch and no other."""

import pytest

from tensorrt_llm_ext.errors import PlanError
from tensorrt_llm_ext.runtime.plan import PlanRegistry, layout_digest


@pytest.fixture
def plans():
    return PlanRegistry()


def test_a_plan_is_consumed_by_what_it_promises_once(plans):
    plan = plans.make(("a", "b"), (2, 3))
    plans.consume(plan, total_rows=5, digest=plan.layout_digest)
    with pytest.raises(PlanError, match="was consumed before"):
        plans.consume(plan, total_rows=5, digest=plan.layout_digest)
    assert plans.stats() == {"made": 1, "consumed": 1, "refused": 1, "open": 0, "cross_request": 0}


@pytest.mark.parametrize(
    ("request_ids", "row_counts", "is_cross"),
    [(("b", "a"), (2, 3), 1), (("a", "b"), (3, 2), 1), (("a", "c"), (2, 3), 1), (("a", "b"), (2, 3), 0)],
)
def test_rows_of_another_batch_are_refused_though_they_are_as_many(plans, request_ids, row_counts, is_cross):
    plan = plans.make(("a", "b"), (2, 3))
    digest = layout_digest(request_ids, row_counts)
    with pytest.raises(PlanError, match="what came back is not batch 0"):
        plans.consume(plan, total_rows=5 if is_cross else 4, digest=digest)
    assert plans.stats() == {"made": 1, "consumed": 0, "refused": 1, "open": 0, "cross_request": is_cross}


def test_another_registry_s_plan_is_refused(plans):
    plan = PlanRegistry().make(("a",), (1,))
    plans.make(("a",), (1,))
    with pytest.raises(PlanError, match="never made here"):
        plans.consume(plan, total_rows=1, digest=plan.layout_digest)
