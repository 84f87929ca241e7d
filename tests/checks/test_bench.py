"""bench times the same work for everyone: every contender answers every prompt, and the answers agree."""

import json
import sys
import time
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import tiny
import torch

from tensorrt_llm_ext.checkpoint import open_checkpoint
from tensorrt_llm_ext.checks import bench, reference_states
from tensorrt_llm_ext.checks.bench import COMPILED, LIMIT, Timing, _add_compiled, _card, _ratios, _refuse_too_large
from tensorrt_llm_ext.checks.padded import padded_last_states
from tensorrt_llm_ext.checks.reference import whole_model
from tensorrt_llm_ext.errors import CheckpointError, InputError, VerificationFailed
from tensorrt_llm_ext.runtime import Session


MODULE = sys.modules["tensorrt_llm_ext.checks.bench"]  # the room exports a function of this name


@pytest.fixture(scope="module")
def run_bench(published_engine, checkpoint_path, items):
    def run(**options):
        with open_checkpoint(checkpoint_path) as checkpoint, Session.open(published_engine, num_threads=1) as session:
            return bench(session, checkpoint, items, num_threads=1, **options)

    return run


@pytest.fixture(scope="module")
def measured(run_bench):
    """Two rounds, whoever is slow, and what ``on_round`` heard."""
    heard = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MODULE, "SLOW", float("inf"))
        patch.setattr(MODULE, "SLOW_BFLOAT16", float("inf"))
        return run_bench(num_rounds=2, on_round=lambda name, done, total: heard.append((name, done, total))), heard


def test_every_contender_is_timed_in_every_round_and_answers_alike(measured):
    result, heard = measured
    assert [(t.name, t.dtype, t.batching) for t in result.timings] == [
        ("this engine", "float32", "packed by token budget"),
        ("transformers", "float32", "padded, batch 16, in the order given"),
        ("transformers", "float32", "padded, batch 8, sorted by length"),
        ("transformers", "float32", "padded, batch 16, sorted by length"),
        ("transformers", "bfloat16", "padded, batch 16, in the order given"),
        ("transformers", "bfloat16", "padded, batch 8, sorted by length"),
        ("transformers", "bfloat16", "padded, batch 16, sorted by length"),
    ]
    assert [done for _, done, _ in heard] == [0] * 7 + [1] * 7  # interleaved
    for timing in result.timings:
        assert len(timing.round_seconds) == 2
        assert timing.tokens_per_s == pytest.approx(result.num_tokens / np.median(timing.round_seconds))
        assert timing.min_cosine > (0.999999 if timing.dtype == "float32" else 0.99)
    assert (result.num_prompts, result.num_tokens, result.longest) == (5, 63, 40)
    assert torch.get_num_threads() == result.num_threads == 1


def test_the_result_is_json_with_the_machine_and_the_versions(measured):
    machine = json.loads(json.dumps(measured[0].to_dict()))["machine"]
    assert {"cpu", "cores", "python", "onnxruntime", "torch", "transformers", "tensorrt_llm_ext", "commit"} <= machine.keys()
    assert machine["torch"] == torch.__version__ and machine["cpu"]


def test_who_is_far_slower_than_ours_runs_once(run_bench, monkeypatch):
    def slowly(*arguments, **options):
        time.sleep(0.2)
        return padded_last_states(*arguments, **options)

    monkeypatch.setattr(MODULE, "padded_last_states", slowly)
    monkeypatch.setattr(MODULE, "SLOW", 1.0)
    monkeypatch.setattr(MODULE, "SLOW_BFLOAT16", 0.0)
    result = run_bench(num_rounds=3)
    assert [len(timing.round_seconds) for timing in result.timings] == [3, 1, 1, 1]


def test_where_bfloat16_is_slow_it_is_left_out_and_the_note_says_so(run_bench, monkeypatch):
    monkeypatch.setattr(MODULE, "SLOW_BFLOAT16", 0.0)
    result = run_bench(num_rounds=1)
    assert {timing.dtype for timing in result.timings} == {"float32"} and len(result.timings) == 4
    assert "transformers bfloat16 is left out" in result.notes[0]
    assert result.ratios.keys() == {"float32_in_order", "float32_sorted"}


def test_another_checkpoint_is_refused_before_anything_runs(published_engine, tmp_path, items, monkeypatch):
    other = tiny.tiny_checkpoint(tmp_path / "other", "qwen3", seed=1)
    monkeypatch.setattr(Session, "extract", None)
    with open_checkpoint(other) as checkpoint, Session.open(published_engine, num_threads=1) as session:
        with pytest.raises(CheckpointError, match="is not the checkpoint this engine was built from"):
            bench(session, checkpoint, items, num_threads=1)


def test_ratios_take_the_better_of_the_sorted_batches():
    speeds = [("float32", 900), ("float32", 300), ("float32", 500), ("float32", 600), ("bfloat16", 450)]
    speeds += [("bfloat16", 1200), ("bfloat16", 1000)]
    timings = [Timing("transformers", dtype, "", speed, 1, (1.0,), None) for dtype, speed in speeds]
    others = [Timing(name, "", "", speed, 1, (1.0,), None) for name, speed in ((COMPILED, 1800), (LIMIT, 1000))]
    assert _ratios(timings + others) == {
        "bfloat16_compiled": 0.5,
        "products_alone": 0.9,
        "float32_in_order": 3.0,
        "float32_sorted": 1.5,
        "bfloat16_in_order": 2.0,
        "bfloat16_sorted": 0.75,
    }


def test_transformers_compiled_is_a_contender_or_a_note(checkpoint_path, items, monkeypatch):
    with open_checkpoint(checkpoint_path) as checkpoint:
        model = whole_model(checkpoint, "float32")
    contenders, notes = [], []
    monkeypatch.setattr(torch, "compile", lambda model, dynamic: model)
    _add_compiled(contenders, notes, model, items)
    (compiled,) = contenders
    expected = padded_last_states(model, items, batch_size=16, is_sorted=True)
    for request_id, row in compiled.run(items).items():
        np.testing.assert_allclose(row, expected[request_id], rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(torch, "compile", lambda model, dynamic: None)  # what is called then fails
    _add_compiled(contenders, notes, model, items)
    assert len(contenders) == 1 and notes[0].startswith("transformers compiled is left out: AttributeError: ")


@pytest.mark.parametrize("is_sorted", [False, True])
def test_padded_batches_give_the_reference_states_whatever_the_order(checkpoint_path, items, is_sorted):
    with open_checkpoint(checkpoint_path) as checkpoint:
        *_, (_, _, expected) = reference_states(checkpoint, [item.token_ids for item in items])
        model = whole_model(checkpoint, "float32")
    found = padded_last_states(model, items, batch_size=2, is_sorted=is_sorted)
    for item, rows in zip(items, expected, strict=True):
        np.testing.assert_allclose(found[item.request_id], rows[-1], rtol=1e-4, atol=1e-5)


def test_a_contender_that_loses_a_prompt_is_not_timed(run_bench, monkeypatch):
    extract = Session.extract
    monkeypatch.setattr(Session, "extract", lambda session, items: list(extract(session, items))[1:])
    with pytest.raises(VerificationFailed, match="did not answer every prompt") as error:
        run_bench(num_rounds=1)
    assert (error.value.expected, error.value.found) == ("5 answers", "4 answers")


def test_on_a_card_the_model_must_fit_there_too(checkpoint_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1000, 10**12))
    with open_checkpoint(checkpoint_path) as checkpoint, pytest.raises(InputError, match="the whole model in memory") as error:
        _refuse_too_large(checkpoint, "cuda")
    assert error.value.expected.endswith("GiB of free device memory") and error.value.found == "0.0 GiB"


def test_without_a_tool_that_tells_it_the_driver_is_left_out(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(MODULE.subprocess, "run", lambda *_, **options: SimpleNamespace(stdout="1.2.3\n"))
    assert _card()["driver"] == "1.2.3"
    monkeypatch.setattr(MODULE.subprocess, "run", lambda *_, **options: SimpleNamespace(stdout=""))
    assert _card() == {"card": "a card", "cuda": torch.version.cuda}


def test_a_model_that_does_not_fit_is_refused_before_it_is_loaded(run_bench, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    with pytest.raises(InputError, match="the whole model in memory"):
        run_bench(num_rounds=1)
