"""Canaries are valid, deterministic, right, and far from every wrong answer that they claim to tell."""

import numpy as np
import pytest
import tiny
import torch

from tensorrt_llm_ext.builder import canaries as canaries_module
from tensorrt_llm_ext.builder.canaries import LENGTHS, canary_sequences, make_canaries, rows_of
from tensorrt_llm_ext.builder.layerwise import layer_states
from tensorrt_llm_ext.checkpoint import open_checkpoint
from tensorrt_llm_ext.errors import BuildError
from tensorrt_llm_ext.recipes.contract import row_distances
from tensorrt_llm_ext.taps import parse_taps

TAPS = "final@last,final@mean,final:pre@all,layer:0@last,layer:3@last,layer:3@mean,layer:3@all"


def made(folder, taps=TAPS, precision="float32"):
    checkpoint = open_checkpoint(folder)
    return make_canaries(checkpoint, parse_taps(taps, 8), precision, lambda done, total: None, max_seq_len=64)


@pytest.mark.parametrize("vocab_size", [263, 32_000, 49_152, 128_256, 152_064])
def test_the_tokens_are_valid_different_and_the_same_every_time(vocab_size):
    sequences = canary_sequences(vocab_size, 64)
    tokens = np.concatenate(sequences)
    assert tuple(map(len, sequences)) == LENGTHS and 1 in LENGTHS
    assert len(set(tokens.tolist())) == len(tokens) and tokens.dtype == np.int32
    assert vocab_size // 5 < tokens.min() and tokens.max() < vocab_size * 4 // 5
    assert all(np.array_equal(a, b) for a, b in zip(sequences, canary_sequences(vocab_size, 64), strict=True))


def test_an_engine_of_short_sequences_has_short_canaries():
    assert [len(sequence) for sequence in canary_sequences(1000, 4)] == [4, 1, 4, 3]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_rows_are_the_float32_states(family, checkpoints):
    sequences = canary_sequences(263, 64)
    states = {(k, norm): s for k, norm, s in layer_states(open_checkpoint(checkpoints[family]), sequences)}
    for index, canary in enumerate(made(checkpoints[family])):
        assert canary.token_ids == tuple(sequences[index].tolist()) and canary.source == "graph-fp32"
        for state in canary.states:
            assert np.array_equal(state.rows, rows_of(states[state.tap.layer, state.tap.norm][index], state.tap.rows))


def test_a_confusion_is_the_distance_to_the_nearest_wrong_answer(checkpoints):
    """Checked against wrong answers that are made here, one by one."""
    sequences = canary_sequences(263, 64)
    states = {(k, norm): s for k, norm, s in layer_states(open_checkpoint(checkpoints["llama"]), sequences)}
    first = made(checkpoints["llama"])[0]
    wrong = {
        "final@last": [states[8, "pre"][0][-1:], states[7, "pre"][0][-1:], states[8, "post"][0][-2:-1], states[8, "post"][1]],
        "layer:3@last": [states[2, "pre"][0][-1:], states[4, "pre"][0][-1:], states[3, "pre"][2][:1]],
        "layer:3@mean": [states[3, "pre"][0][:-1].mean(0, keepdims=True), states[3, "pre"][2].mean(0, keepdims=True)],
        "layer:3@all": [np.roll(np.concatenate(states[3, "pre"]), -1, axis=0)[:5], states[4, "pre"][0]],
    }
    for state in first.states:
        spelling = state.tap.spelling(8)
        for rows in wrong.get(spelling, []):
            assert state.confusion <= row_distances(rows, state.rows).max() + 1e-6, spelling
        assert state.confusion >= 4 * state.tolerance and state.confusion_with


def test_states_that_cannot_tell_are_left_out_and_two_must_remain(checkpoints, monkeypatch):
    confusions = sorted(s.confusion for canary in made(checkpoints["llama"], "final@last") for s in canary.states)
    assert len(confusions) == 4
    monkeypatch.setitem(canaries_module.TOLERANCES, "float32", (confusions[1] + confusions[2]) / 2 / 4)
    telling = [len(canary.states) for canary in made(checkpoints["llama"], "final@last")]
    assert sorted(telling) == [0, 0, 1, 1]
    monkeypatch.setitem(canaries_module.TOLERANCES, "float32", (confusions[2] + confusions[3]) / 2 / 4)
    with pytest.raises(BuildError, match="cannot tell 'final@last' of 'llama'") as error:
        made(checkpoints["llama"], "final@last")
    assert error.value.found == "1" and "2 canaries" in error.value.expected


def test_a_model_whose_layer_does_nothing_is_refused(tmp_path):
    folder = tiny.tiny_checkpoint(tmp_path / "dead", "llama")
    model = tiny.tiny_model("llama")
    with torch.no_grad():
        model.model.layers[3].self_attn.o_proj.weight.zero_()
        model.model.layers[3].mlp.down_proj.weight.zero_()
    model.save_pretrained(folder)
    with pytest.raises(BuildError, match="cannot tell 'layer:3@last'"):
        made(folder, "layer:3@last")
    assert made(folder, "layer:2@last")


def test_a_broken_model_is_refused_with_its_layer(tmp_path):
    folder = tiny.tiny_checkpoint(tmp_path / "nan", "llama")
    model = tiny.tiny_model("llama")
    with torch.no_grad():
        model.model.layers[4].mlp.up_proj.weight[0, 0] = float("nan")
    model.save_pretrained(folder)
    with pytest.raises(BuildError, match="after layer 5 of 'nan' are not finite"):
        made(folder, "final@last")
    assert made(folder, "layer:3@last")  # its layers and their neighbours are whole
