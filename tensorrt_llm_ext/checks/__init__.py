"""Checks: an engine against transformers, its speed beside it, and what anything at a path is."""

from tensorrt_llm_ext.checks.bench import NUM_ROUNDS, BenchResult, bench, usable_cores
from tensorrt_llm_ext.checks.comparison import TOLERANCES, TapComparison, Tolerance, compare
from tensorrt_llm_ext.checks.description import describe
from tensorrt_llm_ext.checks.facts import Description
from tensorrt_llm_ext.checks.prompts import Prompts, read_prompts
from tensorrt_llm_ext.checks.reference import reference_states
from tensorrt_llm_ext.checks.verify import Verification, update_canaries, verify

__all__ = [
    "NUM_ROUNDS",
    "TOLERANCES",
    "BenchResult",
    "Description",
    "Prompts",
    "TapComparison",
    "Tolerance",
    "Verification",
    "bench",
    "compare",
    "describe",
    "read_prompts",
    "reference_states",
    "update_canaries",
    "usable_cores",
    "verify",
]
