"""Layer by layer in float32 gives transformers' states, for any number of sequences and any stored type."""

import numpy as np
import pytest
import tiny
import torch

from tensorrt_llm_ext.builder import layer_states, layerwise
from tensorrt_llm_ext.checkpoint import open_checkpoint
from tensorrt_llm_ext.errors import BackendError

PLACES = [*((layer, "pre") for layer in range(9)), (8, "post")]


def sequences_of(*lengths):
    rng = np.random.default_rng(2)
    return [rng.integers(3, 263, length).astype(np.int32) for length in lengths]


def expected_states(model, token_ids):
    last = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, args: last.append(args[0]))
    with torch.no_grad():
        *below, post = model.model(torch.from_numpy(token_ids.astype(np.int64))[None], output_hidden_states=True).hidden_states
    hook.remove()
    return [state[0].numpy() for state in (*below, *last, post)]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_state_equals_transformers(family, checkpoints):
    sequences = sequences_of(5, 1, 40, 2)
    expected = [expected_states(tiny.tiny_model(family), token_ids) for token_ids in sequences]
    found = list(layer_states(open_checkpoint(checkpoints[family]), sequences))
    assert [(layer, norm) for layer, norm, _ in found] == PLACES
    for place, (_, _, states) in enumerate(found):
        for state, wanted in zip(states, expected, strict=True):
            assert state.dtype == np.float32 and state.shape == wanted[place].shape
            assert np.abs(state - wanted[place]).max() < 1e-4


def test_a_bfloat16_checkpoint_is_computed_in_float32(tmp_path):
    folder = tiny.tiny_checkpoint(tmp_path, "llama", dtype=torch.bfloat16)
    model = tiny.tiny_model("llama")
    for weight in model.parameters():  # model.to(bfloat16) would round the rope's frequencies too
        weight.data = weight.data.to(torch.bfloat16).float()
    (token_ids,) = sequences_of(9)
    *_, (_, _, states) = layer_states(open_checkpoint(folder), [token_ids])
    assert np.abs(states[0] - expected_states(model, token_ids)[-1]).max() < 1e-4


def test_many_batches_give_the_same_as_one(checkpoints, monkeypatch):
    sequences = sequences_of(5, 30, 1, 12, 12, 3)
    checkpoint = open_checkpoint(checkpoints["qwen2"])
    *_, (_, _, together) = layer_states(checkpoint, sequences)
    monkeypatch.setattr(layerwise, "MAX_PADDED_TOKENS", 24)
    *_, (_, _, divided) = layer_states(checkpoint, sequences)
    batches = layerwise.batches_of(sequences, checkpoint.architecture.vocab_size)
    assert [len(batch.indices["attention_rows"]) for batch in batches] == [1, 1, 2, 2]
    for one, other in zip(together, divided, strict=True):
        assert np.abs(one - other).max() < 1e-5


def test_it_ends_with_the_layer_that_is_asked_for(checkpoints):
    found = list(layer_states(open_checkpoint(checkpoints["llama"]), sequences_of(3), last_layer=2))
    assert [(layer, norm) for layer, norm, _ in found] == PLACES[:3]


def test_what_was_yielded_is_not_written_to_again(checkpoints):
    states = layer_states(open_checkpoint(checkpoints["llama"]), sequences_of(3, 4))
    first = next(states)[2]
    kept = [state.copy() for state in first]
    list(states)
    assert all(np.array_equal(state, copy) for state, copy in zip(first, kept, strict=True))


def test_the_library_s_failure_names_the_layer(checkpoints, monkeypatch):
    checkpoint = open_checkpoint(checkpoints["llama"])
    whole = checkpoint.tensor
    monkeypatch.setattr(checkpoint, "tensor", lambda name: whole(name)[:, :7] if "layers.3.mlp.down" in name else whole(name))
    with pytest.raises(BackendError, match="failed in model.layers.3 of 'llama'") as error:
        list(layer_states(checkpoint, sequences_of(3)))
    assert "down_proj" in error.value.found
