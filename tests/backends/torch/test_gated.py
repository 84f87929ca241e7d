"""The product with SwiGLU in its epilogue: where it is taken, and on a Hopper card that it is right."""

import os
import sys
from dataclasses import replace
from importlib import metadata

import pytest
import torch

from tensorrt_llm_ext.backends.torch import gated, plain, trials
from tensorrt_llm_ext.backends.torch.values import FP8, Linear, Rows
from tensorrt_llm_ext.errors import BackendError

@pytest.fixture
def fresh():
    gated._epilogues.cache_clear()
    yield
    gated._epilogues.cache_clear()


@pytest.mark.parametrize(
    ("change", "serves"),
    [
        ({}, True),
        ({"weight": torch.zeros(160, 96, dtype=FP8)}, True),
        ({"weight": torch.zeros(160, 96)}, False),  # float32
        ({"weight": torch.zeros(160, 100, dtype=torch.bfloat16)}, False),  # rows of 200 bytes
        ({"weight": torch.zeros(168, 96, dtype=torch.bfloat16)}, False),  # results of 84 values
        ({"bias": torch.zeros(160, dtype=torch.bfloat16)}, False),
    ],
)
def test_it_serves_layers_that_the_card_can_copy(monkeypatch, change, serves):
    monkeypatch.setattr(gated, "_epilogues", object)
    assert gated.can_multiply(replace(Linear(torch.zeros(160, 96, dtype=torch.bfloat16)), **change)) is serves


@pytest.mark.parametrize(("version", "capability"), [(None, (9, 0)), ("0.7.0", (9, 0)), ("0.6.5", (10, 0)), ("0.6.5", None)])
def test_it_is_left_without_quack_and_on_cards_that_it_never_ran_on(monkeypatch, fresh, version, capability):
    def installed(name):
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", installed)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert not gated.can_multiply(Linear(torch.zeros(160, 96, dtype=torch.bfloat16)))


def test_a_broken_installation_says_what_to_do(monkeypatch, fresh):
    monkeypatch.setattr(metadata, "version", lambda name: "0.6.5")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.delitem(sys.modules, "tensorrt_llm_ext.backends.torch.epilogues", raising=False)
    monkeypatch.setitem(sys.modules, "quack", None)
    with pytest.raises(BackendError, match=r"QuACK 0.6.5 is installed, but it does not import(.|\n)*tensorrt_llm_ext\[hopper\]"):
        gated.can_multiply(Linear(torch.zeros(160, 96, dtype=torch.bfloat16)))


on_a_hopper_card = pytest.mark.skipif(not torch.cuda.is_available() or gated._epilogues() is None, reason="a Hopper card and QuACK")


def linear_and_rows(is_fp8, num_rows=1000, size_in=96, size_out=160):
    generator = torch.Generator("cuda").manual_seed(0)
    weight, x = (
        torch.randn(rows, size_in, generator=generator, device="cuda", dtype=torch.bfloat16) for rows in (size_out, num_rows)
    )
    if not is_fp8:
        return Linear(weight * size_in**-0.5), Rows(x)
    values, scales = plain.quantised(weight.float() * size_in**-0.5)
    return Linear(values, scales.T.contiguous()), Rows(*plain.quantised(x.float()))


def wide(linear, rows):
    return (rows.values, rows.scales), (linear.weight, None if linear.scales is None else linear.scales.T)


@pytest.mark.gpu
@on_a_hopper_card
@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("sizes", [(96, 160), (576, 3072), (4096, 1600)])
def test_it_gives_swiglu_of_the_product_in_bytes_that_do_not_depend_on_the_batch(is_fp8, sizes):
    linear, rows = linear_and_rows(is_fp8, 1000, *sizes)
    x, weight = (values.float() * (1 if scales is None else scales) for values, scales in wide(linear, rows))
    gate, up = (x @ weight.T).chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    out = torch.full_like(expected, float("nan"), dtype=torch.bfloat16)
    gated.multiply(rows, linear, out)
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)
    for count in (1, 64, 200, 999):
        part = replace(rows, values=rows.values[:count], scales=None if rows.scales is None else rows.scales[:count])
        few = torch.full_like(out[:count], float("nan"))
        gated.multiply(part, linear, few)
        assert torch.equal(few, out[:count])


@pytest.mark.gpu
@on_a_hopper_card
@pytest.mark.parametrize("is_fp8", [False, True])
def test_a_row_that_is_not_finite_stays_so_and_reaches_no_other(is_fp8):
    linear, rows = linear_and_rows(is_fp8)
    before, after = (torch.zeros(1000, 80, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    gated.multiply(rows, linear, before)
    (rows.scales if is_fp8 else rows.values)[7] = float("nan")
    gated.multiply(rows, linear, after)
    assert after[7].isnan().all()
    others = torch.arange(1000, device="cuda") != 7
    assert torch.equal(before[others], after[others]) and before.isfinite().all()


@pytest.mark.gpu
@on_a_hopper_card
@pytest.mark.skipif("QUACK_CACHE_DIR" in os.environ, reason="QuACK was told where to keep what it compiles")
def test_what_was_compiled_is_kept_in_the_users_cache():
    linear, rows = linear_and_rows(False)
    gated.multiply(rows, linear, torch.empty(1000, 80, device="cuda", dtype=torch.bfloat16))
    assert list((trials.cache_folder() / "quack").rglob("*.o"))
