"""Contract: what an engine promises, stored beside it as contract.json.

The contract alone is enough to check an engine and to onboard a consumer without a GPU. Data types and their checks
live here; nothing runs.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from tensorrt_llm_ext.checkpoint.architecture import Architecture
from tensorrt_llm_ext.errors import ContractError
from tensorrt_llm_ext.fingerprint import fingerprint
from tensorrt_llm_ext.taps import Tap

FORMAT_VERSION = 1
FILE_NAME = "contract.json"
_HASH = "contract_hash"  # of everything else in the file: a limit or a tolerance changed by hand is seen

Convention = Literal["prefix_sum", "index", "none"]


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of an engine. ``shape`` holds sizes and the symbols T (tokens), B (sequences), S (longest)."""

    name: str
    role: Literal["input", "output"]
    dtype: str
    shape: tuple[int | str, ...]
    location: Literal["device", "host"] = "device"
    tap: Tap | None = None  # set on outputs that carry a tap


@dataclass(frozen=True)
class Limits:
    """The largest batch an engine takes. ``max_padded_tokens`` bounds B x S, which no single dimension can.

    ``opt_num_tokens`` is how many tokens a batch should hold to run fastest (None: as many as fit); a longer sequence
    goes alone.
    """

    max_num_tokens: int
    max_batch_size: int
    max_seq_len: int
    max_padded_tokens: int
    opt_num_tokens: int | None = None


@dataclass(frozen=True)
class Profile:
    """One optimization profile of a plan, from one token up to these sizes. An engine of several serves a batch by the
    first that admits it; every batch within the engine's limits fits one."""

    max_num_tokens: int
    max_batch_size: int
    max_seq_len: int


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes an open engine takes at its limits, the CUDA context apart, and how they were computed."""

    device_bytes: int
    host_bytes: int
    formula: str


@dataclass(frozen=True)
class EngineFile:
    """A file of the engine directory as it was published.

    A compiler may write other bytes for the same plan: then ``is_reproducible`` is False, and what the file was
    compiled from is in the plan's fingerprint instead.
    """

    name: str
    size: int
    sha256: str
    is_reproducible: bool = True


@dataclass(frozen=True)
class Fingerprints:
    """Identities of what an engine was made from, and of its plan: of its files, or of what it was compiled from."""

    checkpoint: str
    tokenizer: str
    recipe: str
    plan: str


@dataclass(frozen=True)
class CanaryState:
    """The right numbers of one tap for one canary.

    ``rows`` is float32 ``[1, hidden]``, or ``[tokens, hidden]`` for rows ``all``. A returned value passes when each of
    its rows lies within ``tolerance`` by ``row_distances``. ``confusion`` is the distance, by the same measure, to the
    nearest wrong answer, and ``confusion_with`` names it.
    """

    tap: Tap
    rows: np.ndarray
    tolerance: float
    confusion: float
    confusion_with: str


def row_distances(rows: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Measure how far each row lies from the right one: 0 is equal, about 1 is unrelated; NaN where a row has one.

    The root mean square over a row of ``(x - right) / (|right| + median |right|)``. Not the largest difference: the
    first token's state has a few values a thousand times the others, the same for every token and nearly the same in
    neighbouring layers, so float16's rounding of those few exceeds the whole difference between two layers.
    """
    rows, right = rows.astype(np.float64), right.astype(np.float64)
    size = np.abs(right)
    scale = size + np.median(size, axis=-1, keepdims=True) + np.finfo(np.float32).tiny
    return np.sqrt(np.mean(((rows - right) / scale) ** 2, axis=-1))


def row_cosines(expected: np.ndarray, found: np.ndarray) -> np.ndarray:
    """Cosine of each row with its counterpart, in float64. Two zero rows agree (1); a zero row and another do not (0)."""
    expected, found = expected.astype(np.float64), found.astype(np.float64)
    lengths = np.linalg.norm(expected, axis=-1) * np.linalg.norm(found, axis=-1)
    both_zero = ~expected.any(axis=-1) & ~found.any(axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        cosines = np.where(lengths > 0, (expected * found).sum(axis=-1) / lengths, np.where(both_zero, 1.0, 0.0))
    return np.nan_to_num(cosines, nan=-1.0)


@dataclass(frozen=True)
class Canary:
    """A known token sequence with its right hidden states and the ``source`` that gave them."""

    token_ids: tuple[int, ...]
    source: str
    states: tuple[CanaryState, ...]


@dataclass(frozen=True)
class Contract:
    """What an engine promises. Fingerprints and comparisons use ``engine_fingerprint``."""

    model_name: str
    architecture: Architecture
    fingerprints: Fingerprints
    backend: str
    builder: str
    builder_version: str
    accepted_runtime: str  # a version specifier, for example "onnxruntime>=1.32,<2"
    platform: str  # "any", or for example "linux-x86_64"
    compute_capabilities: tuple[str, ...]  # empty: runs on a CPU
    weight_dtype: str
    activation_dtype: str
    taps: tuple[Tap, ...]
    tensors: tuple[TensorSpec, ...]
    limits: Limits
    memory: MemoryEstimate
    files: tuple[EngineFile, ...]
    canaries: tuple[Canary, ...]
    build: dict  # facts of the build for the reader: seconds, peak memory, precision choices; JSON types only
    profiles: tuple[Profile, ...] = ()  # of a plan: shortest sequences first, in the plan's own order
    format_version: int = FORMAT_VERSION

    def engine_fingerprint(self) -> str:
        """Hash of the engine's ``identity``."""
        return fingerprint(self.identity())

    def identity(self) -> dict:
        """What makes the engine this one, as JSON types: all that decides its numbers, nothing that describes the build.

        Of a file whose bytes differ from build to build only the name counts. The same recipe and checkpoint, built
        twice by the same version, are the same engine; the two contracts then differ in the size and hash of these
        files and in ``build``.
        """
        described = self.to_dict()
        for field in ("build", "memory", "canaries", "accepted_runtime"):
            del described[field]
        described["files"] = [_identity(file) for file in self.files]
        if not self.profiles:
            del described["profiles"]
        return described

    def output_of(self, tap: Tap) -> TensorSpec:
        """Find the output tensor that carries ``tap``. Raises ContractError when no output does."""
        for tensor in self.tensors:
            if tensor.tap == tap:
                return tensor
        raise ContractError(
            f"no output tensor carries the tap {tap}",
            expected=f"one of {[str(t.tap) for t in self.tensors if t.tap]}",
            found=str(tap),
            fix="build the engine with this tap",
        )

    def to_dict(self) -> dict:
        """The contract as JSON types."""
        value = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        value["architecture"] = self.architecture.to_dict()
        for name in ("fingerprints", "limits", "memory"):
            value[name] = dataclasses.asdict(value[name])
        value["compute_capabilities"] = list(self.compute_capabilities)
        value["taps"] = [tap.to_dict() for tap in self.taps]
        value["tensors"] = [_tensor_to_dict(tensor) for tensor in self.tensors]
        value["files"] = [dataclasses.asdict(file) for file in self.files]
        value["profiles"] = [dataclasses.asdict(profile) for profile in self.profiles]
        value["canaries"] = [_canary_to_dict(canary) for canary in self.canaries]
        return json.loads(json.dumps(value))  # tuples become lists: what is hashed is what is stored

    @classmethod
    def from_dict(cls, value: dict) -> Contract:
        """Rebuild a contract. Raises KeyError, TypeError or ValueError for a wrong field; ``read_contract`` maps them."""
        return cls(
            **{
                **value,
                "architecture": Architecture.from_dict(value["architecture"]),
                "fingerprints": Fingerprints(**value["fingerprints"]),
                "limits": Limits(**value["limits"]),
                "memory": MemoryEstimate(**value["memory"]),
                "compute_capabilities": tuple(value["compute_capabilities"]),
                "taps": tuple(Tap.from_dict(tap) for tap in value["taps"]),
                "tensors": tuple(_tensor_from_dict(tensor) for tensor in value["tensors"]),
                "files": tuple(EngineFile(**file) for file in value["files"]),
                "profiles": tuple(Profile(**profile) for profile in value.get("profiles", ())),
                "canaries": tuple(_canary_from_dict(canary) for canary in value["canaries"]),
            }
        )


def contract_json(contract: Contract) -> str:
    """The text of contract.json, which ``read_contract`` takes. Raises ValueError for a number that JSON lacks."""
    value = contract.to_dict()
    return json.dumps({**value, _HASH: fingerprint(value)}, indent=1, allow_nan=False)


def read_contract(engine: Path) -> Contract:
    """Read the contract of an engine directory, or a contract file itself.

    Raises ContractError when it is missing, damaged, of another format, or changed since it was written.
    """
    path = Path(engine)
    path = path if path.is_file() else path / FILE_NAME
    rebuild = "build the engine again: trtllm-extract build --checkpoint … --out …"
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        written = value.pop(_HASH, None) if isinstance(value, dict) else None
        found = fingerprint(value)
    except OSError as error:
        raise ContractError(
            f"'{engine}' is not an engine directory",
            expected=f"a folder that holds {FILE_NAME}",
            found="no such file" if isinstance(error, FileNotFoundError) else error,
            fix=f"name an engine directory, or {rebuild}",
        ) from error
    except ValueError as error:  # of JSON and UTF-8, and numbers that are not finite
        raise ContractError(f"'{path}' is damaged", expected="JSON", found=error, fix=rebuild) from error
    version = value.get("format_version") if isinstance(value, dict) else None
    if version != FORMAT_VERSION:
        raise ContractError(
            f"'{path}' is no contract, or one of another format version",
            expected=f"format_version {FORMAT_VERSION}",
            found=f"format_version {version}",
            fix=f"{rebuild}, or use the release that wrote it",
        )
    if found != written:
        raise ContractError(
            f"'{path}' was changed since it was written",
            expected=f"{_HASH} {found}, of what it holds",
            found=written or "none",
            fix=f"copy the engine again, or {rebuild}; a contract is not edited by hand",
        )
    try:
        return Contract.from_dict(value)
    except (KeyError, TypeError, ValueError) as error:
        raise ContractError(
            f"'{path}' does not have the fields of a contract",
            expected=f"the fields of format version {FORMAT_VERSION}",
            found=f"{type(error).__name__}: {error}",
            fix=rebuild,
        ) from error


def _identity(file: EngineFile) -> dict:
    """What of a file decides the engine's numbers."""
    return {"name": file.name, "size": file.size, "sha256": file.sha256} if file.is_reproducible else {"name": file.name}


def _tensor_to_dict(tensor: TensorSpec) -> dict:
    return {**dataclasses.asdict(tensor), "tap": tensor.tap and tensor.tap.to_dict()}


def _tensor_from_dict(value: dict) -> TensorSpec:
    return TensorSpec(**{**value, "shape": tuple(value["shape"]), "tap": value["tap"] and Tap.from_dict(value["tap"])})


def _canary_to_dict(canary: Canary) -> dict:
    states = [
        {
            "tap": state.tap.to_dict(),
            "shape": list(state.rows.shape),
            "float32_base64": base64.b64encode(np.ascontiguousarray(state.rows, dtype="<f4").tobytes()).decode(),
            "tolerance": state.tolerance,
            "confusion": state.confusion,
            "confusion_with": state.confusion_with,
        }
        for state in canary.states
    ]
    return {"token_ids": list(canary.token_ids), "source": canary.source, "states": states}


def _canary_from_dict(value: dict) -> Canary:
    states = tuple(
        CanaryState(
            tap=Tap.from_dict(state["tap"]),
            rows=np.frombuffer(base64.b64decode(state["float32_base64"]), dtype="<f4").reshape(state["shape"]),
            tolerance=float(state["tolerance"]),
            confusion=float(state["confusion"]),
            confusion_with=state["confusion_with"],
        )
        for state in value["states"]
    )
    return Canary(token_ids=tuple(value["token_ids"]), source=value["source"], states=states)
