"""Two engines by their contracts, field by field: are they the same engine, and where do they differ?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tensorrt_llm_ext.fingerprint import fingerprint
from tensorrt_llm_ext.recipes import Contract, read_contract

_NAMING_KEYS = ("name", "tap")  # of the items of a list: told apart by these, not by their place
_REASONS = {  # first parts of a field's name: what a difference in it means
    "fingerprints.checkpoint": "the checkpoints are not the same: other weights, or another configuration",
    "fingerprints.tokenizer": "the tokenizers are not the same",
    "fingerprints.recipe": "recipe, card or options are not the same; the fields beside this one follow from them",
    "fingerprints.plan": "what the plan was made from is not the same: the graph, a weight's stored values, an FP8 scale, or build's --deterministic",
    "builder_version": "the builders are of different versions",
    "accepted_runtime": "each is opened by its own version of the library alone",
    "canaries": "the canaries were made by other versions, from other weights, or replaced by verify --update-canaries",
}
_TIMED = "the full TensorRT chooses kernels by timing them on the card, and no two runs time alike"
_UNTIMED = (
    "TensorRT-RTX times nothing and gave the same bytes whenever a build was repeated on one machine: built on another one, "
    "or one of the files was changed since (probe --full hashes them)"
)


@dataclass(frozen=True)
class Difference:
    """One field of the contracts, by its path; None where one of them lacks it."""

    field: str
    is_identity: bool  # whether it makes them different engines; the others only describe the build
    here: str | None
    there: str | None


@dataclass(frozen=True)
class EngineComparison:
    """Two contracts. ``reasons`` say in words what the differences mean; empty where there are none to speak of."""

    is_same_engine: bool
    differences: tuple[Difference, ...]
    reasons: tuple[str, ...]


def compare_engines(path: Path, against: Path) -> EngineComparison:
    """Compare two engine directories, or contracts. Raises ContractError for what is neither."""
    here, there = read_contract(path), read_contract(against)
    decisive = {field for field, _, _ in _different(here.identity(), there.identity())}
    found = _different(_described(here), _described(there))
    differences = tuple(Difference(field, field in decisive, a, b) for field, a, b in found)
    ordered = tuple(sorted(differences, key=lambda difference: not difference.is_identity))
    is_same = here.engine_fingerprint() == there.engine_fingerprint()
    return EngineComparison(is_same, ordered, tuple(_reasons(ordered, here, there)))


def _described(contract: Contract) -> dict:
    """A contract as JSON types, without the arrays: a canary is shown by its hash."""
    return {**contract.to_dict(), "canaries": [fingerprint(canary) for canary in contract.to_dict()["canaries"]]}


def _different(here: object, there: object, field: str = "") -> Iterator[tuple[str, str | None, str | None]]:
    """Walk two values of JSON types; yield each leaf that differs, by its path."""
    if here == there:
        return
    a, b = _by_name(here), _by_name(there)
    if a is None or b is None:
        yield field, _text(here), _text(there)
        return
    if isinstance(here, list) and list(a) != list(b) and a.keys() == b.keys():
        yield f"{field} in order", _text(list(a)), _text(list(b))
    for name in [*a, *(name for name in b if name not in a)]:
        yield from _different(a.get(name), b.get(name), f"{field}.{name}" if field else name)


def _by_name(value: object) -> dict | None:
    """The parts of an object or of a list of objects, by name; None for a leaf."""
    if isinstance(value, dict):
        return value or None
    if not isinstance(value, list) or not value or not (isinstance(value[0], dict) or str(value[0]).startswith("sha256:")):
        return None
    key = next((key for key in _NAMING_KEYS if isinstance(value[0], dict) and isinstance(value[0].get(key), str)), None)
    return {str(item[key]) if key else str(index): item for index, item in enumerate(value)}


def _text(value: object) -> str | None:
    if isinstance(value, dict):
        return f"there, with {', '.join(value)}"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return None if value is None else str(value)


def _reasons(differences: tuple[Difference, ...], here: Contract, there: Contract) -> Iterator[str]:
    fields = [difference.field for difference in differences]
    yield from (reason for start, reason in _REASONS.items() if any(field.startswith(start) for field in fields))
    varying = {file.name: file.sha256 for file in here.files if not file.is_reproducible}
    others = {file.name: file.sha256 for file in there.files if not file.is_reproducible}
    made_from, others_from = ((found.fingerprints.plan, found.fingerprints.recipe) for found in (here, there))
    if made_from == others_from and varying != others:  # another card or other limits are reason enough for another plan
        names = " and ".join(sorted(varying.keys() | others.keys()))
        if here.builder_version != there.builder_version:
            why = f"{here.builder} {here.builder_version} and {there.builder_version} write other plans"
        else:
            why = _TIMED if here.builder == "tensorrt" else _UNTIMED
        yield f"the bytes of {names} differ, what it was compiled from does not: {why}"
