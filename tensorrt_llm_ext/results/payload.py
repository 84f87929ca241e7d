"""The payload form of a record: a safetensors container that explains itself.

Each state is a tensor named by its tap's column (``final_post_last``). The container's metadata is the record's header,
flat text readable without this package: every field of ``Record`` and ``Origin`` under its own name, a field that is
None left out, ``states``, a JSON list of column, tap, computed dtype and payload hash in tap order, and
``header_hash``, the fingerprint of all the others.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

import ml_dtypes
import numpy as np
import safetensors
from safetensors.numpy import save

from tensorrt_llm_ext.errors import StoreError
from tensorrt_llm_ext.fingerprint import canonical_json, fingerprint
from tensorrt_llm_ext.results.record import FORMAT_VERSION, Origin, Record, State, rows_hash
from tensorrt_llm_ext.taps import Tap

FORMAT = "tensorrt_llm_ext.record"

_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
_WHOLE_NUMBERS = ("num_tokens", "truncated_from", "num_layers", "hidden_size")
_OPTIONAL = ("truncated_from", "template_hash", "prefix")
_ORIGIN_FIELDS = tuple(field.name for field in dataclasses.fields(Origin))
_RECORD_FIELDS = tuple(field.name for field in dataclasses.fields(Record) if field.name not in ("states", "origin"))


def payload_from_record(record: Record) -> bytes:
    """Write a record as one safetensors container; ``record_from_payload`` gives the same record back."""
    num_layers = record.origin.num_layers
    fields = {name: getattr(record, name) for name in _RECORD_FIELDS}
    fields |= {name: getattr(record.origin, name) for name in _ORIGIN_FIELDS}
    header = {"format": FORMAT, "format_version": str(FORMAT_VERSION)}
    header |= {name: str(value) for name, value in fields.items() if value is not None}
    header["states"] = canonical_json([_described(state, num_layers) for state in record.states])
    header["header_hash"] = fingerprint(header)
    rows = {state.tap.column(num_layers): np.ascontiguousarray(state.rows) for state in record.states}
    return save(rows, metadata=header)


def record_from_payload(payload: bytes) -> Record:
    """Read a record back, checking format version, fields, shapes and the hashes of the header and of every row.

    Raises StoreError when the payload is damaged, is something else, or has another format version.
    """
    header, tensors = _opened(payload)
    version = header.get("format_version")
    if header.get("format") != FORMAT or version != str(FORMAT_VERSION):
        raise StoreError(
            "this is not a record payload of a format this release reads",
            expected=f"format {FORMAT}, format_version {FORMAT_VERSION}",
            found=f"format {header.get('format')}, format_version {version}",
            fix="read it with the release that wrote it, or extract it again",
        )
    found = header.pop("header_hash", None)
    if found != fingerprint(header):
        raise _damaged("its header is not the one that was hashed", found, fingerprint(header))
    try:
        fields = {name: _field(header, name) for name in _RECORD_FIELDS + _ORIGIN_FIELDS}
        origin = Origin(**{name: fields[name] for name in _ORIGIN_FIELDS})
        described = json.loads(header["states"])
        states = tuple(_state(entry, tensors, fields["num_tokens"], origin) for entry in described)
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged("its header lacks a field or holds another type", "every field", repr(error)) from error
    if len(states) != len(tensors):
        raise _damaged("it holds tensors its header does not name", [e["column"] for e in described], sorted(tensors))
    return Record(**{name: fields[name] for name in _RECORD_FIELDS}, states=states, origin=origin)


def _described(state: State, num_layers: int) -> dict:
    return {
        "column": state.tap.column(num_layers),
        "tap": state.tap.to_dict(),
        "computed_dtype": state.computed_dtype,
        "payload_hash": state.payload_hash,
    }


def _opened(payload: bytes) -> tuple[dict[str, str], dict[str, Mapping]]:
    try:
        tensors = dict(safetensors.deserialize(payload))
        header_length = int.from_bytes(payload[:8], "little")
        return json.loads(payload[8 : 8 + header_length]).get("__metadata__", {}), tensors
    except safetensors.SafetensorError as error:
        raise _damaged("it is not a whole safetensors container", "a safetensors container", error) from error


def _field(header: Mapping[str, str], name: str) -> str | int | None:
    if name not in header and name in _OPTIONAL:
        return None
    return int(header[name]) if name in _WHOLE_NUMBERS else header[name]


def _state(described: dict, tensors: Mapping[str, Mapping], num_tokens: int, origin: Origin) -> State:
    tap = Tap.from_dict(described["tap"])
    column = described["column"]
    tensor = tensors[column]
    shape = (num_tokens if tap.rows == "all" else 1, origin.hidden_size)
    if column != tap.column(origin.num_layers) or tuple(tensor["shape"]) != shape or tensor["dtype"] not in _DTYPES:
        raise _damaged(
            f"its tensor '{column}' is not the state its header describes",
            f"'{tap.column(origin.num_layers)}', shape {list(shape)}, dtype one of {', '.join(_DTYPES)}",
            f"'{column}', shape {tensor['shape']}, dtype {tensor['dtype']}",
        )
    rows = np.frombuffer(bytes(tensor["data"]), dtype=_DTYPES[tensor["dtype"]]).reshape(shape)
    if rows_hash(rows) != described["payload_hash"]:
        raise _damaged(
            f"the rows of '{column}' are not those that were hashed", described["payload_hash"], rows_hash(rows)
        )
    return State(tap, rows, described["computed_dtype"], described["payload_hash"])


def _damaged(how: str, expected: object, found: object) -> StoreError:
    return StoreError(
        f"a record payload is damaged: {how}",
        expected=expected,
        found=found,
        fix="copy it again from where it was written, or extract the request again",
    )
