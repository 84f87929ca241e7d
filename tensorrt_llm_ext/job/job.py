"""Job: what is read, how, and where it goes; checked before the first row is computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from tensorrt_llm_ext.checkpoint.tokenizer import Tokenizer
from tensorrt_llm_ext.errors import ContractError, InputError
from tensorrt_llm_ext.inputs import Fields, Input, Row, TokenPolicy, work_items
from tensorrt_llm_ext.job.ledgers import FailedLedger
from tensorrt_llm_ext.job.settled import SettledStretch, check_not_shorter, settled_stretches
from tensorrt_llm_ext.job.windows import Window, WindowLimits, windows
from tensorrt_llm_ext.recipes.contract import Contract
from tensorrt_llm_ext.results import Tokenisation
from tensorrt_llm_ext.runtime import Session
from tensorrt_llm_ext.store import Header, VectorStore, holds_dataset, open_vectors


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

    def stretches(
        self, contract: Contract, tokenizer: Tokenizer, store: VectorStore, failed: FailedLedger
    ) -> Iterator[SettledStretch | Window | InputEnd]:
        """Every row of the input in order: what is settled, held against the dataset, then windows to compute."""
        num_read = 0

        def read() -> Iterator[Row]:
            nonlocal num_read
            for row in _limited(self.input.rows(), self.limit):
                num_read += 1
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
        yield from check_not_shorter(
            settled_stretches(islice(rows, num_settled), store.identities(), failed.settled()),
            num_settled if self.limit is None else min(num_settled, self.limit),
        )
        yield from windows(rows, self.windows)
        yield InputEnd(num_read)


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


def opened_store(job: Job, session: Session) -> VectorStore:
    """Open the dataset to go on with, or make a new one. Raises ForeignDataset, StoreError, TapError."""
    conditions = {"policy": job.policy.to_dict(), "windows": job.windows.to_dict()}
    header = Header(session.contract, session.origin, conditions)
    if job.resume and holds_dataset(job.out):
        return VectorStore.open(job.out, header)
    return VectorStore.create(job.out, header)


def _limited(rows: Iterator[Row], limit: int | None) -> Iterator[Row]:
    """At most ``limit`` rows, each saying how much of those lies behind."""
    for row in islice(rows, limit):
        yield row if limit is None else dataclasses.replace(row, fraction=max(row.fraction or 0.0, (row.number + 1) / limit))


def _tokenisation(session: Session) -> Tokenisation:
    origin = session.origin
    return Tokenisation(origin.special_tokens, origin.template_hash, origin.prefix)


def _with_stored_date(job: Job) -> Job:
    """A template that writes the date goes on with the date on which the dataset was begun."""
    if not (job.resume and holds_dataset(job.out)):
        return job
    stored = open_vectors(job.out).header.job["policy"]["template_date"]
    return dataclasses.replace(job, policy=dataclasses.replace(job.policy, template_date=stored))
