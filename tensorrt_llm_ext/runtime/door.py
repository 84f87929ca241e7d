"""The session's door: what a batch and an engine directory must be before anything runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tensorrt_llm_ext._runtime import KNOWN_INPUTS
from tensorrt_llm_ext.errors import ContractError, EngineError, Refusal
from tensorrt_llm_ext.fingerprint import file_fingerprint
from tensorrt_llm_ext.recipes.contract import Contract
from tensorrt_llm_ext.results.record import WorkItem

_INT32 = np.dtype(np.int32)
_ONE_ITEM = "refuse this item before it reaches the session, or build the engine with larger limits"
_WHOLE_BATCH = "divide the items with runtime.batches(items, session.contract.limits)"


def flattened(items: Sequence[WorkItem], contract: Contract) -> tuple[np.ndarray, np.ndarray]:
    """Check a batch and lay its sequences one after another: token ids (int32 [T]) and offsets (int32 [B + 1]).

    Raises Refusal with a code and the numbers for an item, or a whole batch, that the engine does not take.
    """
    if not items:
        raise Refusal("empty_batch", "a batch holds no item", expected="at least 1 item", found=0, fix="submit items")
    limits = contract.limits
    longest = min(limits.max_seq_len, limits.max_num_tokens, limits.max_padded_tokens)
    for item in items:
        _check_item(item, longest)
    _check_ids(items)
    lengths = [len(item.token_ids) for item in items]
    _check_limits(lengths, contract)
    offsets = np.zeros(len(items) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    token_ids = np.concatenate([item.token_ids for item in items])
    _check_vocabulary(items, token_ids, offsets, contract.architecture.vocab_size)
    return token_ids, offsets


def check_inputs(contract: Contract) -> None:
    """Raise ContractError when the engine has an input that the packer cannot fill."""
    unknown = [t.name for t in contract.tensors if t.role == "input" and t.name not in KNOWN_INPUTS]
    if unknown:
        raise ContractError(
            f"the engine has inputs that this runtime cannot fill: {', '.join(unknown)}",
            expected=f"inputs out of {', '.join(KNOWN_INPUTS)}",
            found=", ".join(unknown),
            fix="build the engine with this release",
        )


def check_files(engine_path: Path, contract: Contract, *, is_full: bool = False) -> None:
    """Check that every file of the engine has the size the contract says, and with ``is_full`` the hash too.

    Raises EngineError naming the first file that is missing or differs.
    """
    for file in contract.files:
        path = engine_path / file.name
        size = path.stat().st_size if path.is_file() else None
        if size != file.size:
            raise _damaged(path, f"{file.size:,} bytes", "no such file" if size is None else f"{size:,} bytes")
        if is_full and (found := file_fingerprint(path)) != file.sha256:
            raise _damaged(path, file.sha256, found)


def _check_ids(items: Sequence[WorkItem]) -> None:
    if len({item.request_id for item in items}) < len(items):
        repeated, _ = Counter(item.request_id for item in items).most_common(1)[0]
        raise Refusal(
            "duplicate_id",
            f"request id '{repeated}' stands twice in one batch",
            expected="each request id once",
            found=repeated,
            fix="give every request its own id",
        )


def _check_item(item: WorkItem, longest: int) -> None:
    ids = item.token_ids
    if not isinstance(ids, np.ndarray) or ids.dtype != _INT32 or ids.ndim != 1:
        raise Refusal(
            "not_token_ids",
            f"the token ids of request '{item.request_id}' are not a list of int32",
            expected="a NumPy array, int32 [tokens]",
            found=f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, np.ndarray) else type(ids).__name__,
            fix="np.asarray(token_ids, dtype=np.int32)",
        )
    if len(ids) == 0:
        raise Refusal(
            "empty", f"request '{item.request_id}' has no token", expected="at least 1 token", found=0, fix=_ONE_ITEM
        )
    if len(ids) > longest:
        raise Refusal(
            "too_long",
            f"request '{item.request_id}' is longer than the engine takes",
            expected=f"at most {longest} tokens",
            found=f"{len(ids)} tokens",
            fix=_ONE_ITEM,
        )


def _check_limits(lengths: Sequence[int], contract: Contract) -> None:
    limits = contract.limits
    sizes = {
        "max_num_tokens": (sum(lengths), limits.max_num_tokens),
        "max_batch_size": (len(lengths), limits.max_batch_size),
        "max_padded_tokens": (len(lengths) * max(lengths), limits.max_padded_tokens),
    }
    for name, (size, limit) in sizes.items():
        if size > limit:
            raise Refusal(
                "batch_too_large",
                f"a batch passes the engine's {name}",
                expected=f"{name} at most {limit}",
                found=f"{size} ({len(lengths)} sequences, the longest of {max(lengths)} tokens)",
                fix=_WHOLE_BATCH,
            )


def _check_vocabulary(items: Sequence[WorkItem], token_ids: np.ndarray, offsets: np.ndarray, vocab_size: int) -> None:
    if token_ids.min() < 0 or token_ids.max() >= vocab_size:
        row = int(np.flatnonzero((token_ids < 0) | (token_ids >= vocab_size))[0])
        index = int(np.searchsorted(offsets, row, side="right")) - 1
        raise Refusal(
            "out_of_vocabulary",
            f"request '{items[index].request_id}' has a token id outside the vocabulary",
            expected=f"0 to {vocab_size - 1}",
            found=f"{token_ids[row]} at position {row - int(offsets[index])}",
            fix="tokenise with this model's tokenizer",
        )


def _damaged(path: Path, expected: str, found: str) -> EngineError:
    return EngineError(
        f"the engine's file '{path}' is not the one that was published",
        expected=expected,
        found=found,
        fix="copy the engine directory again, or build it again",
    )
