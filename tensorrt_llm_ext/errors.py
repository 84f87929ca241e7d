"""Every exception this package raises.

::

    ExtractionError
    ├── CheckpointError             weights, config or tokenizer on disk
    │   ├── UnsupportedCheckpoint   readable, but not a model we serve (architecture, rope, quantisation)
    │   └── DamagedCheckpoint       truncated, missing or contradictory files
    ├── TapError                    a tap that does not exist in this model
    ├── RecipeError                 a recipe or card that does not pass its checks
    ├── BuildError                  the builder could not make the engine
    ├── PatchError                  upstream's source is not there, or not one that the patch understands
    ├── EngineError                 an engine directory that cannot be used
    │   ├── ContractError           contract.json is damaged, of another format, or disagrees with the engine
    │   ├── IncompatibleEngine      built for another card, library or version
    │   ├── ConventionError         the measured gather convention is not one we can trust
    │   └── CanaryError             a known sequence came back with other numbers
    ├── RunError                    a batch that did not come back
    │   ├── BackendError            the engine's library refused or failed
    │   ├── DeadlineExceeded        the doorbell did not ring in time
    │   ├── OutOfMemory             pinned or device memory that the machine does not have
    │   ├── PlanError               a batch that cannot be packed, or what came back is not what its plan promised
    │   └── SessionClosed           the session was closed, or failed earlier
    ├── InputError                  the input as a whole cannot be read
    ├── Refusal                     one work item cannot be served; the run goes on
    ├── StoreError                  a dataset that cannot be written or read
    │   ├── ForeignDataset          it belongs to another engine, other taps, or something else
    │   ├── LineageError            a record that does not match its work item
    │   ├── RowsLost                rows that an answer refers to are gone or damaged
    │   ├── DiskFull                no space; nothing uncommitted was kept
    │   └── NoRoom                  the disk cannot hold what the input will become; said before the first byte
    ├── BrokerError                 the message broker cannot be reached, or refused a call
    │   ├── NotAdmitted             a worker that is not what the stream asks for
    │   └── LeaseLost               another writer holds the partition now
    ├── VerificationFailed          numbers beyond the stated tolerance
    └── MissingExtra                an optional part of this package is not installed

An error states what happened, what was expected, what was found and what to do about it. Errors of libraries
beneath are mapped at the door that met them (``raise … from``).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ExtractionError(Exception):
    """The root: catches everything this package raises on purpose.

    ``what`` is one sentence. ``expected``, ``found`` and ``fix`` carry values with their units and the file or
    tensor they belong to; they are also attributes, so ``--json`` can print them apart.
    """

    def __init__(self, what: str, *, expected: object, found: object, fix: str) -> None:
        self.what = what
        self.expected = str(expected)
        self.found = str(found)
        self.fix = fix
        super().__init__(f"{what}\n  expected: {self.expected}\n  found:    {self.found}\n  to do:    {fix}")

    def __reduce__(self):  # exceptions cross process borders; keyword-only arguments need this
        return (_rebuilt, (type(self), self.what, self.expected, self.found, self.fix, self.__dict__))

    def to_dict(self) -> dict[str, str]:
        """The error as ``--json`` prints it."""
        return {
            "error": type(self).__name__,
            "what": self.what,
            "expected": self.expected,
            "found": self.found,
            "fix": self.fix,
        }


class CheckpointError(ExtractionError):
    """Weights, config or tokenizer on disk cannot be used."""


class UnsupportedCheckpoint(CheckpointError):
    """A readable checkpoint of a kind this package does not serve."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint whose files are truncated, missing or contradict each other."""


class TapError(ExtractionError):
    """A tap that does not exist in this model, or is spelt in a way that could mean two things."""


class RecipeError(ExtractionError):
    """A recipe or card that does not pass its checks."""


class BuildError(ExtractionError):
    """The builder could not make the engine."""


class PatchError(ExtractionError):
    """TensorRT-LLM's source is not installed, or is not what the patch was written for."""


class EngineError(ExtractionError):
    """An engine directory that cannot be used."""


class ContractError(EngineError):
    """contract.json is damaged, of another format version, or disagrees with the engine beside it."""


class IncompatibleEngine(EngineError):
    """An engine built for another card, library or version."""


class ConventionError(EngineError):
    """The gather convention that was measured is not one that can be trusted."""


class CanaryError(EngineError):
    """A known sequence came back with other numbers than the contract promises."""


class RunError(ExtractionError):
    """A batch that did not come back."""


class BackendError(RunError):
    """The engine's library refused a call or failed."""


class DeadlineExceeded(RunError):
    """The doorbell did not ring in time."""


class OutOfMemory(RunError):
    """Pinned or device memory was asked for that the machine does not have."""


class PlanError(RunError):
    """A batch cannot be packed as it is, or what came back is not what its plan promised."""


class SessionClosed(RunError):
    """The session was closed, or failed earlier and was closed for that reason."""


class InputError(ExtractionError):
    """The input as a whole cannot be read."""


class Refusal(ExtractionError):
    """One work item cannot be served; the run goes on.

    ``code`` is a stable word for machines (``too_long``, ``empty``, ``duplicate_id`` …).
    """

    def __init__(self, code: str, what: str, *, expected: object, found: object, fix: str) -> None:
        super().__init__(what, expected=expected, found=found, fix=fix)
        self.code = code

    def __reduce__(self):
        return (_rebuilt_refusal, (self.code, self.what, self.expected, self.found, self.fix))

    def to_dict(self) -> dict[str, str]:
        return {**super().to_dict(), "code": self.code}


class StoreError(ExtractionError):
    """A dataset that cannot be written or read."""


class ForeignDataset(StoreError):
    """A dataset that belongs to another engine, has other taps, or is something else entirely."""


class LineageError(StoreError):
    """A record that does not match the work item it claims to come from."""


class RowsLost(StoreError):
    """The rows that an answer refers to are gone from the broker, or are not those that were hashed."""


class DiskFull(StoreError):
    """No space is left; nothing uncommitted was kept."""


class NoRoom(StoreError):
    """The disk cannot hold the dataset that the input will become; nothing was computed."""


class BrokerError(ExtractionError):
    """The message broker cannot be reached, refused a call, or holds something that is not ours."""


class NotAdmitted(BrokerError):
    """A worker whose engine is not what the stream asks for; it has not joined."""


class LeaseLost(BrokerError):
    """Another writer holds the partition now; nothing was committed after it took over."""


class VerificationFailed(ExtractionError):
    """Numbers beyond the stated tolerance."""


class MissingExtra(ExtractionError):
    """A command needs an optional part of this package (an extra) that is not installed."""


def nearest_name(name: str, known: Iterable[str]) -> str:
    """Say the nearest known name, or all of them when none is near.

    >>> nearest_name("num_tokns", ["num_tokens", "num_rows"])
    "did you mean 'num_tokens'?"
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean '{near[0]}'?" if near else f"known: {', '.join(names)}"


def _rebuilt(cls, what, expected, found, fix, state):
    error = cls(what, expected=expected, found=found, fix=fix)
    error.__dict__.update(state)
    return error


def _rebuilt_refusal(code, what, expected, found, fix):
    return Refusal(code, what, expected=expected, found=found, fix=fix)
