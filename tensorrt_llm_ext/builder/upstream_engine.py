"""What upstream's builder writes beside an engine, ``config.json``, and which of these engines can be served.

Its three parts are ``version``, ``pretrained_config`` (the model) and ``build_config`` (the engine). It says nothing about
outputs beyond the logits. Enums stand in it by name or by value, in either case.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from tensorrt_llm_ext.backends.trt.plan_file import foreign_start
from tensorrt_llm_ext.builder.upstream import SAFE_FP8_CONTEXT_FMHA_FROM, VERSIONS
from tensorrt_llm_ext.checkpoint.fields import integer
from tensorrt_llm_ext.errors import DamagedCheckpoint, EngineError, IncompatibleEngine

CONFIG = "config.json"
PLAN = "rank0.engine"

SERVED_QUANTISATION = (None, "FP8", "FP8_PER_CHANNEL_PER_TOKEN")  # static scales per tensor; scales per row

_REBUILD = "build it again as `trtllm-extract upstream` does"


@dataclass(frozen=True)
class UpstreamEngine:
    """An engine of upstream's, as its config.json describes it; ``build`` and ``model`` are that file's own parts."""

    version: Version
    build: dict[str, Any]
    model: dict[str, Any]

    @property
    def dtype(self) -> str:
        """The type of the hidden states: of everything that is not quantised."""
        return self.model["dtype"]

    @property
    def precision(self) -> str:
        """What the matrices are computed in."""
        return "fp8" if self.quantisation else self.dtype

    @property
    def quantisation(self) -> str | None:
        """Upstream's name of the weights' quantisation, for example ``FP8``."""
        return (self.model.get("quantization") or {}).get("quant_algo")


def read_upstream_engine(folder: Path) -> UpstreamEngine:
    """Read an engine directory of upstream's and refuse one that cannot be served, whatever the reason.

    Raises EngineError for a directory that is not one or is damaged, IncompatibleEngine for an engine of another kind.
    """
    config = _config(folder / CONFIG)
    try:
        version = Version(str(config["version"]))
        engine = UpstreamEngine(version, dict(config["build_config"]), dict(config["pretrained_config"]))
    except (KeyError, TypeError, ValueError, InvalidVersion) as error:
        raise _damaged(
            folder / CONFIG, "version, build_config and pretrained_config", f"{type(error).__name__}: {error}"
        ) from error
    if f"{version.major}.{version.minor}" not in VERSIONS:
        raise _refused(f"TensorRT-LLM {version} is not served", f"{VERSIONS[0]} to {VERSIONS[-1]}", version, _REBUILD)
    _check_files(folder)
    for rule in _RULES:
        rule.check(engine)
    _check_fp8_attention(engine)
    for part, name in ((engine.build, "build_config"), (engine.model, "pretrained_config")):
        for key in _NUMBERS[name]:
            _check_number(folder, part, f"{name}.{key}", key)
    return engine


@dataclass(frozen=True)
class _Rule:
    """A field of config.json, the values that can be served, and how to build an engine that has one."""

    path: str
    is_served: Callable[[Any], bool]
    expected: str
    why: str
    fix: str

    def check(self, engine: UpstreamEngine) -> None:
        value: Any = {"build_config": engine.build, "pretrained_config": engine.model}
        for key in self.path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if not self.is_served(value):
            found = f"{self.path} {value!r}" if value is not None else f"no {self.path}"
            raise _refused(self.why, f"{self.path} {self.expected}", found, f"build it with {self.fix}")


def _word(value: Any) -> str:
    """An enum's word, whether it was written as DISABLED, disabled or KVCacheType.DISABLED."""
    return str(value).rpartition(".")[2].lower()


def _is_off(value: Any) -> bool:
    return _word(value) in ("none", "false", "0", "disable", "disabled")


def _is_on(value: Any) -> bool:
    return not _is_off(value)


def _is_one(value: Any) -> bool:
    return value == 1


_PLUGINS = "build_config.plugin_config"
_PARALLEL = "the engine is one of several that run together"
_RULES = (
    _Rule(
        "build_config.kv_cache_type",
        lambda value: _word(value) == "disabled",
        "disabled",
        "the engine keeps a key-value cache, which this runtime does not have",
        "--kv_cache_type disabled",
    ),
    _Rule("build_config.max_draft_len", _is_off, "0", "the engine takes speculative inputs", "no --max_draft_len"),
    _Rule(
        "build_config.speculative_decoding_mode",
        lambda value: _is_off(value) or value == 1,  # 1 is upstream's NONE
        "none",
        "the engine takes speculative inputs",
        "no --speculative_decoding_mode",
    ),
    _Rule(
        "build_config.gather_context_logits",
        _is_off,
        "false",
        "the engine computes the logits of every token, and its gathered and ungathered states are one tensor",
        "no --gather_context_logits",
    ),
    _Rule(
        "build_config.max_prompt_embedding_table_size",
        _is_off,
        "0",
        "the engine takes prompt embeddings",
        "no --max_prompt_embedding_table_size",
    ),
    _Rule("build_config.max_beam_width", _is_one, "1", "the engine's batches hold beams", "--max_beam_width 1"),
    _Rule(
        f"{_PLUGINS}.remove_input_padding",
        _is_on,
        "on",
        "the engine takes padded batches",
        "--remove_input_padding enable",
    ),
    _Rule(
        f"{_PLUGINS}.gpt_attention_plugin",
        _is_on,
        "on",
        "the engine cannot pack prompts",
        "--gpt_attention_plugin auto",
    ),
    _Rule(
        f"{_PLUGINS}.context_fmha",
        _is_on,
        "on",
        "the engine's prompts are bound by max_input_len",
        "--context_fmha enable",
    ),
    _Rule(
        f"{_PLUGINS}.multiple_profiles",
        _is_off,
        "off",
        "the engine has several profiles",
        "--multiple_profiles disable",
    ),
    _Rule(f"{_PLUGINS}.lora_plugin", _is_off, "off", "the engine takes LoRA weights", "no --lora_plugin"),
    _Rule(f"{_PLUGINS}.manage_weights", _is_off, "off", "the engine lacks its weights", "no --fast_build"),
    _Rule("pretrained_config.mapping.world_size", _is_one, "1", _PARALLEL, "a checkpoint converted for one GPU"),
    _Rule("pretrained_config.mapping.tp_size", _is_one, "1", _PARALLEL, "a checkpoint converted with --tp_size 1"),
    _Rule("pretrained_config.mapping.pp_size", _is_one, "1", _PARALLEL, "a checkpoint converted with --pp_size 1"),
    _Rule(
        "pretrained_config.mapping.cp_size",
        lambda value: value in (None, 1),  # before 0.16 there is none
        "1",
        _PARALLEL,
        "a checkpoint converted with --cp_size 1",
    ),
    _Rule(
        "pretrained_config.dtype",
        lambda value: value in ("float16", "bfloat16"),
        "float16 or bfloat16",
        "the hidden states have a type that is not served",
        "a checkpoint converted with --dtype float16 or bfloat16",
    ),
    _Rule(
        "pretrained_config.logits_dtype",
        lambda value: value in ("float16", "float32"),
        "float16 or float32",
        "the logits have a type that is not known",
        "--logits_dtype float16",
    ),
    _Rule(
        "pretrained_config.quantization.quant_algo",
        lambda value: value in SERVED_QUANTISATION,
        "FP8, FP8_PER_CHANNEL_PER_TOKEN or null",
        "how far its quantisation may be off is not known, so no canary could prove it",
        "a checkpoint in FP8, float16 or bfloat16",
    ),
)
_NUMBERS = {
    "build_config": ("max_batch_size", "max_seq_len", "max_num_tokens", "opt_num_tokens"),
    "pretrained_config": ("hidden_size", "num_hidden_layers", "vocab_size"),
}


def _config(path: Path) -> dict:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise EngineError(
            f"'{path.parent}' is not an engine directory of TensorRT-LLM",
            expected=f"a folder that holds {CONFIG} and {PLAN}",
            found=f"{CONFIG}: {error.strerror}",
            fix="name the --output_dir of trtllm-build",
        ) from error
    except ValueError as error:
        raise _damaged(path, "JSON", error) from error
    if not isinstance(value, dict):
        raise _damaged(path, "a JSON object", type(value).__name__)
    return value


def _check_fp8_attention(engine: UpstreamEngine) -> None:
    """Raise IncompatibleEngine for FP8 context attention in a version where it reads a scale that is not there."""
    plugins = engine.build.get("plugin_config") or {}
    if _is_on(plugins.get("use_fp8_context_fmha")) and engine.version < Version(SAFE_FP8_CONTEXT_FMHA_FROM):
        raise _refused(
            f"FP8 context attention without a cache reads a scale through a null pointer in {engine.version}",
            "build_config.plugin_config.use_fp8_context_fmha off",
            "on",
            "build it with --use_fp8_context_fmha disable",
        )


def _check_files(folder: Path) -> None:
    engines = sorted(path.name for path in folder.glob("rank*.engine"))
    if engines != [PLAN] or not (folder / PLAN).stat().st_size:
        raise EngineError(
            f"'{folder}' does not hold one engine",
            expected=f"{PLAN}, and no other rank's",
            found=", ".join(engines) or "no engine" if engines != [PLAN] else f"an empty {PLAN}",
            fix="build it with a checkpoint converted for one GPU, or copy the directory again",
        )
    if (start := foreign_start(folder / PLAN)) is not None:
        raise _damaged(folder / PLAN, "a TensorRT plan, which begins with ?trt", f"a file that begins with {start!r}")
    managed = sorted(path.name for path in folder.glob("rank*_managed_weights.safetensors"))
    if managed:
        raise _refused(
            "the engine lacks its weights", "weights inside the engine", managed[0], "build it without --fast_build"
        )


def _check_number(folder: Path, part: dict, path: str, key: str) -> None:
    try:
        integer(part, key)
    except DamagedCheckpoint as error:
        raise _damaged(folder / CONFIG, f"{path}: {error.expected}", error.found) from error


def _refused(why: str, expected: object, found: object, fix: str) -> IncompatibleEngine:
    return IncompatibleEngine(
        f"this engine of TensorRT-LLM cannot be served: {why}", expected=expected, found=found, fix=fix
    )


def _damaged(path: Path, expected: object, found: object) -> EngineError:
    return EngineError(
        f"'{path}' is not what trtllm-build writes",
        expected=expected,
        found=found,
        fix="copy the directory again, or build it again",
    )
