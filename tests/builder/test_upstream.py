"""Recipes for trtllm-build: every version has one, and its command is for extraction whatever upstream's defaults are."""

import dataclasses
from pathlib import Path

import pytest

from tensorrt_llm_ext.builder.upstream import (
    VERSIONS,
    UpstreamRecipe,
    command_from_recipe,
    load_upstream_recipe,
    upstream_taps,
)
from tensorrt_llm_ext.errors import RecipeError, TapError
from tensorrt_llm_ext.recipes.toml_file import DATA
from tensorrt_llm_ext.taps import Tap

RECIPE = UpstreamRecipe(
    version="0.16",
    gemm_plugins=("disable", "fp8"),
    max_batch_size=64,
    max_seq_len=512,
    max_num_tokens=4096,
    opt_num_tokens=4096,
)
KNOWN_FLAGS = {  # of trtllm-build in every version from 0.13 to 1.2
    "checkpoint_dir", "output_dir", "kv_cache_type", "remove_input_padding", "context_fmha", "gpt_attention_plugin",
    "gemm_plugin", "gemm_swiglu_plugin", "use_fused_mlp", "use_fp8_context_fmha", "use_paged_context_fmha",
    "max_beam_width", "max_batch_size", "max_seq_len", "max_num_tokens", "opt_num_tokens", "logits_dtype", "workers",
}  # fmt: skip


def flags(recipe, **options):
    command = command_from_recipe(recipe, checkpoint=Path("ckpt"), out=Path("engine"), **options)
    assert command[0] == "trtllm-build" and len(command) % 2 == 1
    return {name.removeprefix("--"): value for name, value in zip(command[1::2], command[2::2], strict=True)}


def changed(**changes):
    return dataclasses.replace(RECIPE, **changes)


def test_every_version_from_0_13_to_1_2_has_a_recipe_of_its_own():
    assert {path.stem for path in (DATA / "upstream").glob("*.toml")} == set(VERSIONS)
    for version in VERSIONS:
        assert load_upstream_recipe(version).version == version


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("gemm_plugin", ["disable", "fp8"])
def test_its_command_builds_for_one_packed_pass_without_a_cache(version, gemm_plugin):
    recipe = load_upstream_recipe(version)
    given = flags(recipe, gemm_plugin=gemm_plugin)
    assert given["kv_cache_type"] == "disabled" and given["remove_input_padding"] == given["context_fmha"] == "enable"
    assert given["gemm_plugin"] == gemm_plugin and given["gpt_attention_plugin"] == "auto"
    assert given["use_fp8_context_fmha"] == given["use_paged_context_fmha"] == "disable"
    assert int(given["opt_num_tokens"]) > recipe.max_batch_size  # upstream's default is one token a sequence
    assert given["max_beam_width"] == "1" and given["logits_dtype"] == "float16"
    assert given.keys() <= KNOWN_FLAGS and not given.keys() & {
        "gather_context_logits",
        "max_draft_len",
        "multiple_profiles",
    }


def test_the_first_gemm_plugin_is_the_default_and_another_is_refused():
    assert flags(RECIPE)["gemm_plugin"] == "disable"
    with pytest.raises(RecipeError, match="no build with gemm_plugin fp8"):
        flags(changed(gemm_plugins=("disable",)), gemm_plugin="fp8")


def test_checkpoint_and_out_are_passed_on():
    assert flags(RECIPE)["checkpoint_dir"] == "ckpt" and flags(RECIPE)["output_dir"] == "engine"


def test_what_the_recipe_says_is_passed_on_each_under_its_own_flag():
    numbers = {"max_batch_size": 64, "max_seq_len": 512, "max_num_tokens": 4096, "opt_num_tokens": 3000, "workers": 2}
    words = {"logits_dtype": "float32", "gemm_swiglu_plugin": "fp8", "low_latency_gemm_swiglu_plugin": "fp8"}
    given = flags(changed(**numbers, **words))
    assert {name: given[name] for name in numbers} == {name: str(value) for name, value in numbers.items()}
    assert {name: given[name] for name in words} == words and given["use_fused_mlp"] == "enable"
    assert flags(changed(use_fused_mlp=False))["use_fused_mlp"] == "disable"


@pytest.mark.parametrize("version", [v for v in VERSIONS if v.startswith("0.")])
def test_fp8_context_attention_is_refused_where_it_reads_a_missing_scale(version):
    with pytest.raises(RecipeError, match=f"not safe in {version}"):
        flags(changed(version=version, use_fp8_context_fmha=True))


def test_fp8_context_attention_can_be_asked_for_from_1_0_on():
    given = flags(changed(version="1.0", use_fp8_context_fmha=True))
    assert given["use_fp8_context_fmha"] == "enable" and given["use_paged_context_fmha"] == "disable"


def test_a_flag_that_a_version_does_not_know_is_never_given():
    with pytest.raises(RecipeError, match="0.14 has no flag --low_latency_gemm_swiglu_plugin"):
        flags(changed(version="0.14", low_latency_gemm_swiglu_plugin="fp8"))
    assert (
        flags(changed(version="0.15", low_latency_gemm_swiglu_plugin="fp8"))["low_latency_gemm_swiglu_plugin"] == "fp8"
    )
    assert "low_latency_gemm_swiglu_plugin" not in flags(changed(version="0.15"))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"gemm_swiglu_plugin": "fp8", "use_fused_mlp": False}, "need the fused MLP"),
        ({"gemm_plugins": ()}, "names the builds to compare"),
        ({"gemm_plugins": ("fp8", "fp8")}, "names the builds to compare"),
        ({"opt_num_tokens": 4097}, "limits of the recipe contradict"),
        ({"max_seq_len": 4097}, "limits of the recipe contradict"),
        ({"max_batch_size": 7}, "limits of the recipe contradict"),
    ],
)
def test_a_recipe_that_contradicts_itself_is_refused(changes, words):
    with pytest.raises(RecipeError, match=words):
        flags(changed(**changes))


@pytest.mark.parametrize(
    "line, words",
    [
        ("opt_num_token = 1", "did you mean 'opt_num_tokens'?"),
        ("kv_cache_type = 'paged'", "known: "),
        ("max_batch_size = 0", "at least 1"),
        ("version = '0.12'", "'0.13'"),
        ("gemm_plugins = ['fp16']", "'disable', 'fp8'"),
    ],
)
def test_an_unknown_key_or_value_in_the_file_is_refused_with_what_is_known(tmp_path, line, words):
    lines = (DATA / "upstream" / "0.16.toml").read_text().splitlines()
    key = line.partition(" ")[0]
    text = "\n".join([*(old for old in lines if not old.startswith(key + " ")), line])
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(RecipeError) as error:
        load_upstream_recipe(tmp_path / "mine.toml")
    assert words in error.value.expected


def test_a_version_without_a_recipe_names_those_there_are():
    with pytest.raises(RecipeError, match="no upstream recipe named '0.12'"):
        load_upstream_recipe("0.12")


def test_upstreams_model_gives_two_taps_and_mean_is_not_one():
    assert upstream_taps("final@last,final@all", 8) == (Tap(8, "post", "last"), Tap(8, "post", "all"))
    for spelling in ("final@mean", "final:pre@last", "layer:3@all"):
        with pytest.raises(TapError, match=f"does not give '{spelling}'"):
            upstream_taps(spelling, 8)
