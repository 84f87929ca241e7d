"""Job: what is read, how, and where it goes; checked before the first row is computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from tensorrt_llm_ext.checkpoint.tokenizer import Tokenizer
from tensorrt_llm_ext.errors import ContractError, InputError, TapError
from tensorrt_llm_ext.inputs import Fields, IdRows, Input, Row, Sharding, TokenPolicy, work_items
from tensorrt_llm_ext.job.ledgers import FailedLedger
from tensorrt_llm_ext.job.settled import SettledStretch, check_not_shorter, divided, settled_stretches
from tensorrt_llm_ext.job.windows import Window, WindowLimits, windows
from tensorrt_llm_ext.recipes.contract import Contract
from tensorrt_llm_ext.results import Tokenisation
from tensorrt_llm_ext.runtime import Session
from tensorrt_llm_ext.store import (
    DEFAULT_SHARD_BYTES,
    SHARD_BYTES,
    STATES_NAME,
    Header,
    StatesStore,
    Store,
    VectorStore,
    columns_of,
    holds_dataset,
    open_vectors,
    read_states_header,
    states_folder,
)
from tensorrt_llm_ext.taps import Tap


@dataclass(frozen=True)
class InputEnd:
    """The end of an input, with the reader's own count of its rows."""

    num_rows: int


@dataclass(frozen=True)
class Job:
    """One input, one token policy, one output folder."""

    input: Input
    fields: Fields
    policy: TokenPolicy
    out: Path
    windows: WindowLimits
    limit: int | None = None  # rows of the input that are read at most
    resume: bool = False  # go on with the dataset in ``out``; begin one where there is none
    taps: tuple[Tap, ...] | None = None  # of the engine's, those that are stored; None: all
    sharding: Sharding | None = None  # the part of the input that this run reads; None: all of it
    shard_bytes: int = DEFAULT_SHARD_BYTES  # the size of a file of states
    force: bool = False  # begin even where the disk cannot hold it all

    def stretches(
        self, contract: Contract, tokenizer: Tokenizer, store: Store, failed: FailedLedger
    ) -> Iterator[SettledStretch | Window | InputEnd]:
        """Every row of the input in order: what is settled, held against the dataset, then windows to compute."""
        num_read = 0

        def read() -> Iterator[Row | IdRows]:
            nonlocal num_read
            is_whole = self.limit is None and self.sharding is None
            for row in self.input.pieces() if is_whole else self._part_of_input():
                num_read += len(row) if isinstance(row, IdRows) else 1
                yield row

        rows = work_items(
            read(),
            self.fields,
            tokenizer,
            self.policy,
            vocab_size=contract.architecture.vocab_size,
            source=self.input.name,
        )
        num_settled = store.settled_rows
        before, after = divided(rows, num_settled)
        yield from check_not_shorter(
            settled_stretches(before, store.identities(), failed.settled()), self._num_settled_to_read(num_settled)
        )
        yield from windows(after, self.windows)
        yield InputEnd(num_read)

    def _part_of_input(self) -> Iterator[Row]:
        rows = self.input.rows() if self.limit is None else _limited(self.input.rows(), self.limit)
        return rows if self.sharding is None else self.sharding.rows(rows, self.fields)

    def _num_settled_to_read(self, num_settled: int) -> int:
        """Where the rows that are settled must end; 0 where a limit cuts a part of the input at a row of another part."""
        if self.limit is None or self.limit >= num_settled:
            return num_settled
        return self.limit if self.sharding is None else 0


def prepared(job: Job, session: Session, tokenizer: Tokenizer) -> Job:
    """Check that job, session and tokenizer belong together, and settle the date that a chat template writes.

    Raises InputError for a session of another tokenisation, ContractError for another tokenizer than the engine's.
    """
    if (asked := job.policy.tokenisation()) != (found := _tokenisation(session)):
        raise InputError(
            "the session was opened for another tokenisation than the job's",
            expected=asked,
            found=found,
            fix="open it with tokenisation=job.policy.tokenisation()",
        )
    if job.policy.prompt != "ids" and tokenizer.fingerprint() != session.contract.fingerprints.tokenizer:
        raise ContractError(
            "the tokenizer is not the one that the engine was built with",
            expected=session.contract.fingerprints.tokenizer,
            found=tokenizer.fingerprint(),
            fix="load the tokenizer from the engine's folder; build the engine again if its files were changed",
        )
    return _with_stored_date(job)


def opened_store(job: Job, session: Session) -> Store:
    """Open the dataset to go on with, or make a new one: of states for taps ``all``, of vectors for others.

    Raises ForeignDataset, StoreError, TapError.
    """
    header = header_of(job, session)
    store = StatesStore if header.kind == "states" else VectorStore
    return store.open(job.out, header) if job.resume and holds_dataset(job.out) else store.create(job.out, header)


def header_of(job: Job, session: Session) -> Header:
    """What the job's dataset says about itself. Raises TapError for taps that do not belong into one dataset,
    InputError for states without a loss mask and for vectors with one."""
    contract = session.contract if job.taps is None else with_taps(session.contract, job.taps)
    columns_of(contract)
    conditions = {"policy": job.policy.to_dict(), "windows": job.windows.to_dict()}
    if job.sharding is not None:
        conditions["sharding"] = job.sharding.to_dict()
    if contract.taps[0].rows == "all":
        conditions[SHARD_BYTES] = job.shard_bytes
        if job.policy.loss_mask is None:
            raise InputError(
                "a dataset of states needs a loss mask",
                expected="a token policy that says where it comes from: ones, assistant or field",
                found="a policy without one",
                fix="make it with token_policy(…, loss_mask='ones')",
            )
    elif job.policy.loss_mask is not None:  # no row of vectors keeps one, so --resume could not hold it against anything
        raise InputError(
            "a loss mask has no meaning for taps of one row a request",
            expected="taps @all, or a token policy without a loss mask",
            found=f"taps @last or @mean, and a loss mask of {job.policy.loss_mask}",
            fix="leave loss_mask out of token_policy, or choose taps @all",
        )
    return Header(contract, session.origin, conditions)


def with_taps(contract: Contract, taps: tuple[Tap, ...]) -> Contract:
    """The contract of an engine of which only these taps are read. Raises TapError for a tap that it does not have."""
    num_layers = contract.architecture.num_layers
    missing = [tap.spelling(num_layers) for tap in taps if tap not in contract.taps]
    if missing:
        raise TapError(
            "the engine does not have these taps",
            expected=f"of {', '.join(tap.spelling(num_layers) for tap in contract.taps)}",
            found=", ".join(missing),
            fix="choose from those, or build an engine with the taps you need",
        )
    return dataclasses.replace(contract, taps=taps)


def _limited(rows: Iterator[Row], limit: int) -> Iterator[Row]:
    """At most ``limit`` rows, each saying how much of those lies behind."""
    for row in islice(rows, limit):
        yield dataclasses.replace(row, fraction=max(row.fraction or 0.0, (row.number + 1) / limit))


def _tokenisation(session: Session) -> Tokenisation:
    origin = session.origin
    return Tokenisation(origin.special_tokens, origin.template_hash, origin.prefix)


def _with_stored_date(job: Job) -> Job:
    """A template that writes the date goes on with the date on which the dataset was begun."""
    if not (job.resume and holds_dataset(job.out)):
        return job
    has_states = (Path(job.out) / STATES_NAME).exists()
    header = read_states_header(states_folder(job.out)) if has_states else open_vectors(job.out).header
    stored = header.job["policy"]["template_date"]
    return dataclasses.replace(job, policy=dataclasses.replace(job.policy, template_date=stored))
