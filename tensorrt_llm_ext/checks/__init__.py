"""Checks: an engine against transformers or another engine, its speed, and what anything at a path is."""

from tensorrt_llm_ext.checks.bench import NUM_ROUNDS, BenchResult, bench, usable_cores
from tensorrt_llm_ext.checks.comparison import TOLERANCES, TapComparison, Tolerance, compare
from tensorrt_llm_ext.checks.description import describe
from tensorrt_llm_ext.checks.engines import EngineComparison, compare_engines
from tensorrt_llm_ext.checks.facts import Description
from tensorrt_llm_ext.checks.prompts import Prompts, read_prompts
from tensorrt_llm_ext.checks.reference import reference_states
from tensorrt_llm_ext.checks.verify import Verification, update_canaries, verify

__all__ = [
    "NUM_ROUNDS",
    "TOLERANCES",
    "BenchResult",
    "Description",
    "EngineComparison",
    "Prompts",
    "TapComparison",
    "Tolerance",
    "Verification",
    "bench",
    "compare",
    "compare_engines",
    "describe",
    "read_prompts",
    "reference_states",
    "update_canaries",
    "usable_cores",
    "verify",
]
