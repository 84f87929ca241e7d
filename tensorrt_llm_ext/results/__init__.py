"""Results: one request's hidden states with their identity, in memory and as a self-describing payload."""

from tensorrt_llm_ext.results.payload import payload_from_record, record_from_payload
from tensorrt_llm_ext.results.record import (
    FORMAT_VERSION,
    Failure,
    Origin,
    Record,
    State,
    Tokenisation,
    WorkItem,
    all_finite,
    origin_from_contract,
    row_hashes,
    rows_hash,
)
from tensorrt_llm_ext.results.records import Records, States

__all__ = [
    "FORMAT_VERSION",
    "Failure",
    "Origin",
    "Record",
    "Records",
    "State",
    "States",
    "Tokenisation",
    "WorkItem",
    "all_finite",
    "origin_from_contract",
    "payload_from_record",
    "record_from_payload",
    "row_hashes",
    "rows_hash",
]
