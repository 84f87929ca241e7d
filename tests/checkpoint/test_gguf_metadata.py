"""GGUF metadata gives the config that the model has on Hugging Face, or is refused by name."""

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tensorrt_llm_ext.checkpoint import architecture_from_config, open_checkpoint, rope_tables
from tensorrt_llm_ext.errors import DamagedCheckpoint, UnsupportedCheckpoint

LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.fixture
def opened(tmp_path, gguf_model):
    """Open a tiny GGUF model with some metadata changed (a value of None takes the field away)."""

    def open_with(family="llama", *, tensors=None, **fields):
        tiny = gguf_model(family, max_position_embeddings=16384)
        for key, value in fields.items():
            key = key.replace("__", ".")
            tiny.fields[key if key.startswith("general.") else f"{tiny.arch}.{key}"] = value
        tiny.fields = {key: value for key, value in tiny.fields.items() if value is not None}
        tiny.tensors |= tensors or {}
        return open_checkpoint(tiny.write(tmp_path / "model.gguf"))

    return open_with


def rope_of(rope_scaling, theta=10_000.0):
    sizes = dict(vocab_size=288, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4)
    config = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 16384, "head_dim": 32, **sizes}
    return architecture_from_config({**config, "rope_theta": theta, "rope_scaling": rope_scaling}).rope


YARN = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 4096}
HF_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("fields", "rope_scaling"),
    [
        ({}, None),
        ({"rope__scaling__type": "none"}, None),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 2.0}, {"type": "linear", "factor": 2.0}),
        (YARN, HF_YARN),
        ({**YARN, "rope__scaling__yarn_beta_fast": 16.0}, {**HF_YARN, "beta_fast": 16.0}),
        ({**YARN, "rope__scaling__attn_factor": 0.5}, {**HF_YARN, "attention_factor": 0.5 * (1 + 0.1 * np.log(4))}),
    ],
)
def test_rope_scaling_is_that_of_the_hugging_face_config(opened, fields, rope_scaling):
    assert opened(**fields).architecture.rope == rope_of(rope_scaling)


def llama3_factors(factor, original=8192, theta=500_000.0):
    """What a llama3 rope divides the frequencies by, from transformers' own function."""
    config = transformers.LlamaConfig(
        head_dim=32,
        hidden_size=256,
        num_attention_heads=4,
        rope_theta=theta,
        rope_scaling={**LLAMA3, "factor": factor, "original_max_position_embeddings": original},
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
    return ((1 / theta ** (torch.arange(0, 32, 2) / 32)) / scaled).numpy()


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_a_llama3_rope_is_recognised_by_its_factors(opened, factor):
    checkpoint = opened(rope__freq_base=500_000.0, tensors={"rope_freqs.weight": llama3_factors(factor)})
    assert checkpoint.architecture.rope == rope_of({**LLAMA3, "factor": factor}, theta=500_000.0)
    assert "rope_freqs" not in " ".join(info.name for info in checkpoint.tensors())
    cos, _ = rope_tables(checkpoint.architecture, 16)
    assert cos.shape == (16, 16)


@pytest.mark.parametrize(
    "factors",
    [llama3_factors(8.0, original=4096), llama3_factors(8.0)[:-1], np.full(16, 3.0, np.float32)],
    ids=["another original length", "one too few", "constant"],
)
def test_any_other_rope_factors_are_refused(opened, factors):
    with pytest.raises(UnsupportedCheckpoint, match="is not a llama3 rope as Meta released it"):
        opened(rope__freq_base=500_000.0, tensors={"rope_freqs.weight": factors})


def test_sizes_that_follow_from_others_may_be_missing(opened):
    fields = {"attention__head_count_kv": None, "rope__freq_base": None, "rope__dimension_count": None}
    with pytest.raises(DamagedCheckpoint, match="k_proj.weight' in .* has the wrong shape"):  # as many as heads
        opened(**fields)
    assert opened(rope__freq_base=None, rope__dimension_count=None).architecture.rope.theta == 10_000.0


def test_a_sliding_window_is_read(opened):
    assert opened(attention__sliding_window=64).architecture.sliding_window == 64


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"general.architecture": "gemma"}, "architecture 'gemma', a model"),
        ({"general.type": "adapter"}, "architecture 'llama', a adapter"),
        ({"general.type": "mmproj"}, "architecture 'llama', a mmproj"),
    ],
)
def test_a_file_that_is_not_a_model_we_serve_is_refused(tmp_path, gguf_model, fields, words):
    tiny = gguf_model("llama")
    if "general.architecture" in fields:
        tiny.arch = fields.pop("general.architecture")
    tiny.fields |= fields
    with pytest.raises(UnsupportedCheckpoint, match="is not a GGUF model that is served") as error:
        open_checkpoint(tiny.write(tmp_path / "model.gguf"))
    assert error.value.found == words


def test_one_part_of_a_split_model_is_refused_and_how_to_merge_it_is_named(tmp_path, gguf_model):
    tiny = gguf_model("llama")
    tiny.fields["split.count"] = 3
    with pytest.raises(UnsupportedCheckpoint, match="is not a GGUF model") as error:
        open_checkpoint(tiny.write(tmp_path / "model.gguf"))
    assert "part of 3 files" in error.value.found and "llama-gguf-split --merge" in error.value.fix


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"expert_count": 8}, UnsupportedCheckpoint, "not served: 'llama.expert_count'"),
        ({"logit_scale": 0.5}, UnsupportedCheckpoint, "not served: 'llama.logit_scale'"),
        ({"attention__scale": 0.1}, UnsupportedCheckpoint, "not served: 'llama.attention.scale'"),
        ({"attention__causal": False}, UnsupportedCheckpoint, "attention that looks at later tokens"),
        (
            {"rope__scaling__type": "longrope"},
            UnsupportedCheckpoint,
            "the rope type 'longrope' is not served from a GGUF",
        ),
        ({"rope__scaling__type": "other"}, UnsupportedCheckpoint, "the rope type 'other' is not served from a GGUF"),
        ({"rope__dimension_count": 16}, UnsupportedCheckpoint, "keys, values and rotation differ in size"),
        ({"attention__value_length": 64}, UnsupportedCheckpoint, "keys, values and rotation differ in size"),
        ({"block_count": None}, DamagedCheckpoint, "the field 'block_count' cannot be used"),
        ({"rope__scaling__type": "linear"}, DamagedCheckpoint, "the field 'factor' cannot be used"),
        ({"attention__head_count": [4, 2]}, DamagedCheckpoint, "the field 'attention.head_count' cannot be used"),
    ],
)
def test_what_is_not_served_or_missing_is_refused_by_name(opened, fields, error, words):
    with pytest.raises(error, match=words):
        opened(**fields)


def test_a_field_that_is_zero_says_nothing(opened):
    assert opened(expert_count=0, pooling_type=3).architecture.num_layers == 2
