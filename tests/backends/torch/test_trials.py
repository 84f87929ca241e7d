"""Trials of algorithms: the quickest wins after a long run, what was found is kept, and no choice changes a byte."""

import json
from types import SimpleNamespace

import pytest
import torch

from tensorrt_llm_ext.backends.torch import cublaslt, plain, trials
from tensorrt_llm_ext.backends.torch.values import COUNTER_BYTES, FP8, Linear, Rows


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "tensorrt_llm_ext" / "trials.json"


@pytest.fixture
def a_card(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A card")


@pytest.fixture
def clock(monkeypatch):
    """Calls take what they say: a time for short runs, and one for long ones."""

    def elapsed(call, count):
        short, long = call()
        return count * (long if count * short > trials._SHORT_MS else short)

    monkeypatch.setattr(trials, "_elapsed", elapsed)


@pytest.mark.parametrize(
    ("times", "best"),
    [
        ([(1, 1)], 0),
        ([(1, 2), (1.1, 1.5), (1.2, 1.8)], 1),  # the power that it draws slows the first one
        ([(9, 1), *[(1, 2)] * 7], 0),  # the library's own takes part to the end
        ([(2, 3), *[(1, 2)] * 5, (9, 1)], 1),  # too slow at first
    ],
)
def test_the_quickest_is_the_one_that_wins_a_long_run(clock, times, best):
    assert trials.quickest([lambda time=time: time for time in times]) == best


def test_what_was_found_is_kept_by_card(cache, a_card, monkeypatch):
    assert trials.kept("a shape") is None
    trials.keep("a shape", [1, 1 << 63])
    trials.keep("another", [2])
    assert trials.kept("a shape") == [1, 1 << 63] and trials.kept("another") == [2]
    assert [*cache.parent.iterdir()] == [cache]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Another card")
    assert trials.kept("a shape") is None


def test_what_a_product_was_found_to_take_is_another_products_or_librarys_no_more(monkeypatch):
    def described(version, *kind):
        monkeypatch.setattr(cublaslt, "_library", lambda: (SimpleNamespace(cublasLtGetVersion=lambda: version), None))
        return cublaslt._described(kind)

    kinds = [(64, 32, FP8, False), (32, 64, FP8, False), (64, 32, torch.bfloat16, False), (64, 32, FP8, True)]
    assert len({described(version, *kind) for version in (130100, 130200) for kind in kinds}) == 2 * len(kinds)


@pytest.mark.parametrize("damage", ["", "{", "[]", '"words"'])
def test_a_damaged_file_is_written_anew(cache, a_card, damage):
    cache.parent.mkdir()
    cache.write_text(damage)
    assert trials.kept("a shape") is None
    trials.keep("a shape", [3])
    assert json.loads(cache.read_text()) == {"A card: a shape": [3]}


def test_a_folder_that_cannot_be_written_costs_no_more_than_the_trial(cache, a_card):
    cache.parent.parent.rmdir()
    cache.parent.parent.write_text("a file where the folder should be")
    trials.keep("a shape", [3])
    assert trials.kept("a shape") is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="products are the vendor's library's: no CUDA card")
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
def test_a_chosen_algorithm_gives_the_bytes_of_the_library_s_first(cache, monkeypatch, dtype):
    monkeypatch.setattr(cublaslt, "_chosen", {})
    generator = torch.Generator("cuda").manual_seed(0)

    def values(*shape):
        drawn = torch.randn(*shape, generator=generator, device="cuda")
        return plain.quantised(drawn) if dtype == FP8 else (drawn.to(dtype), None)

    rows = Rows(*values(2048, 512), counter=torch.zeros(COUNTER_BYTES, dtype=torch.uint8, device="cuda"))
    weights = [values(1024, 512) for _ in range(2)]
    linears = [Linear(weight, None if scales is None else scales.T.contiguous()) for weight, scales in weights]
    if not cublaslt.can_multiply(linears[0]):
        pytest.skip("this card does not multiply in this type")
    out, expected = (torch.zeros(2048, 1024, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    cublaslt.multiply(rows, linears[0], expected, adds=False)
    tried = []
    monkeypatch.setattr(trials, "quickest", lambda calls: tried.append([call() for call in calls]) or len(calls) - 1)
    cublaslt.try_algorithms(rows, linears, out, adds=True)
    assert len(tried) == 1 and len(tried[0]) > 1 and len(json.loads(cache.read_text())) == 1
    cublaslt.multiply(rows, linears[0], out, adds=False)
    assert torch.equal(out, expected)
    cublaslt._chosen.clear()
    cublaslt.try_algorithms(rows, linears, out, adds=True)
    assert len(tried) == 1 and len(cublaslt._chosen) == 1  # from the file
    cublaslt.multiply(rows, linears[0], out, adds=False)
    assert torch.equal(out, expected)
