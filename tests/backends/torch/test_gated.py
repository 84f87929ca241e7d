"""The product with SwiGLU in its epilogue: where it is taken, and on a Hopper card that it is right."""

import os
import subprocess
import sys
import tomllib
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from unittest import mock

import pytest
import torch
from packaging.requirements import Requirement

from tensorrt_llm_ext.backends.torch import gated, plain
from tensorrt_llm_ext.backends.torch.values import FP8, Linear, Rows
from tensorrt_llm_ext.errors import BackendError

ROOT = Path(__file__).parents[3]


@pytest.fixture
def hopper(monkeypatch):
    """A Hopper card, as far as one is asked for, and QuACK 0.6.5 by its metadata; nothing is remembered."""
    monkeypatch.setattr(gated, "_is_hopper", lambda device: True)
    monkeypatch.setattr(metadata, "version", lambda name: "0.6.5")
    forget = gated._epilogues.cache_clear
    forget()
    yield monkeypatch
    forget()


LINEAR = Linear(torch.zeros(160, 96, dtype=torch.bfloat16))


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
def test_it_serves_layers_that_the_card_can_copy(hopper, change, serves):
    hopper.setattr(gated, "_epilogues", object)
    assert gated.can_multiply(replace(LINEAR, **change)) is serves


@pytest.mark.parametrize("version", [metadata.PackageNotFoundError("quack-kernels"), None, "0.6.4", "0.7.0"])
def test_it_is_left_without_a_quack_that_it_was_written_for(hopper, version):
    hopper.setattr(metadata, "version", mock.Mock(side_effect=[version]))  # None: its metadata are gone
    assert not gated.can_multiply(LINEAR)


@pytest.mark.parametrize(("device", "capability", "serves"), [("cuda", (9, 0), True), ("cuda", (10, 0), False), ("cpu", None, False)])
def test_it_is_left_on_devices_that_it_never_ran_on(monkeypatch, device, capability, serves):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert gated._is_hopper(torch.device(device)) is serves


def test_the_versions_are_those_of_the_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (quack,) = (Requirement(line) for line in extras["hopper"] if "quack" in line)
    assert quack.specifier == gated._VERSIONS


@pytest.mark.parametrize("error", [None, OSError("no libtvm_ffi.so")])
def test_a_broken_installation_says_what_to_do(hopper, error):
    hopper.delitem(sys.modules, "tensorrt_llm_ext.backends.torch.epilogues", raising=False)
    hopper.delattr("tensorrt_llm_ext.backends.torch.epilogues", raising=False)

    class Broken:
        def find_spec(self, name, path=None, target=None):
            if name == "quack":
                raise error

    hopper.delitem(sys.modules, "quack", raising=False)
    hopper.setitem(sys.modules, "quack", None) if error is None else hopper.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(BackendError, match=r"QuACK 0.6.5 is installed, but it does not import(.|\n)*tensorrt_llm_ext\[hopper\]"):
        gated.can_multiply(LINEAR)


def is_here():
    return torch.cuda.is_available() and gated._is_hopper(torch.device("cuda", 0)) and gated._epilogues() is not None


on_a_hopper_card = pytest.mark.skipif(not is_here(), reason="a Hopper card and QuACK")


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


_TWO_THREADS = """
import threading, torch
from tensorrt_llm_ext.backends.torch import gated
from tensorrt_llm_ext.backends.torch.values import FP8, Linear, Rows
def run(dtype, scales):
    rows = Rows(torch.zeros(64, 96, device="cuda").to(dtype), torch.ones(64, 1, device="cuda") if scales else None)
    linear = Linear(torch.zeros(160, 96, device="cuda").to(dtype), torch.ones(1, 160, device="cuda") if scales else None)
    gated.multiply(rows, linear, torch.empty(64, 80, device="cuda", dtype=torch.bfloat16))
    torch.cuda.synchronize()
threads = [threading.Thread(target=run, args=args) for args in ((FP8, True), (torch.bfloat16, False))]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


@pytest.mark.gpu
@on_a_hopper_card
def test_two_threads_may_compile_at_once_and_both_kernels_are_kept_in_the_users_cache(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "QUACK_CACHE_DIR"} | {"XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", _TWO_THREADS], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and "Error" not in done.stderr, done.stderr
    assert len(list((tmp_path / "tensorrt_llm_ext" / "quack").rglob("*.o"))) == 2
