"""The prompts that verify and bench run: read like any input, so that what `run` would refuse is refused here too."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

from tensorrt_llm_ext.checkpoint import Tokenizer
from tensorrt_llm_ext.errors import InputError
from tensorrt_llm_ext.inputs import Fields, RefusedRow, open_input, token_policy, work_items
from tensorrt_llm_ext.recipes.contract import Contract
from tensorrt_llm_ext.results.record import WorkItem

DEMO_PROMPTS = Path(__file__).parents[2] / "demo" / "prompts.jsonl"
_DEMO_FIELDS = Fields(text="text", request_id="id")


@dataclass(frozen=True)
class Prompts:
    """Work items ready to run, and the rows that were refused, with their reasons."""

    source: str
    items: tuple[WorkItem, ...]
    refused: tuple[RefusedRow, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(item.token_ids) for item in self.items)


def read_prompts(
    path: str | None, fields: Fields, contract: Contract, tokenizer: Tokenizer, *, limit: int | None = None
) -> Prompts:
    """Read the first ``limit`` rows of an input as work items for this engine; without ``path`` the demo's prompts.

    Raises InputError when no row can be run: a check of nothing is no check.
    """
    if path is None and not DEMO_PROMPTS.exists():
        raise InputError(
            "no prompts were named, and the demo's are not installed",
            expected=f"the file {DEMO_PROMPTS.name} of a checkout, or --input",
            found="neither",
            fix="name a file of prompts: --input prompts.jsonl",
        )
    if path is None:
        path, fields = str(DEMO_PROMPTS), _DEMO_FIELDS
    policy = token_policy(fields, tokenizer, contract.limits)
    opened = open_input(path, fields)
    rows = itertools.islice(opened.rows(), limit)
    vocab_size = contract.architecture.vocab_size
    answers = list(work_items(rows, fields, tokenizer, policy, vocab_size=vocab_size, source=opened.name))
    refused = tuple(answer for answer in answers if isinstance(answer, RefusedRow))
    items = tuple(answer.item for answer in answers if not isinstance(answer, RefusedRow))
    if not items:
        raise InputError(
            f"'{path}' holds no prompt that this engine can run",
            expected="at least one row that is not refused",
            found=f"{len(refused)} rows, all refused; the first: {refused[0].refusal.what}" if refused else "no rows",
            fix="name a file of prompts: --input prompts.jsonl",
        )
    return Prompts(opened.name, items, refused)
