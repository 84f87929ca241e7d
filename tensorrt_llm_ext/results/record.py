"""Record: one request's hidden states with their identity; nobody needs the request list to read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import ml_dtypes
import numpy as np
import xxhash

from tensorrt_llm_ext import __version__
from tensorrt_llm_ext.recipes.contract import Contract, Convention
from tensorrt_llm_ext.taps import Tap

FORMAT_VERSION = 1

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_BFLOAT16_EXPONENT = np.uint16(0x7F80)  # all its bits set: NaN or Inf


@dataclass(frozen=True)
class WorkItem:
    """A request for extraction, tokenised and checked.

    ``request_id`` is the identity of the result; ``work_item_id`` says where the request came from (a file's row, a
    broker's message). ``truncated_from`` is the number of tokens before a truncation that was asked for.
    """

    request_id: str
    work_item_id: str
    token_ids: np.ndarray  # int32 [tokens], read-only
    token_hash: str  # fingerprint.token_hash(token_ids)
    truncated_from: int | None = None
    loss_mask: np.ndarray | None = None  # uint8 [tokens], 1 where a trainer learns; None where nobody asked for one


@dataclass(frozen=True)
class Tokenisation:
    """How the text of a session's work items became token ids; ``given``: they came ready-made."""

    special_tokens: Literal["tokenizer", "none", "given"] = "given"
    template_hash: str | None = None  # of the chat template that was applied
    prefix: str | None = None


@dataclass(frozen=True)
class Origin:
    """What all records of one session share: the model, the engine and how the text became tokens."""

    model_name: str
    checkpoint_fingerprint: str
    num_layers: int
    hidden_size: int
    tokenizer_fingerprint: str
    special_tokens: str  # "tokenizer", "none", or "given" for token ids that came ready-made
    template_hash: str | None  # of the chat template that was applied
    prefix: str | None
    engine_fingerprint: str
    backend: str
    convention: str
    code_version: str


@dataclass(frozen=True)
class State:
    """The rows of one tap for one request, as they came out of the engine."""

    tap: Tap
    rows: np.ndarray  # [1, hidden] for rows last and mean, [tokens, hidden] for all; dtype as computed
    computed_dtype: str
    payload_hash: str  # rows_hash(rows)


@dataclass(frozen=True)
class Record:
    """One request's hidden states: identity, lineage, states."""

    request_id: str
    work_item_id: str
    token_hash: str
    num_tokens: int
    truncated_from: int | None
    states: tuple[State, ...]
    origin: Origin


@dataclass(frozen=True)
class Failure:
    """A request that ran, but whose rows cannot be trusted; the other requests of its batch are not touched.

    ``code`` is a stable word for machines: ``not_finite`` (NaN or Inf among the rows) or ``lineage`` (the token ids
    that ran are not those the work item's hash names).
    """

    request_id: str
    work_item_id: str
    code: str
    reason: str


def rows_hash(rows: np.ndarray) -> str:
    """Hash rows as they lie in memory: ``xxh3-128:`` over dtype, shape and little-endian bytes, C order."""
    digest = xxhash.xxh3_128(f"{rows.dtype.name}{list(rows.shape)}".encode())
    digest.update(np.ascontiguousarray(rows).reshape(-1).view(np.uint8))  # bytes: bfloat16 has no buffer of its own
    return "xxh3-128:" + digest.hexdigest()


def row_hashes(rows: np.ndarray) -> list[str]:
    """``rows_hash(rows[i : i + 1])`` of every row of ``[n, size]``, at a fraction of its cost for each."""
    prefix = np.frombuffer(f"{rows.dtype.name}{[1, rows.shape[1]]}".encode(), np.uint8)
    values = np.ascontiguousarray(rows).view(np.uint8)
    hashed = np.empty((len(rows), len(prefix) + values.shape[1]), np.uint8)
    hashed[:, : len(prefix)], hashed[:, len(prefix) :] = prefix, values
    packed, width, hexdigest = memoryview(hashed.reshape(-1)), hashed.shape[1], xxhash.xxh3_128_hexdigest
    return ["xxh3-128:" + hexdigest(packed[start : start + width]) for start in range(0, len(packed), width)]


def all_finite(rows: np.ndarray) -> bool:
    """Whether no value is NaN or Inf. bfloat16, for which NumPy has no fast test, is looked at bit by bit."""
    if rows.dtype != _BFLOAT16:
        return bool(np.isfinite(rows).all())
    exponents = np.bitwise_and(rows.view(np.uint16), _BFLOAT16_EXPONENT)
    return not rows.size or int(exponents.max()) < _BFLOAT16_EXPONENT


def origin_from_contract(contract: Contract, convention: Convention, tokenisation: Tokenisation) -> Origin:
    """Say what all records of one session share, from the contract, the convention that holds and the policy of the text."""
    return Origin(
        model_name=contract.model_name,
        checkpoint_fingerprint=contract.fingerprints.checkpoint,
        num_layers=contract.architecture.num_layers,
        hidden_size=contract.architecture.hidden_size,
        tokenizer_fingerprint=contract.fingerprints.tokenizer,
        special_tokens=tokenisation.special_tokens,
        template_hash=tokenisation.template_hash,
        prefix=tokenisation.prefix,
        engine_fingerprint=contract.engine_fingerprint(),
        backend=contract.backend,
        convention=convention,
        code_version=__version__,
    )
