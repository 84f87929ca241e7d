"""The fidelity script on a tiny model on the CPU: every tap of every precision, against float32, over every prompt."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import tiny  # noqa: E402
import torch_fidelity  # noqa: E402

from tensorrt_llm_ext.checkpoint import open_checkpoint  # noqa: E402

HARM = 6e-4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny.tiny_checkpoint(tmp_path_factory.mktemp("fidelity") / "checkpoint", "qwen3")


@pytest.fixture
def contract(checkpoint, tmp_path):
    def write(harm=HARM):
        with open_checkpoint(checkpoint) as opened:
            facts = {"harm_allowed": harm, "kept_products": {"7.down": 0.1, "0.qkv": 0.2}}
            value = {"fingerprints": {"checkpoint": opened.fingerprint()}, "build": {"calibration": facts}}
        (tmp_path / "contract.json").write_text(json.dumps(value))
        return tmp_path / "contract.json"

    return write


def test_every_tap_of_every_precision_is_compared_over_every_prompt(checkpoint, contract, tmp_path, capsys):
    texts = ["one", "A second, longer prompt.", "the third"]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    report = torch_fidelity.measured(checkpoint, HARM, contract(), tmp_path / "prompts.jsonl")
    assert report["num_prompts"] == 3 and report["kept"] == ("7.down", "0.qkv")
    assert list(report["cosines"]) == ["bfloat16", "fp8, 2 of 32 products kept", "fp8 everywhere"]
    rows = {"final@last": 3, "final@mean": 3, "final@all": report["num_tokens"], "layer:4@last": 3, "layer:4@all": report["num_tokens"]}
    for taps in report["cosines"].values():
        assert {tap: row["rows"] for tap, row in taps.items()} == rows
        assert all(row["min"] <= row["quantile"] <= 1.000001 and row["min"] <= row["mean"] for row in taps.values())
    bfloat16, kept, everywhere = (taps["final@all"]["mean"] for taps in report["cosines"].values())
    assert 1 > bfloat16 > 0.9995 and bfloat16 > kept > everywhere > 0.9
    assert not any("one scale" in name for name in report["cosines"])
    torch_fidelity.print_report({"machine": {"card": "none"}} | report)
    assert "3 prompts" in capsys.readouterr().out


def test_scales_of_inputs_that_are_fixed_are_compared_where_they_are_asked_for(checkpoint, contract, tmp_path, monkeypatch):
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"text": "one, two"}) + "\n")
    scales = {f"{layer}.{part}": 0.002 for layer in range(8) for part in torch_fidelity.PRODUCTS}  # they saturate
    monkeypatch.setattr(torch_fidelity, "_calibrated_inputs", lambda checkpoint: scales)
    report = torch_fidelity.measured(checkpoint, HARM, contract(), tmp_path / "prompts.jsonl", has_fixed=True)
    by_row, fixed = (report["cosines"][f"fp8 everywhere{more}"] for more in ("", ", one scale for all rows of an input"))
    assert fixed["final@all"]["mean"] < by_row["final@all"]["mean"] - 0.01


def test_other_roundings_give_other_cosines_and_the_lowest_of_each_draw_is_told(checkpoint, contract, tmp_path, monkeypatch, capsys):
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ("one", "A longer prompt.")))
    monkeypatch.setattr(torch_fidelity, "LEAST", 2.0)
    report = torch_fidelity.measured(checkpoint, HARM, contract(), tmp_path / "prompts.jsonl", num_draws=3)
    assert list(report["draws"]) == list(report["cosines"])
    for name, drawn in report["draws"].items():
        assert drawn["num_draws"] == 3 and drawn["share_of_draws_at_least"] == 0
        assert drawn["share_below_by_prompt"] == {"0": 1.0, "1": 1.0}
        assert drawn["lowest"]["min"] < drawn["lowest"]["median"] < drawn["lowest"]["max"]
        # Moved by no more than its own rounding does: a draw is as near to float32 as the run itself.
        assert 1 - drawn["lowest"]["median"] < 4 * (1 - report["cosines"][name]["final@last"]["min"])
    torch_fidelity.print_report({"machine": {"card": "none"}} | report)
    assert "of 3 draws" in capsys.readouterr().out


def test_the_lowest_of_the_draws_is_counted_against_what_is_asked_for():
    drawn = torch_fidelity._lowest(torch.tensor([[0.999, 0.996], [0.999, 0.99], [0.998, 0.997], [0.9951, 0.999]]))
    assert drawn["share_of_draws_at_least"] == 0.75 and drawn["share_below_by_prompt"] == {"1": 0.25}
    assert drawn["lowest"]["min"] == pytest.approx(0.99) and drawn["lowest"]["max"] == pytest.approx(0.997)


def test_a_contract_of_another_recipe_is_refused(checkpoint, contract):
    with open_checkpoint(checkpoint) as opened, pytest.raises(SystemExit, match="another checkpoint or recipe"):
        torch_fidelity._kept(opened, contract(harm=1e-3), HARM)
