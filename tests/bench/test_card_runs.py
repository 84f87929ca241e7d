"""The card's whole runs on tiny shapes on the CPU: every contender runs, and what binds is said."""

import dataclasses
import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import card_runs  # noqa: E402
import contenders  # noqa: E402
import sequential  # noqa: E402
from torch_models import LLAMA_2_7B  # noqa: E402

from tensorrt_llm_ext.recipes.contract import Limits  # noqa: E402

TINY = dataclasses.replace(LLAMA_2_7B, num_layers=8, hidden_size=32, intermediate_size=48, num_heads=4, num_kv_heads=4, head_dim=16, vocab_size=99)
LIMITS = Limits(1024, 8, 512, 1 << 40)


@pytest.fixture(autouse=True)
def one_call(monkeypatch):
    monkeypatch.setattr(contenders, "RUNS", 1)


def names(sitting):
    return [row["name"] for row in sitting["rows"]]


def test_a_run_to_lance_lies_between_two_timings_of_the_card(tmp_path):
    found = card_runs.vectors(tmp_path, 20, TINY, LIMITS)
    assert names(found) == [f"llama-2-7b fp8 {what}" for what in ("passes, before", "run to Lance", "passes, after")]
    assert len(found["ratios"]) == 2 and not (tmp_path / "vectors").exists()


def test_states_are_dropped_and_stored_in_turn_and_what_binds_is_said(tmp_path):
    notes = []
    found = card_runs.states(tmp_path, 4, notes, TINY, LIMITS, num_rounds=1)
    runs = [f"llama-2-7b fp8 eagle3 {what}" for what in ("passes", "run, dropped", "run to disk", "run to memory")]
    assert set(names(found)) == {*runs, "dd to disk", "dd to memory"}
    assert len(notes) == 2 and all("binds, and the run reaches" in note for note in notes)
    assert not (tmp_path / "out").exists() and not (tmp_path / "bench-dd").exists()


def test_the_lower_limit_binds():
    ratios = {"ours / card": 0.5, "ours / dd": 0.9}
    assert card_runs._binding(ratios, "ours", {"the engine": "card", "the disk": "dd"}) == "ours: the disk binds, and the run reaches 0.900 of it"


def test_a_run_that_is_not_whole_is_no_figure(tmp_path, monkeypatch):
    monkeypatch.setattr(card_runs, "write_ids", lambda path, *_: path.write_text('{"ids": [1, 2]}\n{"ids": []}\n'))
    with pytest.raises(SystemExit, match="the run is not whole"):
        card_runs.vectors(tmp_path, 2, TINY, LIMITS)


def test_dd_leaves_nothing(tmp_path):
    assert sequential.dd_speed(tmp_path / "file", 1) > 0 and list(tmp_path.iterdir()) == []
