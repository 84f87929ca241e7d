"""A config gives the numbers that transformers reads from it, or is refused by the name of what is not served."""

import copy
import json
import math

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorrt_llm_ext.checkpoint import Architecture, architecture_from_config
from tensorrt_llm_ext.checkpoint.architecture import quantisation_of
from tensorrt_llm_ext.errors import CheckpointError, DamagedCheckpoint, UnsupportedCheckpoint

SIZES = {
    "vocab_size": 263,
    "hidden_size": 128,
    "intermediate_size": 80,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
}
CLASSES = {
    "llama": ("LlamaForCausalLM", transformers.LlamaConfig),
    "mistral": ("MistralForCausalLM", transformers.MistralConfig),
    "qwen2": ("Qwen2ForCausalLM", transformers.Qwen2Config),
    "qwen3": ("Qwen3ForCausalLM", transformers.Qwen3Config),
}


def config_of(family="llama", **fields):
    return {"architectures": [CLASSES[family][0]], "head_dim": 16, **SIZES, **fields}


def reference(config):
    """What transformers makes of the same config."""
    name = config["architectures"][0]
    config_class = next(cls for class_name, cls in CLASSES.values() if class_name == name)
    return config_class(**copy.deepcopy({key: value for key, value in config.items() if key != "architectures"}))


@pytest.mark.parametrize("family", CLASSES)
def test_every_default_is_that_of_transformers(family):
    config = {"architectures": [CLASSES[family][0]], **SIZES}
    wanted, got = reference(config), architecture_from_config(config)
    head_dim = getattr(wanted, "head_dim", None) or wanted.hidden_size // wanted.num_attention_heads
    assert (got.num_kv_heads, got.head_dim) == (wanted.num_key_value_heads, head_dim)
    assert (got.max_positions, got.norm_eps) == (wanted.max_position_embeddings, wanted.rms_norm_eps)
    assert (got.is_tied, got.rope.theta) == (wanted.tie_word_embeddings, wanted.rope_parameters["rope_theta"])
    assert got.sliding_window == wanted.to_dict().get("sliding_window")
    assert (got.rope.type, got.rope.parameters) == ("default", ())


@pytest.mark.parametrize("family", CLASSES)
def test_every_field_that_is_given_is_taken(family):
    fields = dict(num_key_value_heads=4, head_dim=6, max_position_embeddings=77, rms_norm_eps=1e-4, rope_theta=5e5)
    got = architecture_from_config(config_of(family, **fields, tie_word_embeddings=True))
    assert (got.num_layers, got.hidden_size, got.intermediate_size, got.num_heads) == (8, 128, 80, 32)
    assert (got.vocab_size, got.num_kv_heads, got.head_dim, got.max_positions) == (263, 4, 6, 77)
    assert (got.norm_eps, got.rope.theta, got.is_tied, got.family) == (1e-4, 5e5, True, family)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
def test_null_key_value_heads_and_head_size_follow_from_the_heads(family):
    got = architecture_from_config(config_of(family, num_attention_heads=8, num_key_value_heads=None, head_dim=None))
    assert (got.num_kv_heads, got.head_dim) == (8, 16)


@pytest.mark.parametrize(
    ("family", "fields", "qkv", "o", "mlp", "qk_norm"),
    [
        ("llama", {}, False, False, False, False),
        ("llama", {"attention_bias": True}, True, True, False, False),
        ("llama", {"mlp_bias": True}, False, False, True, False),
        ("mistral", {"attention_bias": True}, False, False, False, False),
        ("qwen2", {}, True, False, False, False),
        ("qwen2", {"attention_bias": False}, True, False, False, False),
        ("qwen3", {}, False, False, False, True),
        ("qwen3", {"attention_bias": True}, True, True, False, True),
    ],
)
def test_biases_and_head_norms_are_those_of_the_family(family, fields, qkv, o, mlp, qk_norm):
    got = architecture_from_config(config_of(family, **fields))
    assert (got.has_qkv_bias, got.has_o_bias, got.has_mlp_bias, got.has_qk_norm) == (qkv, o, mlp, qk_norm)


FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("family", "fields", "window"),
    [
        ("llama", {"sliding_window": 64}, None),
        ("mistral", {}, 4096),
        ("mistral", {"sliding_window": 64}, 64),
        ("mistral", {"sliding_window": None}, None),
        ("mistral", {"sliding_window": 64, "layer_types": [SLIDING] * 8}, 64),
        ("qwen2", {"sliding_window": 64}, None),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True}, None),  # max_window_layers 28 of 8 layers
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 0}, 64),
        ("qwen3", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 7}, 64),
        ("qwen3", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 8}, None),
        ("qwen3", {"use_sliding_window": True, "layer_types": [FULL] * 7 + [SLIDING]}, 4096),
        ("qwen3", {"use_sliding_window": True, "layer_types": [FULL] * 8}, None),
    ],
)
def test_the_sliding_window_is_the_one_that_transformers_uses(family, fields, window):
    config = config_of(family, **fields)
    assert architecture_from_config(config).sliding_window == window
    if family.startswith("qwen"):
        wanted = reference(config)
        assert (window is not None) == (SLIDING in wanted.layer_types)


def test_an_architecture_survives_json():
    rope = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 4.0}
    architecture = architecture_from_config(config_of(rope_scaling=rope, max_position_embeddings=64))
    assert Architecture.from_dict(json.loads(json.dumps(architecture.to_dict()))) == architecture
    assert hash(architecture) == hash(Architecture.from_dict(json.loads(json.dumps(architecture.to_dict()))))


@pytest.mark.parametrize("name", ["LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model"])
def test_a_model_saved_without_its_head_is_of_the_same_family(name):
    config = {**config_of(), "architectures": [name]}
    assert architecture_from_config(config).family == name.removesuffix("Model").lower()


def test_a_config_without_architectures_is_known_by_its_model_type():
    config = {key: value for key, value in config_of().items() if key != "architectures"}
    assert architecture_from_config({**config, "model_type": "qwen3"}).family == "qwen3"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "the architecture is not served: GemmaForCausalLM"),
        ({"architectures": ["LlamaForCausalLM", "Other"]}, "the architecture is not served: LlamaForCausalLM, Other"),
        ({"architectures": None, "model_type": "gemma"}, "no 'architectures', model_type 'gemma'"),
        ({"hidden_act": "gelu"}, "the activation 'gelu' is not served"),
        ({"is_causal": False}, "attention that looks at later tokens"),
        ({"head_dim": 15}, "a head of odd size"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "weights quantised with gptq 4 "),
        ({"architectures": ["MistralForCausalLM"], "layer_types": [FULL, SLIDING]}, "these kinds of layers"),
        ({"architectures": ["Qwen3ForCausalLM"], "layer_types": ["linear_attention"] * 8}, "these kinds of layers"),
    ],
)
def test_what_is_not_served_is_refused_by_name(fields, words):
    with pytest.raises(UnsupportedCheckpoint, match=words) as error:
        architecture_from_config(config_of(**fields))
    assert error.value.expected and error.value.fix


@pytest.mark.parametrize(
    ("settings", "scheme"),
    [
        ({}, None),
        ({"quantization_config": None}, None),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq 4"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}, "modelopt FP8"),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "format": "float-quantized"}},
            "compressed-tensors float-quantized",
        ),
        ({"compression_config": {"format": "pack-quantized"}}, "unnamed pack-quantized"),
        ({"quantization_config": {"_load_in_4bit": True}}, "bitsandbytes"),
    ],
)
def test_a_quantisation_is_named(settings, scheme):
    assert quantisation_of(settings) == scheme


@pytest.mark.parametrize("key", SIZES)
def test_a_missing_size_is_damage(key):
    config = config_of()
    del config[key]
    with pytest.raises(DamagedCheckpoint, match=f"the field '{key}' cannot be used"):
        architecture_from_config(config)


@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta"])
def test_a_number_that_is_not_finite_is_damage(key):
    with pytest.raises(DamagedCheckpoint, match=f"the field '{key}' cannot be used"):
        architecture_from_config(config_of(**{key: math.nan}))


@pytest.mark.parametrize(
    ("family", "fields", "words"),
    [
        ("llama", {"num_key_value_heads": 5}, "cannot be shared out among the key-value heads"),
        ("qwen2", {"layer_types": [SLIDING] * 8}, "'layer_types' contradicts other fields"),
        ("qwen2", {"layer_types": [FULL] * 7}, "'layer_types' contradicts other fields"),
    ],
)
def test_a_config_that_contradicts_itself_is_damage(family, fields, words):
    with pytest.raises(DamagedCheckpoint, match=words):
        architecture_from_config(config_of(family, **fields))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**40) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
FIELDS = [*SIZES, "architectures", "model_type", "head_dim", "num_key_value_heads", "max_position_embeddings"]
FIELDS += ["rms_norm_eps", "rope_theta", "tie_word_embeddings", "attention_bias", "mlp_bias", "hidden_act", "is_causal"]
FIELDS += ["rope_scaling", "rope_parameters", "partial_rotary_factor", "original_max_position_embeddings"]
FIELDS += ["sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "quantization_config"]
ROPE = ["type", "rope_type", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "mscale", "mscale_all_dim"]
ROPE += ["attention_factor", "short_factor", "truncate", "original_max_position_embeddings", "rope_theta"]


@settings(max_examples=150, deadline=None)
@given(
    family=st.sampled_from(list(CLASSES)),
    fields=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3),
    rope=st.dictionaries(st.sampled_from(ROPE), JSON, max_size=3),
    rope_type=st.sampled_from(["default", "linear", "dynamic", "llama3", "yarn", "longrope"]),
)
def test_any_config_is_read_or_refused_as_a_checkpoint(family, fields, rope, rope_type):
    rope = {"rope_type": rope_type, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **rope}
    try:
        architecture = architecture_from_config({**config_of(family), "rope_parameters": rope, **fields})
    except CheckpointError:
        return
    json.dumps(architecture.to_dict(), allow_nan=False)
