"""Header: what a dataset says about itself, enough to read it alone, and what must be the same to add rows to it.

A dataset is of one kind: ``vectors`` (one row a request: taps ``last`` and ``mean``) or ``states`` (one row a token: taps
``all``).
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import ml_dtypes  # noqa: F401  registers bfloat16 as a NumPy type
import numpy as np
import pyarrow as pa

from tensorrt_llm_ext.errors import ForeignDataset, TapError
from tensorrt_llm_ext.fingerprint import canonical_json
from tensorrt_llm_ext.recipes.contract import Contract
from tensorrt_llm_ext.results.record import Origin
from tensorrt_llm_ext.taps import Tap

Kind = Literal["vectors", "states"]

FORMATS: dict[Kind, str] = {"vectors": "tensorrt_llm_ext.vectors", "states": "tensorrt_llm_ext.states"}
FORMAT_VERSION = 1
METADATA_KEY = "tensorrt_llm_ext"

_IDENTITY_BYTES = 100  # ids, hashes and numbers: 91 with one column and short ids, as Lance packs them
_STORED_DTYPES = {"float32": "float32", "float16": "float16", "bfloat16": "float32"}  # lossless, and searchable


@dataclass(frozen=True)
class Column:
    """Where the rows of one tap lie: values in column or tensor ``name``, each request's hash as computed in
    ``name + "_hash"``."""

    name: str
    tap: Tap
    hidden_size: int
    computed_dtype: str
    stored_dtype: str

    @property
    def hash_name(self) -> str:
        return f"{self.name}_hash"


@dataclass(frozen=True)
class Header:
    """The engine's contract (its canaries apart), the origin of every record, and the job's own conditions.

    ``job`` holds what else decides the rows and their order (token policy, windows), as JSON types.
    """

    contract: Contract
    origin: Origin
    job: dict

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        """One column a tap, in the contract's order."""
        return columns_of(self.contract)

    @cached_property
    def kind(self) -> Kind:
        """What the taps make of the dataset."""
        return "states" if self.contract.taps[0].rows == "all" else "vectors"

    def value_bytes(self) -> int:
        """Bytes of one row's values: of a request for vectors, of a token for states."""
        return sum(column.hidden_size * np.dtype(column.stored_dtype).itemsize for column in self.columns)

    def row_bytes(self) -> int:
        """About how many bytes a row of vectors takes on disk: its values, and its identity."""
        return self.value_bytes() + _IDENTITY_BYTES

    def schema(self) -> pa.Schema:
        """The Arrow schema of a dataset of vectors, this header in its metadata. Raises TapError for states."""
        if self.kind == "states":
            num_layers = self.contract.architecture.num_layers
            raise TapError(
                "a dataset of vectors holds one row a request, and these taps give one for each token",
                expected="rows last or mean",
                found=", ".join(tap.spelling(num_layers) for tap in self.contract.taps),
                fix="keep them in a StatesStore, or build an engine with taps @last or @mean",
            )
        fields = [
            pa.field("request_id", pa.string(), nullable=False),
            pa.field("work_item_id", pa.string(), nullable=False),
            pa.field("row", pa.int64(), nullable=False),  # number of the input's row: rows are in this order
            pa.field("window_end", pa.int64(), nullable=False),  # the commit of this row settled all input rows before it
            pa.field("token_hash", pa.string(), nullable=False),
            pa.field("num_tokens", pa.int32(), nullable=False),
            pa.field("truncated_from", pa.int32(), nullable=True),
        ]
        for column in self.columns:
            vector = pa.list_(pa.from_numpy_dtype(np.dtype(column.stored_dtype)), column.hidden_size)
            fields.append(pa.field(column.name, vector, nullable=False))
            fields.append(pa.field(column.hash_name, pa.string(), nullable=False))
        return pa.schema(fields, metadata={METADATA_KEY: canonical_json(self.to_dict())})

    def to_dict(self) -> dict:
        return {
            "format": FORMATS[self.kind],
            "format_version": FORMAT_VERSION,
            "columns": {
                column.name: {"tap": column.tap.to_dict(), "computed": column.computed_dtype, "stored": column.stored_dtype}
                for column in self.columns
            },
            # without canaries, whose vectors would lie in the metadata of every version
            "contract": dataclasses.replace(self.contract, canaries=()).to_dict(),
            "origin": dataclasses.asdict(self.origin),
            "job": self.job,
        }


def columns_of(contract: Contract) -> tuple[Column, ...]:
    """One column a tap, in the contract's order. Raises TapError for taps of which some give a row a token, some one."""
    num_layers, hidden_size = contract.architecture.num_layers, contract.architecture.hidden_size
    many = [tap.spelling(num_layers) for tap in contract.taps if tap.rows == "all"]
    if many and len(many) < len(contract.taps):
        raise TapError(
            "a dataset holds one row a request or one row a token, and these taps give both",
            expected="taps @last and @mean, or taps @all",
            found=", ".join(tap.spelling(num_layers) for tap in contract.taps),
            fix=f"choose with --taps, for example --taps {','.join(many)}",
        )
    computed = {tap: contract.output_of(tap).dtype for tap in contract.taps}
    stored = {dtype: dtype if many else _STORED_DTYPES[dtype] for dtype in computed.values()}
    return tuple(Column(tap.column(num_layers), tap, hidden_size, dtype, stored[dtype]) for tap, dtype in computed.items())


def read_header(schema: pa.Schema, path: str) -> Header:
    """Read the header of a dataset's schema. Raises ForeignDataset when it is not one of ours, or of another format."""
    return header_from_text((schema.metadata or {}).get(METADATA_KEY.encode(), b"null"), "vectors", path)


def header_from_text(text: bytes, kind: Kind, path: str) -> Header:
    """Read a header of a dataset of this kind from its JSON. Raises ForeignDataset when it is something else."""
    try:
        value = json.loads(text)
        found = f"{value['format']} {value['format_version']}"
    except (KeyError, ValueError, TypeError) as error:
        raise ForeignDataset(
            f"'{path}' is a dataset, but not one of hidden states",
            expected=f"the header of a dataset of {kind}, under the key {METADATA_KEY}",
            found=f"{type(error).__name__}: {error}",
            fix="name another folder",
        ) from error
    if found != f"{FORMATS[kind]} {FORMAT_VERSION}":
        raise ForeignDataset(
            f"'{path}' has a format that this release does not read",
            expected=f"{FORMATS[kind]} {FORMAT_VERSION}",
            found=found,
            fix="use the release that wrote it",
        )
    try:
        return Header(Contract.from_dict(value["contract"]), Origin(**value["origin"]), value["job"])
    except (KeyError, TypeError, ValueError) as error:
        raise ForeignDataset(
            f"the header of '{path}' is damaged",
            expected=f"the fields of {FORMATS[kind]} {FORMAT_VERSION}",
            found=f"{type(error).__name__}: {error}",
            fix="restore it from a copy, or name another output folder",
        ) from error


def check_same(stored: Header, wanted: Header, path: str) -> None:
    """Raise ForeignDataset with every difference unless rows of ``wanted`` may follow the rows that are stored."""
    old, new = _flat(identity_of(stored)), _flat(identity_of(wanted))
    names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    if names:
        raise ForeignDataset(
            f"'{path}' holds rows of another engine or another way to make token ids",
            expected="; ".join(f"{name} = {old.get(name)}" for name in names),
            found="; ".join(f"{name} = {new.get(name)}" for name in names),
            fix="resume with the engine and the options that began it, or write to another folder",
        )


def identity_of(header: Header) -> dict:
    """What decides the rows: the code's version is written down, but a newer release may go on."""
    origin = dataclasses.asdict(header.origin)
    del origin["code_version"]
    num_layers = header.contract.architecture.num_layers
    taps = ",".join(tap.spelling(num_layers) for tap in header.contract.taps)
    return {"taps": taps, "origin": origin, "job": header.job}


def _flat(value: dict, prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, part in value.items():
        flat |= _flat(part, f"{prefix}{name}.") if isinstance(part, dict) else {prefix + name: part}
    return flat
