"""Settings make every choice that recipe and card leave open, and refuse what contradicts the model."""

from dataclasses import replace

import pytest

from tensorrt_llm_ext.checkpoint.architecture import architecture_from_config
from tensorrt_llm_ext.errors import RecipeError, TapError, UnsupportedCheckpoint
from tensorrt_llm_ext.recipes import Limits, ModelMatch, Recipe, load_card, settings_from_recipe
from tensorrt_llm_ext.taps import Tap

CONFIG = dict(
    architectures=["MistralForCausalLM"], model_type="mistral", vocab_size=100, hidden_size=32, intermediate_size=64,
    num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=4096,
    rms_norm_eps=1e-6, sliding_window=None,
)  # fmt: skip
CPU = load_card("cpu")


def settings(recipe=Recipe(), *cards, **config):
    return settings_from_recipe(recipe, cards or (CPU,), architecture_from_config(CONFIG | config))


def test_the_defaults_serve_a_prompt_as_long_as_the_model_allows():
    found = settings()
    assert found.taps == (Tap(4, "post", "last"),) and found.precision == "float32"
    assert found.limits == Limits(
        max_num_tokens=4096, max_batch_size=256, max_seq_len=4096, max_padded_tokens=4096, opt_num_tokens=1024
    )


def test_a_default_length_is_bounded():
    assert settings(max_position_embeddings=131072).limits.max_seq_len == Recipe().longest_default
    assert settings(Recipe(max_seq_len=20_000), max_position_embeddings=131072).limits.max_seq_len == 20_000


def test_short_sequences_still_fill_the_best_batch():
    limits = settings(Recipe(max_seq_len=128)).limits
    assert (limits.max_num_tokens, limits.max_padded_tokens, limits.opt_num_tokens) == (1024, 2048, 1024)


def test_the_recipe_goes_before_the_card():
    recipe = Recipe(precision="float16", max_batch_size=3, opt_num_tokens=10, max_num_tokens=50, max_seq_len=40)
    found = settings(recipe)
    assert found.precision == "float16"
    assert found.limits == Limits(50, 3, 40, 50, opt_num_tokens=10)


@pytest.mark.parametrize(
    ("config", "bound"),
    [
        ({}, "4096 tokens: the model's maximum of positions"),
        ({"sliding_window": 1000}, "1000 tokens: the model's sliding window"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, "max_position_embeddings": 512},
            "512 tokens",
        ),
    ],
)
def test_a_length_that_cannot_be_run_exactly_is_refused(config, bound):
    longest = int(bound.split()[0])
    assert settings(**config).limits.max_seq_len == longest
    with pytest.raises(UnsupportedCheckpoint) as error:
        settings(Recipe(max_seq_len=longest + 1), **config)
    assert bound in error.value.expected and f"{longest + 1} tokens" in error.value.found


@pytest.mark.parametrize("name", ["max_num_tokens", "max_padded_tokens"])
def test_a_limit_below_one_sequence_is_refused(name):
    with pytest.raises(RecipeError, match=f"{name} is too small") as error:
        settings(Recipe(max_seq_len=100, **{name: 99}))
    assert "99 tokens" in error.value.found


def test_a_recipe_of_another_model_is_refused():
    settings(Recipe(model=ModelMatch(family="mistral", num_layers=4)))
    with pytest.raises(RecipeError) as error:
        settings(Recipe(name="big", model=ModelMatch(family="mistral", num_layers=32, hidden_size=32)))
    assert "'big' is for another model" in error.value.what
    assert (error.value.expected, error.value.found) == ("num_layers 32", "num_layers 4")


def test_a_precision_that_the_card_lacks_is_refused():
    with pytest.raises(RecipeError, match="cannot build bfloat16 engines") as error:
        settings(Recipe(precision="bfloat16"))
    assert "float32, float16" in error.value.expected


def test_a_tap_that_the_model_lacks_is_refused():
    with pytest.raises(TapError):
        settings(Recipe(taps="layer:9@last"))


def test_the_fingerprint_is_of_what_decides_not_of_names():
    same = settings_from_recipe(Recipe(name="x"), (replace(CPU, name="y", title="z"),), architecture_from_config(CONFIG))
    assert same.fingerprint() == settings().fingerprint()
    for recipe in (Recipe(taps="final@all"), Recipe(max_seq_len=7), Recipe(precision="float16"), Recipe(max_batch_size=2)):
        assert settings(recipe).fingerprint() != same.fingerprint()


H200 = load_card("h200")


def test_products_that_stay_in_bfloat16_are_the_recipes_where_backend_torch_builds_fp8():
    recipe = Recipe(fp8_kept=("3.down", "0.qkv"))
    assert settings(replace(recipe, precision="fp8"), H200).fp8_kept == ("0.qkv", "3.down")
    assert settings(recipe, H200).fp8_kept is settings(recipe).fp8_kept is None
    assert settings(replace(recipe, fp8_kept=(), precision="fp8"), H200).fp8_kept == ()


def test_what_fp8_may_harm_decides_where_no_products_are_given():
    assert settings(Recipe(precision="fp8", fp8_harm=0.01), H200).fp8_harm == 0.01
    assert settings(Recipe(fp8_harm=0.01), H200).fp8_harm is None
    assert settings(Recipe(precision="fp8", fp8_kept=()), H200).fp8_harm is None


def test_the_same_bytes_in_any_batch_are_another_engine_of_backend_torch():
    recipe = Recipe(is_deterministic=True)
    assert settings(recipe, H200).is_deterministic and not settings(Recipe(), H200).is_deterministic
    assert settings(recipe, H200).fingerprint() != settings(Recipe(), H200).fingerprint()


@pytest.mark.parametrize("cards, found", [(("cpu",), "cpu ort"), (("rtx5090", "l40s"), "rtx5090 trt, l40s trt")])
def test_a_backend_that_cannot_promise_the_same_bytes_in_any_batch_is_refused(cards, found):
    with pytest.raises(RecipeError, match="cannot promise the same bytes in any batch") as error:
        settings(Recipe(is_deterministic=True), *map(load_card, cards))
    assert error.value.expected == "a card of backend torch" and error.value.found == found
    assert "--deterministic" in error.value.fix and "is_deterministic" in error.value.fix


@pytest.mark.parametrize("name", ["4.down", "0.q_proj", "down", ""])
def test_a_product_that_the_model_does_not_have_cannot_be_kept(name):
    with pytest.raises(RecipeError, match="does not have") as error:
        settings(Recipe(precision="fp8", fp8_kept=(name,)), H200)
    assert "0 to 3" in error.value.expected and error.value.found == repr(name)


def test_backend_torch_pads_nothing_so_padding_bounds_no_batch():
    limits = settings(Recipe(), H200).limits
    assert limits.max_padded_tokens == limits.max_batch_size * limits.max_seq_len


A100, L40S, RTX5090 = (replace(load_card(name), max_batch_size=size) for name, size in (("a100", 3), ("l40s", 2), ("rtx5090", 1)))


def test_several_cards_get_the_smallest_of_their_choices_and_all_their_capabilities():
    found = settings(Recipe(), RTX5090, A100, replace(L40S, opt_num_tokens=70, default_seq_len=20))
    assert found.compute_capabilities == ("8.0", "8.9", "12.0")  # by number, not by text
    assert (found.limits.max_batch_size, found.limits.opt_num_tokens, found.limits.max_seq_len) == (1, 70, 20)


def test_the_order_of_cards_and_cards_of_one_capability_make_no_difference():
    same = replace(L40S, name="rtx4090")
    assert settings(Recipe(), RTX5090, L40S).fingerprint() == settings(Recipe(), L40S, same, RTX5090).fingerprint()
    assert settings(Recipe(), L40S, same).fingerprint() == settings(Recipe(), L40S).fingerprint()
    assert settings(Recipe(), L40S, RTX5090).fingerprint() != settings(Recipe(), L40S).fingerprint()


def test_several_cards_compute_in_the_first_precision_that_all_have():
    first = replace(L40S, precisions=("fp8", "float16", "bfloat16"))
    assert settings(Recipe(), first, A100).precision == "float16"
    with pytest.raises(RecipeError, match="the card 'a100' .* cannot build fp8"):
        settings(Recipe(precision="fp8"), first, A100)
    with pytest.raises(RecipeError, match="share no precision") as error:
        settings(Recipe(), replace(L40S, precisions=("fp8",)), A100)
    assert error.value.found == "l40s fp8; a100 bfloat16, float16"


@pytest.mark.parametrize(
    ("cards", "field", "found"),
    [
        ((L40S, CPU), "backend", "l40s trt, cpu ort"),
        ((L40S, load_card("dgx-spark")), "platform", "l40s linux-x86_64, dgx-spark linux-aarch64"),
    ],
)
def test_cards_of_several_backends_or_hosts_are_built_once_for_each(cards, field, found):
    with pytest.raises(RecipeError, match=f"do not have one {field}") as error:
        settings(Recipe(), *cards)
    assert error.value.found == found and "once for each" in error.value.fix


def test_an_engine_for_no_card_is_refused():
    with pytest.raises(RecipeError) as error:
        settings_from_recipe(Recipe(), (), architecture_from_config(CONFIG))
    assert error.value.found == "no card"
