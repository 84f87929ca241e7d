"""Each recipe in the repository fits the model it is named after, by that model's published config, and no other."""

from pathlib import Path

import pytest
import transformers

from tensorrt_llm_ext.checkpoint.architecture import architecture_from_config
from tensorrt_llm_ext.errors import RecipeError
from tensorrt_llm_ext.recipes import load_card, load_recipe, settings_from_recipe
from tensorrt_llm_ext.recipes.toml_file import DATA

LLAMA_3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
CONFIGS = {
    "llama-2-7b": transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"], vocab_size=32000, hidden_size=4096, intermediate_size=11008,
        num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=32, max_position_embeddings=4096,
        rms_norm_eps=1e-5,
    ),
    "mistral-7b": transformers.MistralConfig(
        architectures=["MistralForCausalLM"], vocab_size=32768, hidden_size=4096, intermediate_size=14336,
        num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        max_position_embeddings=32768, rms_norm_eps=1e-5, sliding_window=None,
    ),
    "llama-3.1-8b": transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"], vocab_size=128256, hidden_size=4096, intermediate_size=14336,
        num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=131072,
        rms_norm_eps=1e-5, rope_parameters=LLAMA_3_ROPE,
    ),
    "qwen2.5-7b": transformers.Qwen2Config(
        architectures=["Qwen2ForCausalLM"], vocab_size=152064, hidden_size=3584, intermediate_size=18944,
        num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4, max_position_embeddings=32768,
        rms_norm_eps=1e-6, use_sliding_window=False,
    ),
    "qwen3-8b": transformers.Qwen3Config(
        architectures=["Qwen3ForCausalLM"], vocab_size=151936, hidden_size=4096, intermediate_size=12288,
        num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        max_position_embeddings=40960, rms_norm_eps=1e-6, use_sliding_window=False,
    ),
    "smollm2-135m": transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"], vocab_size=49152, hidden_size=576, intermediate_size=1536,
        num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192,
        rms_norm_eps=1e-5, tie_word_embeddings=True,
    ),
}  # fmt: skip
CARDS = sorted(path.stem for path in (DATA / "cards").glob("*.toml"))


def architecture(name):
    return architecture_from_config(CONFIGS[name].to_dict())


def test_every_recipe_has_its_config():
    assert {path.stem for path in Path(DATA).glob("*.toml")} == set(CONFIGS)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_recipe_fits_its_own_model_and_no_other(name):
    recipe = load_recipe(name)
    assert recipe.name == name
    recipe.check_model(architecture(name))
    for other in set(CONFIGS) - {name}:
        with pytest.raises(RecipeError, match="another model"):
            recipe.check_model(architecture(other))


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_recipe_can_be_built_for_every_card(name, card):
    card = load_card(card)
    settings = settings_from_recipe(load_recipe(name), (card,), architecture(name))
    assert settings.precision == card.precisions[0]
    longest = load_recipe(name).max_seq_len or card.default_seq_len or 8192
    assert settings.limits.max_seq_len == min(longest, CONFIGS[name].max_position_embeddings)


def test_a_plan_takes_128_tokens_an_input_unless_asked_for_more():
    recipe, card = load_recipe("qwen3-8b"), load_card("rtx5090")
    assert settings_from_recipe(recipe, (card,), architecture("qwen3-8b")).limits.max_seq_len == 128
