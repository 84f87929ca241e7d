"""verify passes an engine of its checkpoint, and says where and how far when a tap, a weight or a row is not what it claims."""

import dataclasses
import json
import os
import sys

import numpy as np
import pytest
import tiny
import transformers

from tensorrt_llm_ext.builder import build, build_engine, canaries
from tensorrt_llm_ext.checkpoint import open_checkpoint
from tensorrt_llm_ext.checks import update_canaries, verify
from tensorrt_llm_ext.checks.rounding import SecondOpinion
from tensorrt_llm_ext.errors import CanaryError, CheckpointError, EngineError, MissingExtra, VerificationFailed
from tensorrt_llm_ext.recipes import Recipe, read_contract
from tensorrt_llm_ext.results.record import Failure
from tensorrt_llm_ext.runtime import Session


def verified(engine_path, checkpoint_path, items):
    with open_checkpoint(checkpoint_path) as checkpoint, Session.open(engine_path, prove=False) as session:
        return verify(session, checkpoint, items)


def swap_taps(first, second):
    """Let two outputs of the contract change their names for the same tensors."""

    def change(contract):
        one, two = (next(t for t in contract["tensors"] if t["name"] == name) for name in (first, second))
        one["tap"], two["tap"] = two["tap"], one["tap"]

    return change


def test_an_engine_of_the_checkpoint_passes_on_every_tap(published_engine, checkpoint_path, items):
    result = verified(published_engine, checkpoint_path, items)
    assert result.has_passed
    result.raise_if_failed()
    assert [tap.tap for tap in result.taps] == ["final@last", "layer:3@mean", "layer:4@all", "final:pre@last"]
    assert [tap.num_rows for tap in result.taps] == [5, 5, 63, 5]
    assert all(0 < tap.largest.difference < 1e-4 and tap.smallest_cosine.cosine > 0.9999999 for tap in result.taps)
    assert (result.next_tokens.num_prompts, result.next_tokens.num_different) == (5, 0)
    assert (result.num_prompts, result.num_tokens, result.dtype) == (5, 63, "float32")
    assert result.source == f"transformers {transformers.__version__}"


def test_the_result_is_json_and_says_whether_it_passed(published_engine, checkpoint_path, items):
    value = json.loads(json.dumps(verified(published_engine, checkpoint_path, items).to_dict()))
    assert value["has_passed"] is True and value["taps"][0]["smallest_cosine"]["request_id"] in {i.request_id for i in items}


def test_a_float16_engine_passes_within_its_own_tolerance(checkpoint_path, tmp_path, items):
    build_engine(checkpoint_path, tmp_path / "engine", precision="float16", max_seq_len=256)
    result = verified(tmp_path / "engine", checkpoint_path, items)
    assert result.has_passed and result.taps[0].largest.difference > 1e-4


def test_an_fp8_engine_is_held_to_what_fp8_promises(checkpoint_path, tmp_path, items, monkeypatch):
    monkeypatch.setitem(canaries.TOLERANCES, "fp8", 0.02)  # a tiny random model's states lie too near for the real one
    monkeypatch.setattr(build, "check_fp8_canaries", lambda *given: 0.0)  # and FP8 moves them farther
    (tmp_path / "text.txt").write_text("Words to calibrate on, of which there are a few.\nAnd a second line.\n")
    recipe = Recipe(precision="fp8", fp8_harm=1e-4, max_seq_len=256, taps="final@last,final@all")
    build_engine(checkpoint_path, tmp_path / "engine", recipe=recipe, calibration=tmp_path / "text.txt")
    result = verified(tmp_path / "engine", checkpoint_path, items)
    assert result.has_passed and result.dtype == "fp8"
    for tap in result.taps:
        assert 0.998 < tap.mean_cosine < 0.999_999_9 and tap.smallest_cosine.cosine <= tap.lowest_cosine < tap.mean_cosine
    stricter = dataclasses.replace(result, tolerance=dataclasses.replace(result.tolerance, min_mean_cosine=0.999_999_9))
    assert not stricter.has_passed
    with pytest.raises(VerificationFailed, match="too far from transformers .* in the mean, for fp8: final@last, final@all"):
        stricter.raise_if_failed()


def test_a_norm_point_under_the_wrong_name_is_found(engine_path, edit_contract, checkpoint_path, items):
    edit_contract(swap_taps("final_post_last", "final_pre_last"))
    result = verified(engine_path, checkpoint_path, items)
    assert [tap.num_rows_beyond for tap in result.taps] == [5, 0, 0, 5]
    with pytest.raises(VerificationFailed, match=r"final@last \(5 of 5 rows\), final:pre@last \(5 of 5 rows\)") as error:
        result.raise_if_failed()
    assert "of request 'r" in error.value.expected and "away" in error.value.found


def test_a_layer_off_by_one_is_found(engine_path, edit_contract, checkpoint_path, items):
    def shift(contract):
        next(t for t in contract["tensors"] if t["name"] == "layer_004_pre_all")["tap"]["layer"] = 5
        next(tap for tap in contract["taps"] if tap["layer"] == 4)["layer"] = 5

    edit_contract(shift)
    result = verified(engine_path, checkpoint_path, items)
    assert [tap.tap for tap in result.taps if tap.num_rows_beyond] == ["layer:5@all"]


def test_one_damaged_weight_is_found_and_the_layers_before_it_still_pass(engine_path, checkpoint_path, items):
    weights = max(engine_path.iterdir(), key=lambda path: path.stat().st_size)
    with open_checkpoint(checkpoint_path) as checkpoint:
        right = checkpoint.tensor("model.layers.6.mlp.down_proj.weight").tobytes()
    content = weights.read_bytes()
    place = content.find(right)
    assert place > 0
    os.unlink(weights)  # it may be a hard link to the checkpoint's own file
    wrong = np.frombuffer(right, np.float32).copy()
    wrong[:100] += 0.5
    weights.write_bytes(content[:place] + wrong.tobytes() + content[place + len(right) :])
    result = verified(engine_path, checkpoint_path, items)
    assert [tap.tap for tap in result.taps if not tap.num_rows_beyond] == ["layer:3@mean", "layer:4@all"]


def test_rows_of_another_request_are_found(published_engine, checkpoint_path, items, monkeypatch):
    extract = Session.extract

    def swapped(session, items):
        records = list(extract(session, items))
        one, two = (next(r for r in records if r.request_id == name) for name in ("r7", "r12"))
        for record in records:
            other = {"r7": two, "r12": one}.get(record.request_id, record)
            pairs = zip(record.states, other.states, strict=True)
            states = tuple(own if own.tap.rows == "all" else others for own, others in pairs)
            yield dataclasses.replace(record, states=states)

    monkeypatch.setattr(Session, "extract", swapped)
    result = verified(published_engine, checkpoint_path, items)
    assert [tap.num_rows_beyond for tap in result.taps] == [2, 2, 0, 2]
    assert result.next_tokens.num_different > 0


def test_another_next_token_fails_even_where_the_states_pass(published_engine, checkpoint_path, items):
    result = verified(published_engine, checkpoint_path, items)
    other = dataclasses.replace(result.next_tokens, num_different=1, first_different="r7")
    result = dataclasses.replace(result, next_tokens=other)
    with pytest.raises(VerificationFailed, match="another next token") as error:
        result.raise_if_failed()
    assert not result.has_passed and "'r7'" in error.value.found
    loose = dataclasses.replace(result.tolerance, same_next_token=False)
    assert dataclasses.replace(result, tolerance=loose).has_passed


def test_only_rows_that_float64_calls_rounding_are_forgiven(published_engine, checkpoint_path, items):
    result = verified(published_engine, checkpoint_path, items)
    beyond = dataclasses.replace(result.taps[2], num_rows_beyond=1)
    opinion = SecondOpinion("layer:4@all", "r7", 3, 1.5, 1.0, from_float64=0.9, reference_from_float64=0.7)
    with_opinion = dataclasses.replace(result, taps=(beyond,), second_opinions=(opinion,))
    assert with_opinion.has_passed and with_opinion.to_dict()["second_opinions"][0]["is_rounding"] is True
    wrong = dataclasses.replace(opinion, from_float64=1.6)
    assert not dataclasses.replace(with_opinion, second_opinions=(wrong,)).has_passed
    assert not dataclasses.replace(with_opinion, second_opinions=()).has_passed
    elsewhere = dataclasses.replace(opinion, tap="final@last")
    assert not dataclasses.replace(with_opinion, second_opinions=(elsewhere,)).has_passed


def test_without_a_tap_after_the_final_norm_the_note_says_so(tmp_path, checkpoint_path, items):
    build_engine(checkpoint_path, tmp_path / "engine", taps="layer:2@last", max_seq_len=256)
    result = verified(tmp_path / "engine", checkpoint_path, items)
    assert result.has_passed and result.next_tokens is None and "no tap final@last" in result.next_tokens_note


def test_nothing_to_compare_is_a_failure(published_engine, checkpoint_path):
    with pytest.raises(VerificationFailed, match="nothing to compare"):
        verified(published_engine, checkpoint_path, [])


def test_another_checkpoint_is_refused_before_anything_runs(published_engine, tmp_path, items):
    other = tiny.tiny_checkpoint(tmp_path / "other", "qwen3", seed=1)
    with pytest.raises(CheckpointError, match="is not the checkpoint this engine was built from") as error:
        verified(published_engine, other, items)
    assert error.value.expected.startswith("checkpoint sha256:") and error.value.found.startswith("checkpoint sha256:")


def test_without_the_extra_it_says_so_before_anything_runs(published_engine, checkpoint_path, items, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(Session, "extract", None)
    with pytest.raises(MissingExtra, match="needs torch and transformers"):
        verified(published_engine, checkpoint_path, items)


def test_a_request_that_does_not_come_back_is_a_failure(published_engine, checkpoint_path, items, monkeypatch):
    failure = Failure("r7", "test#7", "not_finite", "NaN in final@last")
    monkeypatch.setattr(Session, "extract", lambda session, items: iter([failure]))
    with pytest.raises(VerificationFailed, match="request 'r7' did not come back") as error:
        verified(published_engine, checkpoint_path, items)
    assert error.value.found == "NaN in final@last"


def test_updated_canaries_name_transformers_and_prove_the_engine(engine_path, checkpoint_path):
    before = read_contract(engine_path)
    with open_checkpoint(checkpoint_path) as checkpoint:
        update_canaries(engine_path, before, checkpoint)
    after = read_contract(engine_path)
    assert {canary.source for canary in after.canaries} == {f"transformers {transformers.__version__}"}
    assert [canary.token_ids for canary in after.canaries] == [canary.token_ids for canary in before.canaries]
    assert after.engine_fingerprint() == before.engine_fingerprint()
    for old, new in zip(before.canaries, after.canaries, strict=True):
        for was, now in zip(old.states, new.states, strict=True):
            assert 0 < np.abs(was.rows - now.rows).max() < now.tolerance
    Session.open(engine_path).close()


def test_updated_canaries_expose_an_engine_that_lies(engine_path, edit_contract, checkpoint_path):
    edit_contract(swap_taps("final_post_last", "final_pre_last"))
    with open_checkpoint(checkpoint_path) as checkpoint:
        update_canaries(engine_path, read_contract(engine_path), checkpoint)
    with pytest.raises(CanaryError):
        Session.open(engine_path)


def test_an_engine_that_cannot_be_written_to_keeps_its_canaries(engine_path, checkpoint_path, monkeypatch):
    def refuse(source, target):
        raise OSError(30, "Read-only file system")

    before = (engine_path / "contract.json").read_bytes()
    monkeypatch.setattr(os, "replace", refuse)
    with open_checkpoint(checkpoint_path) as checkpoint, pytest.raises(EngineError, match="could not be replaced"):
        update_canaries(engine_path, read_contract(engine_path), checkpoint)
    assert (engine_path / "contract.json").read_bytes() == before
