"""Rope tables are those of transformers, for every type and both spellings; what depends on the call is refused."""

import copy
import math

import numpy as np
import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tensorrt_llm_ext.checkpoint import architecture_from_config, rope_tables
from tensorrt_llm_ext.errors import DamagedCheckpoint, UnsupportedCheckpoint

MODEL = {
    "vocab_size": 10,
    "hidden_size": 256,
    "intermediate_size": 10,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 8192,
}
SHORT, LONG = [1 + 0.1 * i for i in range(32)], [2.0 + i for i in range(32)]
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}

SETTINGS = {
    "default": {},
    "default, another theta and head size": {"rope_theta": 500_000.0, "head_dim": 128},
    "linear": {"rope_scaling": {"type": "linear", "factor": 3.0}},
    "llama3, as in Llama 3.1": {
        "rope_theta": 5e5,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8192},
    },
    "llama3, as in Llama 3.2": {
        "rope_theta": 5e5,
        "max_position_embeddings": 131072,
        "rope_scaling": {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192},
    },
    "llama3, short original": {
        "rope_parameters": {**LLAMA3, "rope_theta": 1e4, "original_max_position_embeddings": 512}
    },
    "yarn": {"rope_theta": 1e6, "head_dim": 128, "rope_scaling": YARN},
    "yarn, DeepSeek's scales": {
        "rope_scaling": {**YARN, "factor": 40, "mscale": 0.707, "mscale_all_dim": 1.0, "beta_fast": 16, "beta_slow": 2}
    },
    "yarn, not truncated": {"rope_scaling": {**YARN, "truncate": False}},
    "yarn, attention factor given": {"rope_scaling": {**YARN, "attention_factor": 1.25}},
    "yarn, original from the config": {"rope_scaling": YARN, "original_max_position_embeddings": 1024},
    "dynamic": {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
    "longrope": {"rope_scaling": {**LONGROPE, "original_max_position_embeddings": 2048}},
    "longrope, factor given": {"rope_scaling": {**LONGROPE, "factor": 9, "original_max_position_embeddings": 2048}},
    "longrope, attention factor given": {"rope_scaling": {**LONGROPE, "attention_factor": 1.5, "factor": 2.0}},
}


def config_of(settings):
    return {"architectures": ["LlamaForCausalLM"], **MODEL, **copy.deepcopy(settings)}


def reference_tables(settings, max_seq_len):
    rotary = LlamaRotaryEmbedding(transformers.LlamaConfig(**{**MODEL, **copy.deepcopy(settings)}))
    cos, sin = rotary(torch.zeros(1), torch.arange(max_seq_len)[None])
    half = cos.shape[-1] // 2
    return cos[0, :, :half].numpy(), sin[0, :, :half].numpy()


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_the_tables_are_those_of_transformers(settings):
    max_seq_len = 2048
    architecture = architecture_from_config(config_of(settings))
    tables, wanted = rope_tables(architecture, max_seq_len), reference_tables(settings, max_seq_len)
    for table, reference in zip(tables, wanted, strict=True):
        assert table.dtype == np.float32 and table.shape == (max_seq_len, architecture.head_dim // 2)
        # One unit of an inverse frequency's last place is up to 1.2e-7 of the angle: 2.4e-4 at position 2047.
        # torch's own power differs by that on other machines; here it is seen in one value of "yarn".
        assert np.abs(table - reference).max() < 3e-4
        assert np.abs(table[:64] - reference[:64]).max() < 1e-5


@pytest.mark.parametrize("name", [name for name in SETTINGS if not name.startswith("yarn")])
def test_the_last_bit_of_an_angle_is_that_of_transformers_far_from_the_start(name):
    max_seq_len = 2048 if name.startswith("longrope") else 8192
    tables = rope_tables(architecture_from_config(config_of(SETTINGS[name])), max_seq_len)
    for table, reference in zip(tables, reference_tables(SETTINGS[name], max_seq_len), strict=True):
        assert np.abs(table - reference).max() <= 2.5e-7  # two units in the last place of a value of one


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}},
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500_000}},
        ),
        ({"rope_scaling": YARN}, {"rope_parameters": {**YARN, "beta_fast": 32, "beta_slow": 1.0, "truncate": True}}),
        ({}, {"rope_scaling": None, "rope_parameters": {}}),
    ],
)
def test_both_spellings_give_the_same_architecture(old, new):
    assert architecture_from_config(config_of(old)) == architecture_from_config(config_of(new))


@pytest.mark.parametrize(
    ("settings", "original"),
    [(SETTINGS["dynamic"], 8192), (SETTINGS["longrope"], 2048)],
    ids=["dynamic", "longrope"],
)
def test_a_rope_that_depends_on_the_call_is_refused_beyond_the_original_maximum(settings, original):
    architecture = architecture_from_config(config_of(settings))
    rope_tables(architecture, original)
    with pytest.raises(UnsupportedCheckpoint, match="depends on the length of the call") as error:
        rope_tables(architecture, original + 1)
    assert str(original) in error.value.expected and str(original + 1) in error.value.found


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "the rope type 'ntk' is not served"),
        ({"rope_scaling": {"rope_type": None}}, "the rope type 'None' is not served"),
        ({"rope_scaling": {"full_attention": {"rope_type": "default"}}}, "rope settings per layer type"),
        ({"partial_rotary_factor": 0.5}, "a rotation of only a part of each head"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "only a part of each head"),
        ({"rope_scaling": {"type": "default", "mrope_section": [1]}}, "the rope setting 'mrope_section' is not known"),
        ({"rope_scaling": {"type": "linear", "factr": 2.0}}, "the rope setting 'factr' is not known"),
    ],
)
def test_a_rope_that_is_not_served_is_refused_by_name(fields, words):
    with pytest.raises(UnsupportedCheckpoint, match=words):
        architecture_from_config(config_of(fields))


def test_an_unknown_setting_is_answered_with_the_nearest_known_name():
    with pytest.raises(UnsupportedCheckpoint) as error:
        architecture_from_config(config_of({"rope_scaling": {"type": "linear", "factr": 2.0}}))
    assert error.value.expected == "did you mean 'factor'?"


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "dynamic", "factor": 0}}, "factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}}, "high_freq_factor"),
        ({"rope_scaling": {**LONGROPE, "short_factor": SHORT[:3]}}, "short_factor"),
        ({"rope_scaling": {**YARN, "factor": math.nan}}, "factor"),
        ({"rope_theta": 0.0}, "rope_theta"),
    ],
)
def test_a_missing_or_impossible_setting_is_damage(settings, key):
    with pytest.raises(DamagedCheckpoint, match=f"the field '{key}' cannot be used"):
        architecture_from_config(config_of(settings))


def test_a_llama3_rope_without_room_between_its_wavelengths_is_damage():
    with pytest.raises(DamagedCheckpoint, match="leave no room to interpolate") as error:
        architecture_from_config(config_of({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}))
    assert error.value.found == "1.0 and 1.0"
