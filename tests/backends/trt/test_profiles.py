"""The ladder that the builder makes is one that the backend accepts, for any limits; a rung too few or too small is not."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_engines import LIMITS, Toy, tensors
from toy_plans import trt_contract

from tensorrt_llm_ext.backends.trt.profiles import Bounds, check_profiles, choose
from tensorrt_llm_ext.builder.ladder import ladder
from tensorrt_llm_ext.errors import ContractError
from tensorrt_llm_ext.recipes.contract import Limits

TENSORS = tensors(Toy())
INPUTS = [tensor for tensor in TENSORS if tensor.role == "input"]


def shapes_of(num_tokens, batch_size, longest):
    sizes = {"T": num_tokens, "B": batch_size, "S": longest}
    return {tensor.name: tuple(sizes[size] for size in tensor.shape) for tensor in INPUTS}


def bounds_of(profiles):
    smallest = shapes_of(1, 1, 1)
    return tuple(Bounds(smallest, shapes_of(p.max_num_tokens, p.max_batch_size, p.max_seq_len)) for p in profiles)


@st.composite
def admitted_limits(draw):
    longest = draw(st.integers(1, 2000))
    num_tokens = draw(st.integers(longest, 20000))
    padded = draw(st.integers(longest, 40000))
    return Limits(num_tokens, draw(st.integers(1, 300)), longest, padded)


@settings(max_examples=60, deadline=None)
@given(admitted_limits(), st.data())
def test_every_batch_within_the_limits_fits_a_rung_of_the_builders_ladder(limits, data):
    rungs = ladder(limits)
    bounds = bounds_of(rungs)
    check_profiles(bounds, TENSORS, trt_contract(Toy(), TENSORS, limits=limits, profiles=rungs))
    longest = data.draw(st.integers(1, limits.max_seq_len))
    batch_size = data.draw(st.integers(1, min(limits.max_batch_size, limits.max_padded_tokens // longest)))
    num_tokens = min(limits.max_num_tokens, batch_size * longest)
    chosen = choose(bounds, shapes_of(num_tokens, batch_size, longest))
    assert rungs[chosen].max_seq_len >= longest


@pytest.mark.parametrize("smallest", [(2, 1, 1), (2, 2, 1), (2, 1, 2)])
def test_a_plan_that_takes_no_batch_of_one_token_is_refused(smallest):
    rungs = ladder(LIMITS)
    bounds = tuple(replace(found, smallest=shapes_of(*smallest)) for found in bounds_of(rungs))
    with pytest.raises(ContractError, match="disagree about the batches") as error:
        check_profiles(bounds, TENSORS, trt_contract(Toy(), TENSORS, limits=LIMITS, profiles=rungs))
    assert "max_num_tokens=1, max_batch_size=1, max_seq_len=1" in error.value.expected and "input_ids [2] to" in error.value.found


@pytest.mark.parametrize("field", ["max_num_tokens", "max_batch_size", "max_seq_len"])
def test_a_rung_that_is_one_short_is_refused(field):
    limits = replace(LIMITS, max_seq_len=300, max_num_tokens=4000, max_padded_tokens=5000)
    rungs = list(ladder(limits))
    rungs[-1] = replace(rungs[-1], **{field: getattr(rungs[-1], field) - 1})
    with pytest.raises(ContractError, match="disagree about the batches"):
        check_profiles(bounds_of(rungs), TENSORS, trt_contract(Toy(), TENSORS, limits=limits, profiles=tuple(rungs)))
