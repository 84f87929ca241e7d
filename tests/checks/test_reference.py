"""The layer-by-layer reference is transformers: the same states as the whole model, the same next token."""

import sys

import numpy as np
import pytest
import tiny
import torch
import transformers

from tensorrt_llm_ext.checkpoint import open_checkpoint
from tensorrt_llm_ext.checks import reference
from tensorrt_llm_ext.checks.reference import next_tokens, reference_source, reference_states, whole_model
from tensorrt_llm_ext.errors import MissingExtra

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS = {
    **{family: (family, {}) for family in tiny.FAMILIES},
    "llama tied, biases": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "bfloat16": ("qwen3", {"dtype": torch.bfloat16}),
}


@pytest.fixture
def sequences():
    """Three sequences of 5, 1 and 90 tokens."""
    return [np.random.default_rng(length).integers(3, 259, length, dtype=np.int32) for length in (5, 1, 90)]


@pytest.fixture(params=VARIANTS)
def folder(request, tmp_path):
    family, config = VARIANTS[request.param]
    return tiny.tiny_checkpoint(tmp_path / "checkpoint", family, **config)


def all_states(checkpoint, sequences, **options):
    return {(layer, norm): states for layer, norm, states in reference_states(checkpoint, sequences, **options)}


def whole_run(folder, sequence):
    """One sequence through the whole model of transformers: every state, the state before the norm, the next token."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    before_norm = []
    model.model.norm.register_forward_pre_hook(lambda _, inputs: before_norm.append(inputs[0][0].numpy()))
    with torch.inference_mode():
        output = model(torch.tensor(sequence[None], dtype=torch.int64), output_hidden_states=True)
    return [state[0].numpy() for state in output.hidden_states], before_norm[0], int(output.logits[0, -1].argmax())


def test_every_state_equals_the_whole_model_and_so_does_the_next_token(folder, sequences):
    with open_checkpoint(folder) as checkpoint:
        states = all_states(checkpoint, sequences)
        tokens = next_tokens(checkpoint, np.stack([state[-1] for state in states[8, "post"]]))
    for i, sequence in enumerate(sequences):
        hidden, before_norm, token = whole_run(folder, sequence)
        expected = {(layer, "pre"): hidden[layer] for layer in range(8)}
        expected |= {(8, "pre"): before_norm, (8, "post"): hidden[8]}
        assert list(states) == list(expected)  # upwards, the norm last
        for place, rows in expected.items():
            np.testing.assert_allclose(states[place][i], rows, rtol=1e-6, atol=1e-6, err_msg=str(place))
        assert tokens[i] == token
    assert not np.allclose(states[8, "pre"][0], states[8, "post"][0], atol=0.1)
    assert not np.allclose(states[7, "pre"][0], states[8, "pre"][0], atol=0.1)


def test_it_stops_at_the_last_layer_asked_for(tmp_path, sequences):
    with open_checkpoint(tiny.tiny_checkpoint(tmp_path / "checkpoint", "llama")) as checkpoint:
        whole = all_states(checkpoint, sequences)
        some = all_states(checkpoint, sequences, last_layer=3)
    assert list(some) == [(0, "pre"), (1, "pre"), (2, "pre"), (3, "pre")]
    np.testing.assert_array_equal(some[3, "pre"][2], whole[3, "pre"][2])


def test_in_float64_it_lies_near_float32_and_is_not_the_same(tmp_path, sequences):
    with open_checkpoint(tiny.tiny_checkpoint(tmp_path / "checkpoint", "llama")) as checkpoint:
        single, double = all_states(checkpoint, sequences), all_states(checkpoint, sequences, dtype="float64")
    difference = np.abs(single[8, "post"][2] - double[8, "post"][2]).max()
    assert double[8, "post"][2].dtype == np.float64 and 0 < difference < 1e-4


def test_a_sequence_is_not_touched_by_its_neighbours(tmp_path, sequences):
    with open_checkpoint(tiny.tiny_checkpoint(tmp_path / "checkpoint", "mistral")) as checkpoint:
        together, alone = all_states(checkpoint, sequences), all_states(checkpoint, sequences[2:])
    np.testing.assert_array_equal(together[8, "post"][2], alone[8, "post"][0])


def test_the_whole_model_that_bench_times_gives_the_reference_states(folder, sequences):
    with open_checkpoint(folder) as checkpoint:
        states = all_states(checkpoint, sequences)
        model = whole_model(checkpoint, "float32")
    with torch.inference_mode():
        found = model(torch.tensor(sequences[0][None], dtype=torch.int64)).last_hidden_state[0].numpy()
    np.testing.assert_allclose(found, states[8, "post"][0], rtol=1e-6, atol=1e-6)


def test_a_gguf_file_runs_with_the_sizes_that_transformers_reads_from_it_and_knows_a_capital():
    path = tiny.smollm2_gguf()
    theirs = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    with open_checkpoint(path) as checkpoint:
        ours = reference._config(checkpoint)
        tokenizer = checkpoint.tokenizer()
        (ids,) = tokenizer.encode_batch(["The capital of France is"], special_tokens=True)
        states = all_states(checkpoint, [ids])
        (token,) = next_tokens(checkpoint, states[30, "post"][0][-1:])
    same = ["model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rope_parameters"]
    same += ["num_key_value_heads", "head_dim", "vocab_size", "rms_norm_eps", "tie_word_embeddings", "max_position_embeddings"]
    for name in same:
        assert getattr(ours, name) == pytest.approx(getattr(theirs, name)), name
    assert token == tokenizer.encode_batch([" Paris"], special_tokens=False)[0][0]


def test_the_next_token_is_the_same_however_the_output_head_is_cut(tmp_path, sequences, monkeypatch):
    with open_checkpoint(tiny.tiny_checkpoint(tmp_path / "checkpoint", "llama")) as checkpoint:
        rows = np.random.default_rng(0).normal(size=(50, 48)).astype(np.float32)
        whole = next_tokens(checkpoint, rows)
        monkeypatch.setattr(reference, "_HEAD_ROWS", 100)
        assert (next_tokens(checkpoint, rows) == whole).all() and len(set(whole // 100)) == 3


def test_the_source_names_the_version():
    assert reference_source() == f"transformers {transformers.__version__}"


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_without_torch_or_transformers_the_extra_is_named(tmp_path, sequences, monkeypatch, package):
    folder = tiny.tiny_checkpoint(tmp_path / "checkpoint", "llama")
    monkeypatch.setitem(sys.modules, package, None)
    with open_checkpoint(folder) as checkpoint, pytest.raises(MissingExtra, match="needs torch and transformers") as error:
        next(reference_states(checkpoint, sequences))
    assert "[verify]" in error.value.fix
