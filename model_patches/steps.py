"""Steps: who lies where in one step of upstream's PyTorch executor, read from its ``attn_metadata``, and what is refused.

``attn_metadata`` lists the sequences of a step in row order, contexts first: ``request_ids`` (int), ``seq_lens`` (rows of
each in this step), ``num_contexts``, ``prompt_lens`` and ``kv_cache_params.num_cached_tokens_per_seq``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tensorrt_llm_ext.errors import PlanError


@dataclass(frozen=True)
class Step:
    """The sequences of one step in row order; the first ``num_contexts`` are prompts."""

    request_ids: tuple[str, ...]
    row_counts: tuple[int, ...]
    num_contexts: int

    def rows(self, index: int) -> slice:
        """The rows of the sequence at ``index``."""
        start = sum(self.row_counts[:index])
        return slice(start, start + self.row_counts[index])


_FIELDS = ("request_ids", "seq_lens", "num_contexts", "prompt_lens", "kv_cache_params")


def step_of(metadata: Any) -> Step:
    """Read a step. Raises PlanError when the metadata lacks a field, or its lists contradict each other."""
    missing = [name for name in _FIELDS if not hasattr(metadata, name)]
    if missing or metadata.request_ids is None:
        raise PlanError(
            "the step's metadata does not say whose rows these are",
            expected=f"attn_metadata with {', '.join(_FIELDS)}",
            found=f"no {', '.join(missing) or 'request_ids'}",
            fix="this version of TensorRT-LLM is not known: report this text and its version",
        )
    request_ids = tuple(str(request_id) for request_id in metadata.request_ids)
    row_counts = tuple(int(count) for count in metadata.seq_lens)
    if len(request_ids) != len(row_counts) or len(set(request_ids)) != len(request_ids):
        raise PlanError(
            "the step's requests and rows cannot be told apart",
            expected="one request id and one sequence length for each sequence, no id twice",
            found=f"request_ids {list(request_ids)}, seq_lens {list(row_counts)}",
            fix="use beam width 1; otherwise report this text and the version of TensorRT-LLM",
        )
    return Step(request_ids, row_counts, int(metadata.num_contexts))


def token_ids_of(arguments: dict[str, Any], step: Step) -> np.ndarray:
    """Copy the step's token ids to the host, int32 [tokens]. Raises PlanError when they are not there, one for each row."""
    input_ids = arguments.get("input_ids")
    found = "none" if input_ids is None else f"{len(input_ids)} token ids"
    if input_ids is None or len(input_ids) != sum(step.row_counts):
        raise PlanError(
            "the step's rows cannot be traced to token ids",
            expected=f"input_ids of {sum(step.row_counts)} rows",
            found=found,
            fix="use text models: prompts given as embeddings have no token ids to check",
        )
    return input_ids.detach().to("cpu").numpy().astype(np.int32)


def check_step(arguments: dict[str, Any], step: Step) -> None:
    """Raise PlanError, before anything runs, when the prompts of a step would not give all their rows, whole.

    Upstream may give the length of the part that runs as ``prompt_lens``. Then the first part of a chunked prompt looks
    whole, but its tokens are no announced request's; the next part has rows in the cache and is refused here.
    """
    metadata = arguments["attn_metadata"]
    cached = getattr(metadata.kv_cache_params, "num_cached_tokens_per_seq", None)  # no parameters: no cache
    lengths = metadata.prompt_lens
    for index in range(step.num_contexts):
        num_cached = 0 if cached is None else int(cached[index])
        whole = num_cached + step.row_counts[index] if lengths is None else int(lengths[index])
        if num_cached or whole != step.row_counts[index]:
            raise PlanError(
                f"only a part of request {step.request_ids[index]}'s prompt is in this step: chunked prefill or block reuse",
                expected="all rows of the prompt in one step, none from the cache",
                found=f"{step.row_counts[index]} of {whole} rows, {num_cached} from the cache",
                fix="switch off enable_chunked_prefill and enable_block_reuse in upstream's LLM",
            )
    mapping = getattr(metadata, "mapping", None)
    for name, what in (("pp_size", "pipeline"), ("cp_size", "context")):
        if getattr(mapping, name, 1) > 1:
            raise PlanError(
                f"{what} parallelism is on: the model's output here is not the whole states after the final norm",
                expected=f"{name} 1",
                found=f"{name} {getattr(mapping, name)}",
                fix="use tensor parallelism alone, and capture on any one rank",
            )
    if arguments.get("spec_metadata") is not None or getattr(metadata, "is_cuda_graph", False):
        raise PlanError(
            "prompts run under speculative decoding or in a CUDA graph",
            expected="an eager step of the model alone",
            found="spec_metadata" if arguments.get("spec_metadata") is not None else "attn_metadata.is_cuda_graph",
            fix="switch speculative decoding off, and CUDA graphs for prefill",
        )
