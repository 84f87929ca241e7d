"""Partition: one part of the results, its dataset, and the checks between them. Nothing here waits or leases.

Every work item is settled once, by a row of the dataset or by a line of the outcomes, whatever is delivered how often.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from tensorrt_llm_ext.errors import ExtractionError, LineageError, Refusal, RowsLost
from tensorrt_llm_ext.inputs.duplicates import SeenIds, Verdict
from tensorrt_llm_ext.results import Origin, Record, WorkItem, origin_from_contract
from tensorrt_llm_ext.store import (
    DEFAULT_SHARD_BYTES,
    SHARD_BYTES,
    Fence,
    Header,
    StatesStore,
    Store,
    VectorStore,
    check_lineage,
    holds_dataset,
    open_vectors,
    read_states_header,
    states_folder,
)
from tensorrt_llm_ext.store.shard_size import shard_rows
from tensorrt_llm_ext.worker.broker import Broker
from tensorrt_llm_ext.worker.messages import Answer, Outcome, work_from_body
from tensorrt_llm_ext.worker.orphans import Orphans, were_removed
from tensorrt_llm_ext.worker.outcomes import OutcomeLedger
from tensorrt_llm_ext.worker.reference import Reference, fetched
from tensorrt_llm_ext.worker.wanted import Wanted

_IDS_AT_ONCE = 4096
_Row = tuple[WorkItem, Record, int]  # the last is the work item's sequence


class Settled:
    """Which work items are settled, by sequence: a bit of memory each."""

    def __init__(self) -> None:
        self._flags = np.zeros(1 << 12, dtype=bool)

    def __contains__(self, sequence: int) -> bool:
        return sequence < len(self._flags) and bool(self._flags[sequence])

    def add(self, sequence: int) -> None:
        if sequence >= len(self._flags):
            self._flags = np.concatenate([self._flags, np.zeros(max(len(self._flags), sequence + 1), dtype=bool)])
        self._flags[sequence] = True


class Partition:
    """A partition that is open for writing under a fence. What was read of it is right until the fence is lost.

    ``keep_lease`` is called again and again while much is read, of the dataset or of the broker's rows.
    """

    def __init__(
        self,
        broker: Broker,
        wanted: Wanted,
        out: Path,
        number: int,
        fence: Fence,
        *,
        shard_bytes: int | None = None,
        keep_lease: Callable[[], None] = lambda: None,
    ) -> None:
        self.number = number
        self.folder = dataset_folder(out, number)
        self.redelivered = 0
        self.strays: list[Answer] = []  # of the newest commit: they name no work item of this stream
        self.passed_over: list[Answer] = []  # of the newest commit: their rows were orphans, and their items stay open
        self._broker = broker
        self._wanted = wanted
        self._fence = fence
        self._keep_lease = keep_lease
        self._job = {
            "policy": wanted.policy.to_dict(),
            "stream": {"name": broker.stream, "version": wanted.version, "partition": number},
        }
        self._settled, self._seen = Settled(), SeenIds()
        self._orphans = Orphans(broker, number, wanted.settings.ack_wait_s)
        self._store: Store | None = None
        with fence.held():  # from here on, nobody older commits: what is read now stays as it is
            self._ledger = OutcomeLedger(self.folder.with_suffix(".refused.jsonl"))
            try:
                self._open(shard_bytes)
            except BaseException:
                self.close()  # here, where nobody else writes
                raise

    @property
    def commit_bytes(self) -> int | None:
        """How many bytes of answers make a good commit: half a shard, which closes it; None where it does not matter."""
        return self._job[SHARD_BYTES] // 2 if self._wanted.has_states else None

    def commit(self, answers: Sequence[Answer]) -> Counter[str]:
        """Settle work items by their answers; answers to settled ones are dropped, and references to rows that were orphans.

        Returns what became of the items.

        Raises LeaseLost before anything is written when another writer has taken over; StoreError, DiskFull.
        """
        new: dict[int, list[Answer]] = {}
        for answer in answers:
            if answer.sequence not in self._settled:
                new.setdefault(answer.sequence, []).append(answer)
        self.redelivered += len(answers) - len(new)
        records, outcomes = self._checked(new)
        with self._fence.held():
            try:
                self._write(records, outcomes)
            except BaseException:
                self.close()  # here, where nobody else writes: it may remove files
                raise
        for sequence in [sequence for *_, sequence in records] + [sequence for sequence, _ in outcomes]:
            self._settled.add(sequence)
        referred_to = {one.sequence for one in answers if isinstance(one.content, Reference)}
        self._broker.remove_rows(self.number, sorted(referred_to - {one.sequence for one in self.passed_over}))
        return Counter(stored=len(records)) + Counter(outcome.kind for _, outcome in outcomes)

    def sweep(self) -> int:
        """Remove rows that nobody will ever read: of settled work items, and orphans. Returns of how many items.

        Workers that ended before they published a reference have left them, or that answered what another had answered.
        """
        items, newest_chunk = self._broker.items_with_rows(self.number)
        settled = [item for item in items if item in self._settled]
        self._broker.remove_rows(self.number, settled)
        still_open = [item for item in items if item not in self._settled]
        return len(settled) + self._orphans.remove(still_open, newest_chunk, self._keep_lease)

    def seal(self) -> None:
        """Say in the dataset that it is whole as it is; more rows may still follow. Raises LeaseLost, StoreError."""
        if self._store is not None:
            with self._fence.held():
                self._store.seal()

    def facts(self) -> dict:
        """What this partition holds, counted by the dataset and by the lines of the file beside it."""
        return {
            "stored": self._store.num_rows if self._store else 0,
            "refused": self._ledger.counts["refused"],
            "failed": self._ledger.counts["failed"],
            "by_code": dict(self._ledger.codes),
            "redelivered": self.redelivered,
            "dataset": str(self.folder),
        }

    def close(self) -> None:
        """Forget what was not committed. Idempotent."""
        if self._store is not None:
            self._store.close()
        self._ledger.close()

    def _open(self, shard_bytes: int | None) -> None:
        """Read which work items are settled, and open the dataset where there is one."""
        wanted = self._wanted
        for sequence in self._ledger.sequences():
            self._settled.add(sequence)
        stored = self._stored_header() if holds_dataset(self.folder) else None
        if wanted.has_states:
            before = stored.job.get(SHARD_BYTES) if stored else None
            self._job[SHARD_BYTES] = shard_bytes or before or DEFAULT_SHARD_BYTES
            shard_rows(self._header(origin_from_contract(wanted.contract, "none", wanted.policy.tokenisation())))
        if stored:
            self._store = self._kind.open(self.folder, self._header(stored.origin))
            self._store.leave_to_fence()
            self._read_identities()

    def _write(self, records: list[_Row], outcomes: list[tuple[int, Outcome]]) -> None:
        """Bring rows and lines to the disk, under the fence."""
        if records and self._store is None:
            self._store = self._kind.create(self.folder, self._header(records[0][1].origin))
            self._store.leave_to_fence()
        for item, record, sequence in records:
            self._store.append(sequence - 1, item, record)
        if outcomes:
            self._ledger.write(outcomes)
        if records:
            self._store.commit(0)  # rows come in no order of the input: no stretch of it is settled
            self._store.flush()

    @property
    def _kind(self) -> type[Store]:
        return StatesStore if self._wanted.has_states else VectorStore

    def _stored_header(self) -> Header:
        return read_states_header(states_folder(self.folder)) if self._wanted.has_states else open_vectors(self.folder).header

    def _checked(self, answers: dict[int, list[Answer]]) -> tuple[list[_Row], list[tuple[int, Outcome]]]:
        """Records that are the answers to their work items, and reasons for none; ``strays`` and ``passed_over`` beside."""
        records, outcomes, self.strays, self.passed_over = [], [], [], []
        bodies = self._broker.read("work", list(answers))
        for (sequence, to_one_item), body in zip(answers.items(), bodies, strict=True):
            if body is None:
                self.strays.append(to_one_item[0])
                continue
            found = self._first_good(to_one_item, body)
            if found is None:
                self.passed_over.append(to_one_item[0])
            elif isinstance(found, Outcome):
                outcomes.append((sequence, found))
            else:
                records.append(found)
        return self._without_repeated_ids(records, outcomes), outcomes

    def _first_good(self, answers: list[Answer], body: bytes) -> _Row | Outcome | None:
        """What settles a work item: the first of its answers whose rows are there, else why it has none.

        None when they were removed as orphans: then the item was not acknowledged, and is answered again.
        """
        lost: Outcome | None = None
        for answer in answers:
            if isinstance(answer.content, Outcome):
                return answer.content
            try:
                return self._proven(answer, body)
            except RowsLost as error:
                if not were_removed(self._broker, answer.sequence, answer.content.chunks):
                    lost = lost or _not_stored(answer.content, error)
            except (LineageError, Refusal) as error:
                return _not_stored(answer.content, error)
        return lost

    def _proven(self, answer: Answer, body: bytes) -> _Row:
        """The work item and its record, once the record is sure to be its answer."""
        if answer.contract_version != self._wanted.version:
            raise LineageError(
                f"the record of request '{answer.content.request_id}' was made for another contract",
                expected=f"contract version {self._wanted.version}",
                found=f"contract version {answer.contract_version}",
                fix="only workers of this stream may publish its results",
            )
        item = work_from_body(body, self._wanted)
        record = answer.content
        if isinstance(record, Reference):
            record = fetched(self._broker, record, self._keep_lease)
        check_lineage(record, item, self._header(self._origin or record.origin))
        return item, record, answer.sequence

    @property
    def _origin(self) -> Origin | None:
        return self._store.header.origin if self._store else None

    def _header(self, origin: Origin) -> Header:
        """What the dataset says of itself; of a record's origin only the measured convention is taken on trust."""
        tokenisation = self._wanted.policy.tokenisation()
        origin = origin_from_contract(self._wanted.contract, origin.convention, tokenisation)
        return Header(self._wanted.contract, origin, self._job)

    def _without_repeated_ids(
        self, records: list[_Row], outcomes: list[tuple[int, Outcome]]
    ) -> list[_Row]:
        """Rows whose request id has none yet; a second work item of the same id gets a reason instead."""
        verdicts = self._seen.claim([item.request_id for item, *_ in records], [item.token_hash for item, *_ in records])
        kept = []
        for entry, verdict in zip(records, verdicts, strict=True):
            item, _, sequence = entry
            if verdict is Verdict.NEW:
                kept.append(entry)
                continue
            code = "duplicate_id" if verdict is Verdict.SAME_TOKENS else "conflicting_id"
            reason = ("the request id was stored for an earlier work item", "each request id once", verdict.value)
            outcomes.append((sequence, Outcome("refused", item.request_id, item.work_item_id, code, *reason)))
        return kept

    def _read_identities(self) -> None:
        ids: list[str] = []
        hashes: list[str] = []
        for row, request_id, token_hash, _ in self._store.identities():
            self._settled.add(row + 1)
            ids.append(request_id)
            hashes.append(token_hash)
            if len(ids) == _IDS_AT_ONCE:
                self._seen.claim(ids, hashes)
                ids, hashes = [], []
                self._keep_lease()
        self._seen.claim(ids, hashes)


def dataset_folder(out: Path, number: int) -> Path:
    """Where a partition's dataset lies: ``OUT/part-0``, beside it ``part-0.refused.jsonl`` and ``part-0.fence``."""
    return Path(out) / f"part-{number}"


def _not_stored(content: Record | Reference, error: ExtractionError) -> Outcome:
    code = "rows_lost" if isinstance(error, RowsLost) else "lineage"
    said = (error.what, error.expected, error.found, error.fix)
    return Outcome("failed", content.request_id, content.work_item_id, code, *said)
