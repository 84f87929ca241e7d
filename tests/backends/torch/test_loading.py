"""The fixed scale of attention's rows: no row passes it, however its values are chosen."""

import pytest
import torch

from tensorrt_llm_ext.backends.torch.loading import _linear, with_attended_scale
from tensorrt_llm_ext.backends.torch.plain import normalised
from tensorrt_llm_ext.backends.torch.values import FP8_MAX, Heads, Norm

HEADS, HIDDEN = Heads(4, 2, 8), 48


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_no_value_passes_what_the_scale_holds_and_the_worst_comes_near(is_fp8, has_bias):
    weight, norm = random(HEADS.fused_size, HIDDEN), Norm(random(HIDDEN, seed=1) + 2, 1e-6)
    qkv = _linear([weight], random(HEADS.fused_size, seed=2) if has_bias else None, is_fp8)
    o = with_attended_scale(_linear([random(HIDDEN, HEADS.q_size, seed=3)], None, True), norm, qkv, HEADS)
    values = weight[-HEADS.kv_size :]
    worst = values * norm.weight  # of all rows of its length, the one along W w gives the largest value
    found = normalised(worst, norm) @ values.T + (qkv.bias[-HEADS.kv_size :] if has_bias else 0)
    largest = found.abs().max() / o.input_scale
    assert 0.8 * FP8_MAX < largest <= FP8_MAX


def test_a_product_that_stays_or_brings_its_own_scale_is_left_alone():
    norm, qkv = Norm(torch.ones(HIDDEN), 1e-6), _linear([random(HEADS.fused_size, HIDDEN)], None, True)
    for o in (_linear([random(HIDDEN, HEADS.q_size)], None, False), with_attended_scale(_linear([random(HIDDEN, HEADS.q_size)], None, True), norm, qkv, HEADS)):
        assert with_attended_scale(o, norm, qkv, HEADS) is o
    silent = _linear([torch.zeros(HEADS.fused_size, HIDDEN)], None, True)
    assert with_attended_scale(_linear([random(HIDDEN, HEADS.q_size)], None, True), norm, silent, HEADS).input_scale > 0
