"""Header: what a dataset says about itself, enough to read it alone, and what must be the same to add rows to it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from functools import cached_property

import ml_dtypes  # noqa: F401  registers bfloat16 as a NumPy type
import numpy as np
import pyarrow as pa

from tensorrt_llm_ext.errors import ForeignDataset, TapError
from tensorrt_llm_ext.fingerprint import canonical_json
from tensorrt_llm_ext.recipes.contract import Contract
from tensorrt_llm_ext.results.record import Origin
from tensorrt_llm_ext.taps import Tap

FORMAT = "tensorrt_llm_ext.vectors"
FORMAT_VERSION = 1
METADATA_KEY = "tensorrt_llm_ext"

_IDENTITY_BYTES = 100  # ids, hashes and numbers: 91 with one column and short ids, as Lance packs them
_STORED_DTYPES = {"float32": "float32", "float16": "float16", "bfloat16": "float32"}  # lossless, and searchable


@dataclass(frozen=True)
class Column:
    """Where the rows of one tap lie: vectors in column ``name``, the hash of each as computed in ``name + "_hash"``."""

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

    def row_bytes(self) -> int:
        """About how many bytes a row takes on disk: its vectors, and its identity."""
        vectors = sum(column.hidden_size * np.dtype(column.stored_dtype).itemsize for column in self.columns)
        return vectors + _IDENTITY_BYTES

    def schema(self) -> pa.Schema:
        """The Arrow schema of the dataset, this header in its metadata."""
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
            "format": FORMAT,
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
    """One column a tap, in the contract's order. Raises TapError for a tap whose rows are not one vector."""
    num_layers, hidden_size = contract.architecture.num_layers, contract.architecture.hidden_size
    many = [tap.spelling(num_layers) for tap in contract.taps if tap.rows == "all"]
    if many:
        raise TapError(
            "a dataset of vectors holds one row a request, and these taps give one for each token",
            expected="rows last or mean",
            found=", ".join(many),
            fix="build an engine with taps @last or @mean",
        )
    computed = {tap: contract.output_of(tap).dtype for tap in contract.taps}
    return tuple(
        Column(tap.column(num_layers), tap, hidden_size, dtype, _STORED_DTYPES[dtype]) for tap, dtype in computed.items()
    )


def read_header(schema: pa.Schema, path: str) -> Header:
    """Read the header of a dataset's schema. Raises ForeignDataset when it is not one of ours, or of another format."""
    try:
        value = json.loads((schema.metadata or {})[METADATA_KEY.encode()])
        found = f"{value['format']} {value['format_version']}"
    except (KeyError, ValueError, TypeError) as error:
        raise ForeignDataset(
            f"'{path}' is a Lance dataset, but not one of hidden states",
            expected=f"the key {METADATA_KEY} in its schema's metadata",
            found=f"{type(error).__name__}: {error}",
            fix="name another output folder",
        ) from error
    if found != f"{FORMAT} {FORMAT_VERSION}":
        raise ForeignDataset(
            f"'{path}' has a format that this release does not read",
            expected=f"{FORMAT} {FORMAT_VERSION}",
            found=found,
            fix="use the release that wrote it",
        )
    try:
        return Header(Contract.from_dict(value["contract"]), Origin(**value["origin"]), value["job"])
    except (KeyError, TypeError, ValueError) as error:
        raise ForeignDataset(
            f"the header of '{path}' is damaged",
            expected=f"the fields of {FORMAT} {FORMAT_VERSION}",
            found=f"{type(error).__name__}: {error}",
            fix="restore it from a copy, or name another output folder",
        ) from error


def check_same(stored: Header, wanted: Header, path: str) -> None:
    """Raise ForeignDataset with every difference unless rows of ``wanted`` may follow the rows that are stored."""
    old, new = _flat(_identity(stored)), _flat(_identity(wanted))
    names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    if names:
        raise ForeignDataset(
            f"'{path}' holds rows of another engine or another way to make token ids",
            expected="; ".join(f"{name} = {old.get(name)}" for name in names),
            found="; ".join(f"{name} = {new.get(name)}" for name in names),
            fix="resume with the engine and the options that began it, or write to another folder",
        )


def _identity(header: Header) -> dict:
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
