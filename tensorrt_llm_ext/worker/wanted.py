"""Wanted: what a stream's owner asks of everyone who joins it. It lies in the stream's bucket under the key ``wanted``.

It names one engine by its contract: a dataset holds rows of one engine, so all workers of a stream run the same one.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import xxhash

from tensorrt_llm_ext.errors import BrokerError, InputError, Refusal, TapError
from tensorrt_llm_ext.fingerprint import canonical_json, fingerprint
from tensorrt_llm_ext.inputs import TokenPolicy
from tensorrt_llm_ext.recipes.contract import Contract
from tensorrt_llm_ext.store import columns_of

FORMAT = "tensorrt_llm_ext.stream"
FORMAT_VERSION = 4
KEY = "wanted"

PRIORITIES = {"high": 16, "normal": 4, "low": 1}
"""Priorities and their weights: the share of a worker's tokens that each gets while all of them have work waiting."""

LENGTHS = ("short", "long")

CHUNK_BYTES = 512 << 10
"""Of rows too large for a message; less where messages are smaller."""

_DESCRIPTION_BYTES = 2 << 10  # what a record says of itself, beside its rows


@dataclass(frozen=True)
class StreamSettings:
    """How a stream is run; fixed when it is made."""

    num_partitions: int = 1  # of the answers, by request id; each has one writer and one dataset
    ack_wait_s: float = 30.0  # without a sign of life for so long, a work item goes to another worker
    lease_s: float = 15.0  # without renewal for so long, a partition goes to another writer
    max_message_bytes: int = 1 << 20  # of one message: a work item, or one record
    max_results_bytes: int = 1 << 30  # about, of answers that wait for the store; workers wait beyond it
    max_rows_bytes: int = 1 << 30  # of the rows of answers too large for a message, in the same way
    deliveries_before_alone: int = 5  # a work item that comes more often runs alone: it may be what ends the workers
    max_alone: int = 3  # times it runs alone; then it is refused as poison

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if not getattr(self, field.name) > 0:
                raise InputError(
                    f"a stream's {field.name} must be positive",
                    expected="more than 0",
                    found=getattr(self, field.name),
                    fix="leave it out, or say a positive number",
                )

    @property
    def chunk_bytes(self) -> int:
        """The most bytes of a chunk of rows."""
        return min(CHUNK_BYTES, self.max_message_bytes)

    @property
    def max_chunks(self) -> int:
        """How many chunks of rows the stream holds: brokers count messages (``jetstream_parts`` says why)."""
        return max(1, self.max_rows_bytes // self.chunk_bytes)


@dataclass(frozen=True)
class Lane:
    """Work items of one priority and one kind of length; a worker shares its tokens among lanes."""

    priority: str
    length: str

    @property
    def name(self) -> str:
        return f"{self.priority}.{self.length}"

    @property
    def weight(self) -> int:
        return PRIORITIES[self.priority]


LANES = tuple(Lane(priority, length) for priority in PRIORITIES for length in LENGTHS)


@dataclass(frozen=True)
class Wanted:
    """The engine's contract (without canaries), how text becomes tokens, and the stream's settings."""

    contract: Contract
    policy: TokenPolicy
    settings: StreamSettings = StreamSettings()

    def __post_init__(self) -> None:
        object.__setattr__(self, "contract", dataclasses.replace(self.contract, canaries=()))

    @cached_property
    def version(self) -> str:
        """Identity of all of it; work items and answers carry it."""
        return fingerprint(self.to_dict())

    @property
    def long_tokens(self) -> int:
        """From so many tokens on an item is ``long``: a quarter of the longest, so short ones fill a batch of many."""
        return self.policy.max_length // 4 + 1

    @property
    def has_states(self) -> bool:
        """Whether an answer has a row for each token."""
        return self.contract.taps[0].rows == "all"

    @property
    def token_bytes(self) -> int:
        """Bytes of one row of each tap: of a token's states, or of the vectors of a sequence."""
        return sum(column.hidden_size * np.dtype(column.computed_dtype).itemsize for column in columns_of(self.contract))

    @property
    def max_answer_bytes(self) -> int:
        """About the most bytes that an answer takes, rows included."""
        return self.settings.max_message_bytes + (self.policy.max_length * self.token_bytes if self.has_states else 0)

    @property
    def max_results(self) -> int:
        """How many answers may wait for the store: brokers count messages (``jetstream_parts`` says why)."""
        largest = self.settings.max_message_bytes
        usual = largest if self.has_states else min(largest, self.token_bytes + _DESCRIPTION_BYTES)
        return max(1, self.settings.max_results_bytes // usual)

    def lane_of(self, num_tokens: int, priority: str) -> Lane:
        return Lane(priority, LENGTHS[num_tokens >= self.long_tokens])

    def max_tokens_of(self, lane: Lane) -> int:
        """The most tokens an item of this lane holds."""
        return self.policy.max_length if lane.length == "long" else self.long_tokens - 1

    def partition_of(self, request_id: str) -> int:
        """The partition that stores this request: the same everywhere and always."""
        return xxhash.xxh3_64_intdigest(request_id.encode()) % self.settings.num_partitions

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "contract": self.contract.to_dict(),
            "policy": self.policy.to_dict(),
            "settings": dataclasses.asdict(self.settings),
        }

    def to_json(self) -> bytes:
        return canonical_json(self.to_dict()).encode()


def read_wanted(value: bytes, stream: str) -> Wanted:
    """Read what a stream asks for. Raises BrokerError when it is of another format or damaged."""
    try:
        fields = json.loads(value)
        found = f"{fields.get('format')} {fields.get('format_version')}"
        if found != f"{FORMAT} {FORMAT_VERSION}":
            raise ValueError(found)
        contract, policy = Contract.from_dict(fields["contract"]), TokenPolicy.from_dict(fields["policy"])
        return Wanted(contract, policy, StreamSettings(**fields["settings"]))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BrokerError(
            f"what the stream '{stream}' asks for cannot be read",
            expected=f"{FORMAT} {FORMAT_VERSION} under the key '{KEY}'",
            found=f"{type(error).__name__}: {error}",
            fix="use the release that made the stream, or make another stream",
        ) from error


@dataclass(frozen=True)
class Difference:
    """One field in which an engine is not what a stream asks for."""

    field: str
    wanted: str
    has: str


def differences(wanted: Wanted, contract: Contract) -> list[Difference]:
    """Compare an engine's contract with what a stream asks for, field by field; an engine may take longer items."""
    asked, has = _described(wanted.contract), _described(contract)
    found = [Difference(name, asked[name], has[name]) for name in asked if asked[name] != has[name]]
    longest = longest_of(contract)
    if longest < wanted.policy.max_length:
        found.append(Difference("length", f"at least {wanted.policy.max_length} tokens", f"{longest} tokens"))
    return found


def longest_of(contract: Contract) -> int:
    """The longest sequence an engine takes, in tokens."""
    limits = contract.limits
    return min(limits.max_seq_len, limits.max_num_tokens, limits.max_padded_tokens)


def _described(contract: Contract) -> dict[str, str]:
    num_layers = contract.architecture.num_layers
    outputs = [(tap.spelling(num_layers), contract.output_of(tap).dtype) for tap in contract.taps]
    return {
        "model": contract.model_name,
        "checkpoint": contract.fingerprints.checkpoint,
        "tokenizer": contract.fingerprints.tokenizer,
        "taps": ",".join(spelling for spelling, _ in outputs),
        "dtype": ",".join(dtype for _, dtype in outputs),
        "weights": contract.weight_dtype,
        "engine": contract.engine_fingerprint(),
    }


def check_priority(priority: str) -> str:
    """The priority itself. Raises Refusal for one that does not exist."""
    if priority not in PRIORITIES:
        raise Refusal(
            "bad_priority",
            "the priority of a work item is not one of the stream's",
            expected=f"one of {', '.join(PRIORITIES)}",
            found=repr(priority)[:80],
            fix="leave it out: normal is the default",
        )
    return priority


def check_taps(wanted: Wanted) -> None:
    """Raise TapError for taps that do not belong into one dataset, InputError for taps @all without a loss mask."""
    try:
        columns_of(wanted.contract)
    except TapError as error:
        fix = "build an engine with either of them: a stream takes all taps of its engine"
        raise TapError(error.what, expected=error.expected, found=error.found, fix=fix) from error
    if wanted.has_states and wanted.policy.loss_mask is None:
        raise InputError(
            "a stream of states needs a loss mask",
            expected="a token policy that says where it comes from: ones, assistant or field",
            found="a policy without one",
            fix="make it with token_policy(…, loss_mask='ones')",
        )


def lines_of(found: Sequence[Difference]) -> tuple[str, str]:
    """What was wanted and what there is, for an error."""
    wanted = "; ".join(f"{difference.field} {difference.wanted}" for difference in found)
    return wanted, "; ".join(f"{difference.field} {difference.has}" for difference in found)
