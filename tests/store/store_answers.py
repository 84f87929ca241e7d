"""Contracts, work items and records for the store: what a session would deliver, made by hand."""

from dataclasses import replace

import numpy as np
from toy_engines import HIDDEN_SIZE, LAST, MEAN, Toy, toy_contract, work_item

from tensorrt_llm_ext.results import Origin, Record, State, rows_hash
from tensorrt_llm_ext.store import SHARD_BYTES, Header
from tensorrt_llm_ext.store.shard_size import row_bytes
from tensorrt_llm_ext.taps import Tap

JOB = {"policy": {"special_tokens": "none", "max_length": 40}, "windows": {"max_rows": 4}}


def make_header(taps=(LAST, MEAN), dtype="float32", job=JOB) -> Header:
    contract = toy_contract(Toy(taps=taps))
    tensors = tuple(replace(tensor, dtype=dtype) if tensor.role == "output" else tensor for tensor in contract.tensors)
    contract = replace(contract, tensors=tensors, activation_dtype=dtype)
    origin = Origin(
        model_name="toy",
        checkpoint_fingerprint="sha256:c",
        num_layers=3,
        hidden_size=HIDDEN_SIZE,
        tokenizer_fingerprint="sha256:t",
        special_tokens="none",
        template_hash=None,
        prefix=None,
        engine_fingerprint=contract.engine_fingerprint(),
        backend="ort",
        convention="prefix_sum",
        code_version="0.1.0",
    )
    return Header(contract, origin, job)


STATES_TAPS = (Tap(1, "pre", "all"), Tap(3, "pre", "all"))
SHARD_ROWS = 50  # holds the toy engine's longest sequence, 40


def make_states_header(dtype="float32", shard_rows=SHARD_ROWS) -> Header:
    header = make_header(STATES_TAPS, dtype)
    return replace(header, job={**JOB, SHARD_BYTES: shard_rows * row_bytes(header)})


def make_answer(header: Header, row: int):
    """A work item and its record; the same row gives the same bytes, on every call. For states, of 1 to 6 tokens."""
    is_states = header.kind == "states"
    num_tokens = 1 + row * 7 % 6 if is_states else 3
    token_ids = [row % 90 + 1, 5, 6, 7, 8, 9][:num_tokens]
    item = replace(work_item(f"id {row}", token_ids), work_item_id=f"file#{row}")
    rng = np.random.default_rng(row)
    if is_states:
        item = replace(item, loss_mask=rng.integers(0, 2, size=num_tokens, dtype=np.uint8))
    states = []
    for column in header.columns:
        rows = rng.normal(size=(num_tokens if is_states else 1, HIDDEN_SIZE)).astype(column.computed_dtype)
        states.append(State(column.tap, rows, header.contract.activation_dtype, rows_hash(rows)))
    truncated_from = 9 if row % 5 == 4 else None
    item = replace(item, truncated_from=truncated_from)
    record = Record(item.request_id, item.work_item_id, item.token_hash, num_tokens, truncated_from, tuple(states), header.origin)
    return item, record
