"""How large a shard is: in bytes, as it was asked for, and in rows, as the dataset's taps make of it."""

from __future__ import annotations

from tensorrt_llm_ext.errors import StoreError, TapError
from tensorrt_llm_ext.store.header import Header
from tensorrt_llm_ext.store.shard import IDENTITY_ROW_BYTES

SHARD_BYTES = "shard_bytes"
"""The name, in a header's ``job``, of the size that a shard may have."""

DEFAULT_SHARD_BYTES = 512 << 20


def row_bytes(header: Header) -> int:
    """Bytes that one token takes in a shard."""
    return header.value_bytes() + IDENTITY_ROW_BYTES


def shard_rows(header: Header) -> int:
    """How many rows a shard holds. Raises TapError for taps that give one row a request, StoreError when a shard could not
    hold the longest sequence the engine takes."""
    if header.kind != "states":
        num_layers = header.contract.architecture.num_layers
        raise TapError(
            "a dataset of states holds one row a token, and these taps give one for each request",
            expected="taps @all",
            found=", ".join(tap.spelling(num_layers) for tap in header.contract.taps),
            fix="keep them in a VectorStore",
        )
    num_bytes, longest = header.job[SHARD_BYTES], header.contract.limits.max_seq_len
    rows = num_bytes // row_bytes(header)
    if rows < longest:
        raise StoreError(
            "a shard could not hold the longest sequence that the engine takes",
            expected=f"at least {longest * row_bytes(header)} bytes: {longest} tokens of {row_bytes(header)} bytes",
            found=f"{num_bytes} bytes",
            fix="give a larger --shard-mib, or build an engine with a shorter max_seq_len",
        )
    return rows
