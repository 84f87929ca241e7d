"""Prompts in: rows of a file, and the work items or refusals they become. Nothing is renumbered, nothing disappears."""

from tensorrt_llm_ext.inputs.id_rows import IdRows
from tensorrt_llm_ext.inputs.items import work_items
from tensorrt_llm_ext.inputs.policy import LossMask, TokenPolicy, token_policy
from tensorrt_llm_ext.inputs.rows import FORMATS, AcceptedRow, Fields, Input, RefusedRow, Row, open_input
from tensorrt_llm_ext.inputs.sharding import Sharding

__all__ = [
    "FORMATS",
    "AcceptedRow",
    "Fields",
    "IdRows",
    "Input",
    "LossMask",
    "RefusedRow",
    "Row",
    "Sharding",
    "TokenPolicy",
    "open_input",
    "token_policy",
    "work_items",
]
