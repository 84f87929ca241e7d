"""Upstream's builder: recipes for ``trtllm-build``, one a version of TensorRT-LLM, and the command line each means.

An engine for extraction is built without a cache, for packed prompts of one pass. Every flag that decides this is given
explicitly, because upstream's defaults changed between versions; a flag that a version does not know is never given.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from tensorrt_llm_ext.errors import RecipeError, TapError
from tensorrt_llm_ext.recipes import toml_file
from tensorrt_llm_ext.recipes.toml_file import within
from tensorrt_llm_ext.taps import Tap, parse_taps

UpstreamVersion = Literal[
    "0.13", "0.14", "0.15", "0.16", "0.17", "0.18", "0.19", "0.20", "0.21", "1.0", "1.1", "1.2"
]  # fmt: skip
"""The versions that build without a cache (from 0.13) and still have a TensorRT backend (to 1.2)."""

VERSIONS: tuple[str, ...] = get_args(UpstreamVersion)
GemmPlugin = Literal["disable", "fp8"]

SAFE_FP8_CONTEXT_FMHA_FROM = "1.0"
"""Before it, FP8 context attention without a quantised cache reads the cache's scale through a null pointer (seen in
0.13 to 0.17; the releases up to 0.21 are not known to be safe)."""

_KNOWN_FROM = {"low_latency_gemm_swiglu_plugin": "0.15"}  # every other flag below is known from 0.13 to 1.2


@dataclass(frozen=True)
class UpstreamRecipe:
    """How to build an engine with ``trtllm-build`` of one version. Lengths and counts are in tokens and sequences."""

    version: UpstreamVersion
    gemm_plugins: tuple[GemmPlugin, ...]
    """The builds worth comparing, the default first: ``disable`` is TensorRT's own FP8 GEMM, ``fp8`` the plugin's."""
    max_batch_size: int = within(1)
    max_seq_len: int = within(1)
    max_num_tokens: int = within(1)
    opt_num_tokens: int = within(1)
    """Tokens of the batches that run fastest. Upstream's own default is that of generation, one token a sequence."""
    use_fp8_context_fmha: bool = False
    use_fused_mlp: bool = True
    gemm_swiglu_plugin: Literal["fp8"] | None = None  # compute capability 9.0 only; drops one scale
    low_latency_gemm_swiglu_plugin: Literal["fp8"] | None = None
    logits_dtype: Literal["float16", "float32"] = "float16"  # nobody reads the logits
    workers: int = within(1, default=1)


def load_upstream_recipe(name_or_path: str | Path) -> UpstreamRecipe:
    """Read a recipe by its version (``0.16``) or the path of a TOML file. Raises RecipeError."""
    recipe = toml_file.read(
        toml_file.find(name_or_path, toml_file.DATA / "upstream", "upstream recipe"), UpstreamRecipe
    )
    _check(recipe)
    return recipe


def command_from_recipe(
    recipe: UpstreamRecipe, *, checkpoint: Path, out: Path, gemm_plugin: GemmPlugin | None = None
) -> list[str]:
    """Make the ``trtllm-build`` command of a recipe: one of its ``gemm_plugins``, the first unless named.

    ``checkpoint`` is TensorRT-LLM's form of one, as its convert or quantize script writes it. Raises RecipeError.
    """
    _check(recipe)
    gemm_plugin = gemm_plugin or recipe.gemm_plugins[0]
    if gemm_plugin not in recipe.gemm_plugins:
        raise _contradiction(
            f"the recipe for {recipe.version} has no build with gemm_plugin {gemm_plugin}",
            f"one of {', '.join(recipe.gemm_plugins)}",
            gemm_plugin,
        )
    flags = {
        "checkpoint_dir": checkpoint,
        "output_dir": out,
        "kv_cache_type": "disabled",
        "remove_input_padding": "enable",
        "context_fmha": "enable",
        "gpt_attention_plugin": "auto",
        "gemm_plugin": gemm_plugin,
        "use_fused_mlp": _switch(recipe.use_fused_mlp),
        "gemm_swiglu_plugin": recipe.gemm_swiglu_plugin,
        "low_latency_gemm_swiglu_plugin": recipe.low_latency_gemm_swiglu_plugin,
        "use_fp8_context_fmha": _switch(recipe.use_fp8_context_fmha),
        "use_paged_context_fmha": "disable",  # needs a cache; on by default in 1.x, where it switches FP8 attention off
        "max_beam_width": 1,
        "max_batch_size": recipe.max_batch_size,
        "max_seq_len": recipe.max_seq_len,
        "max_num_tokens": recipe.max_num_tokens,
        "opt_num_tokens": recipe.opt_num_tokens,
        "logits_dtype": recipe.logits_dtype,
        "workers": recipe.workers,
    }
    given = [(f"--{flag}", str(value)) for flag, value in flags.items() if value is not None]
    return ["trtllm-build", *(part for pair in given for part in pair)]


def upstream_taps(text: str, num_layers: int) -> tuple[Tap, ...]:
    """Read the taps that upstream's model can give: ``final@last`` and ``final@all``. Raises TapError for any other."""
    known = {Tap(num_layers, "post", "last"), Tap(num_layers, "post", "all")}
    taps = parse_taps(text, num_layers)
    for tap in taps:
        if tap not in known:
            raise TapError(
                f"upstream's model does not give '{tap.spelling(num_layers)}'",
                expected=", ".join(tap.spelling(num_layers) for tap in sorted(known)),
                found=tap.spelling(num_layers),
                fix="take final@all and pool its rows, or build the engine with `trtllm-extract build`, which has every tap",
            )
    return taps


def _check(recipe: UpstreamRecipe) -> None:
    version = VERSIONS.index(recipe.version)
    for flag, first in _KNOWN_FROM.items():
        if getattr(recipe, flag) is not None and version < VERSIONS.index(first):
            raise _contradiction(
                f"trtllm-build {recipe.version} has no flag --{flag}", f"{flag} from {first} on", recipe.version
            )
    if recipe.use_fp8_context_fmha and version < VERSIONS.index(SAFE_FP8_CONTEXT_FMHA_FROM):
        raise _contradiction(
            f"FP8 context attention without a cache is not safe in {recipe.version}: it reads a scale that is not there",
            f"use_fp8_context_fmha false, or version {SAFE_FP8_CONTEXT_FMHA_FROM} or later",
            "use_fp8_context_fmha true",
        )
    if (recipe.gemm_swiglu_plugin or recipe.low_latency_gemm_swiglu_plugin) and not recipe.use_fused_mlp:
        raise _contradiction("the SwiGLU plugins need the fused MLP", "use_fused_mlp true", "use_fused_mlp false")
    if not recipe.gemm_plugins or len(set(recipe.gemm_plugins)) != len(recipe.gemm_plugins):
        raise _contradiction("gemm_plugins names the builds to compare", "each plugin once", list(recipe.gemm_plugins))
    _check_limits(recipe)


def _check_limits(recipe: UpstreamRecipe) -> None:
    most = recipe.max_batch_size * recipe.max_seq_len  # upstream would lower max_num_tokens to it, with a warning only
    if not max(recipe.max_seq_len, recipe.opt_num_tokens) <= recipe.max_num_tokens <= most:
        raise _contradiction(
            "the limits of the recipe contradict each other",
            "max_seq_len and opt_num_tokens at most max_num_tokens, which is at most max_batch_size x max_seq_len",
            f"max_seq_len {recipe.max_seq_len}, opt_num_tokens {recipe.opt_num_tokens}, max_num_tokens "
            f"{recipe.max_num_tokens}, max_batch_size {recipe.max_batch_size}",
        )


def _switch(is_on: bool) -> str:
    return "enable" if is_on else "disable"


def _contradiction(what: str, expected: object, found: object) -> RecipeError:
    return RecipeError(what, expected=expected, found=found, fix="correct the recipe, or choose another")
