"""Reference: an answer too large for a message. Its payload lies in chunks among the stream's rows; the message says where.

The order is: chunks, reference, acknowledgement of the work item; at the store: commit, removal of the rows,
acknowledgement of the reference. A worker that ends before its reference is published leaves chunks that nobody refers
to; they lie under the work item's sequence, and go when that work item is settled, by whichever answer, or as ``orphans``.

The chunks lie in a stream of their own, not in JetStream's object store: reading an object there waits for ever when a
chunk is gone (nats-py 2.16), every removed object leaves a message behind, and only an age could remove what nobody
refers to, together with what a slow store has not read yet.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import xxhash

from tensorrt_llm_ext.errors import LineageError, RowsLost, StoreError
from tensorrt_llm_ext.results import Record, record_from_payload
from tensorrt_llm_ext.worker.broker import Broker, Message, NotPublished, Published, rows_subject

FORMAT = "tensorrt_llm_ext.reference"
FORMAT_VERSION = 1

_CHUNKS_AT_ONCE = 16
_IDENTITY = ("request_id", "work_item_id", "token_hash", "num_tokens", "truncated_from")


@dataclass(frozen=True)
class Reference:
    """Whose answer it is, what made it, and where its payload lies: ``chunks`` are sequences among the stream's rows."""

    request_id: str
    work_item_id: str
    token_hash: str
    num_tokens: int
    truncated_from: int | None
    engine_fingerprint: str
    num_bytes: int
    payload_hash: str  # ``xxh3-128:`` over the payload
    chunks: tuple[int, ...]

    def to_json(self) -> bytes:
        return json.dumps({"format": FORMAT, "format_version": FORMAT_VERSION, **dataclasses.asdict(self)}).encode()


def reference_from_json(body: bytes) -> Reference:
    """Read a reference. Raises KeyError, TypeError or ValueError when it is damaged or is none."""
    value = json.loads(body)
    if (found := (value.pop("format"), value.pop("format_version"))) != (FORMAT, FORMAT_VERSION):
        raise ValueError(f"format {found}")
    reference = Reference(**{**value, "chunks": tuple(value["chunks"])})
    numbers = (reference.num_bytes, *reference.chunks)
    if not all(type(number) is int and 0 < number < 1 << 63 for number in numbers) or not isinstance(reference.request_id, str):
        raise ValueError("a request id that is no text, or numbers that are no sizes and sequences")
    if not reference.chunks or len(set(reference.chunks)) < len(reference.chunks):
        raise ValueError("no chunks, or one of them twice")
    return reference


def put_rows(
    broker: Broker, payload: bytes, partition: int, item: int, *, max_chunk_bytes: int
) -> tuple[int, ...] | NotPublished:
    """Put a payload among the rows, in chunks; return their sequences, or why there is no room for all of them.

    Where there is none, the chunks that were taken are removed: many workers may wait for room at once.
    """
    subject = rows_subject(partition, item)
    chunks: list[int] = []
    for first in range(0, len(payload), max_chunk_bytes * _CHUNKS_AT_ONCE):
        some = payload[first : first + max_chunk_bytes * _CHUNKS_AT_ONCE]
        pieces = (some[start : start + max_chunk_bytes] for start in range(0, len(some), max_chunk_bytes))
        outcomes = broker.publish([Message(subject, piece) for piece in pieces])
        refused = [outcome for outcome in outcomes if isinstance(outcome, NotPublished)]
        taken = [outcome.sequence for outcome in outcomes if isinstance(outcome, Published)]
        if refused:
            broker.remove_chunks(chunks + taken)
            return refused[0]
        chunks += taken
    return tuple(chunks)


def reference_to(record: Record, payload: bytes, chunks: Sequence[int]) -> Reference:
    """The reference to a record whose payload was put among the rows."""
    identity = {name: getattr(record, name) for name in _IDENTITY}
    engine = record.origin.engine_fingerprint
    return Reference(**identity, engine_fingerprint=engine, num_bytes=len(payload), payload_hash=_hash(payload), chunks=tuple(chunks))


def fetched(broker: Broker, reference: Reference, meanwhile: Callable[[], None] = lambda: None) -> Record:
    """The record that a reference is about, read from the rows and checked: size, hash, payload, identity.

    ``meanwhile`` is called before every few MiB. Raises RowsLost when its rows are gone or are not those that were hashed,
    LineageError when they are another's.
    """
    payload = _payload(broker, reference, meanwhile)
    if (len(payload), found := _hash(payload)) != (reference.num_bytes, reference.payload_hash):
        expected = f"{reference.num_bytes:,} bytes, {reference.payload_hash}"
        raise _lost(reference, expected, f"{len(payload):,} bytes, {found}")
    try:
        record = record_from_payload(payload)
    except StoreError as error:
        raise _lost(reference, error.expected, f"{error.what}: {error.found}") from error
    expected = reference_to(record, payload, reference.chunks)
    if expected != reference:
        names = [name for name in vars(reference) if getattr(reference, name) != getattr(expected, name)]
        raise LineageError(
            f"the rows that the answer to request '{reference.request_id}' refers to are another's",
            expected="; ".join(f"{name} {getattr(reference, name)}" for name in names),
            found="; ".join(f"{name} {getattr(expected, name)}" for name in names),
            fix="only workers of this stream may publish its rows and results",
        )
    return record


def _payload(broker: Broker, reference: Reference, meanwhile: Callable[[], None]) -> bytes:
    """The chunks, joined; no more of them than the reference says bytes."""
    payload = bytearray()
    for first in range(0, len(reference.chunks), _CHUNKS_AT_ONCE):
        meanwhile()
        sequences = reference.chunks[first : first + _CHUNKS_AT_ONCE]
        for sequence, chunk in zip(sequences, broker.read("rows", sequences), strict=True):
            if chunk is None:
                expected = f"{len(reference.chunks)} chunks of {reference.num_bytes:,} bytes in all"
                raise _lost(reference, expected, f"no chunk {sequence}")
            payload += chunk
        if len(payload) > reference.num_bytes:
            break
    return bytes(payload)


def _hash(payload: bytes) -> str:
    return f"xxh3-128:{xxhash.xxh3_128_hexdigest(payload)}"


def _lost(reference: Reference, expected: object, found: object) -> RowsLost:
    return RowsLost(
        f"the rows of the answer to request '{reference.request_id}' are gone or damaged",
        expected=expected,
        found=found,
        fix="find out what removes or damages messages of the broker's rows, and submit the item under a new request id",
    )
