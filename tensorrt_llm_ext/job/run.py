"""The run: from an input to a dataset, every row accounted for.

Three threads: one reads and tokenises windows ahead; this one packs, submits and waits; one stores. A window's batches
are submitted, then a canary; they land in that order; the window is committed once the canary has passed. So nothing is
ever committed that was computed after the engine was last seen right.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field

from tensorrt_llm_ext.checkpoint.tokenizer import Tokenizer
from tensorrt_llm_ext.errors import ExtractionError, ForeignDataset, InputError, NoRoom, StoreError
from tensorrt_llm_ext.inputs import AcceptedRow
from tensorrt_llm_ext.job.ahead import Ahead
from tensorrt_llm_ext.job.job import InputEnd, Job, opened_store, prepared
from tensorrt_llm_ext.job.ledgers import FailedLedger, RefusedLedger
from tensorrt_llm_ext.job.pauses import without_pauses
from tensorrt_llm_ext.job.report import Meter, Progress, Report
from tensorrt_llm_ext.job.settled import SettledStretch
from tensorrt_llm_ext.job.windows import Window
from tensorrt_llm_ext.job.writer import Writer
from tensorrt_llm_ext.runtime import CanaryTicket, Session, Ticket, batches
from tensorrt_llm_ext.store import Store

_WINDOWS_AHEAD = 2
_ANSWERS_AHEAD = 16  # batches whose rows may wait for the writer: those of a window that fills while it commits another,
_BYTES_AHEAD = 256 << 20  # as long as they are not larger than this

INTERRUPTED = "interrupted"
"""The code of rows whose window was not committed because the run was asked to stop."""


def run_job(
    job: Job,
    session: Session,
    tokenizer: Tokenizer,
    *,
    on_progress: Callable[[Progress], None] | None = None,
    stop: threading.Event | None = None,
) -> Report:
    """Run a job to its end, or until ``stop`` is set or an error stops it; say what became of every row.

    Raises what shows before anything is computed: ForeignDataset (output or input), NoRoom, StoreError, TapError,
    InputError, ContractError. An error that stops the run later is in the report: rows of windows that were not committed are
    then counted as failed, with that reason, and a resumed run computes them again.
    """
    job = prepared(job, session, tokenizer)
    on_progress, stop = on_progress or _ignore, stop or threading.Event()
    with (
        without_pauses(),
        opened_store(job, session) as store,
        closing(FailedLedger(job.out, store.settled_rows)) as failed,
        closing(RefusedLedger(job.out)) as refused,
        Ahead(job.stretches(session.contract, tokenizer, store, failed), _WINDOWS_AHEAD, stop) as stretches,
        Writer(store, failed, _answers_ahead(store, session)) as writer,
    ):
        is_whole = job.sharding is None
        run = _Run(session, store, failed, refused, writer, Meter(store), on_progress, stop, is_whole, job.force)
        return run.run(stretches)


def _answers_ahead(store: Store, session: Session) -> int:
    """How many batches may wait for the writer: bounded in number, and, from two on, in bytes."""
    limits = session.contract.limits
    num_rows = limits.max_batch_size if store.header.kind == "vectors" else limits.max_num_tokens
    batch_bytes = store.header.value_bytes() * min(num_rows, limits.max_num_tokens)
    return max(2, min(_ANSWERS_AHEAD, _BYTES_AHEAD // batch_bytes))


@dataclass(frozen=True)
class _Batch:
    """A batch in flight; a canary has no rows."""

    window: Window
    rows: list[AcceptedRow] | None
    ticket: Ticket | CanaryTicket
    num_tokens: int = 0
    fraction: float | None = None  # of the input that lies behind once this batch has landed


@dataclass
class _Run:
    """A run under way: what flies, and what is taken and not known to be committed."""

    session: Session
    store: Store
    failed: FailedLedger
    refused: RefusedLedger
    writer: Writer
    meter: Meter
    on_progress: Callable[[Progress], None]
    stop: threading.Event
    is_whole_input: bool = True  # not a part of it: the numbers of its rows have no gaps
    force: bool = False
    in_flight: deque[_Batch] = field(default_factory=deque)
    taken: deque[Window] = field(default_factory=deque)
    has_ended: bool = False  # the input, with every window of it in flight or landed

    def run(self, stretches: Ahead[SettledStretch | Window | InputEnd]) -> Report:
        report = self.report = Report(self.store.path, self.failed.path)
        num_rows_before = self.store.num_rows
        try:
            self._pump(stretches)
        except (ForeignDataset, NoRoom):
            raise  # the input is not the dataset's, or too much for the disk: nothing was computed
        except ExtractionError as error:
            report.stopped_by = error
        if (error := self.writer.finish()) is not None:
            report.stopped_by = report.stopped_by or error
        report.is_interrupted = not self.has_ended and report.stopped_by is None
        self._write_ledgers()
        if self.has_ended and report.stopped_by is None:
            self._seal()
        report.stored = self.store.num_rows - num_rows_before
        report.refused = self.refused.counts
        report.failed += self.failed.counts
        report.dataset_bytes = self.store.num_bytes
        report.seconds, report.computing_seconds = self.meter.seconds, self.meter.computing_seconds
        return report

    def _pump(self, stretches: Ahead[SettledStretch | Window | InputEnd]) -> None:
        """Keep batches in flight until the input ends or the run is asked to stop; then land those that fly."""
        try:
            for stretch in stretches:
                if isinstance(stretch, InputEnd):
                    self.report.read, self.has_ended = stretch.num_rows, True
                    break
                self._take(stretch)
                if isinstance(stretch, Window) and stretch.accepted:
                    self._submit(stretch)
        except InputError as error:  # the windows before it are whole
            self.report.stopped_by = error
        while self.in_flight:
            self._land()

    def _take(self, stretch: SettledStretch | Window) -> None:
        self.refused.write(stretch.refused)
        self.report.read = stretch.end if self.is_whole_input else self.report.read + stretch.num_rows
        self.meter.num_rows += len(stretch.refused)
        if isinstance(stretch, SettledStretch):
            self.report.already_stored += stretch.num_stored
            self.report.failed += stretch.failed
            self.meter.num_rows += stretch.num_stored + stretch.failed.total()
            self.meter.take(stretch.num_stored, stretch.num_tokens, stretch.fraction)
            self.on_progress(self.meter.measured(self.report, stretch.fraction))
            return
        self.report.num_truncated += sum(row.item.truncated_from is not None for row in stretch.accepted)
        is_first = self.meter.begin_computing()
        self.meter.take(len(stretch.accepted), stretch.num_tokens, stretch.fraction)
        if is_first and not self.force:
            self.meter.check_room()
        while self.taken and self.taken[0].end <= self.store.settled_end:
            self.taken.popleft()
        if stretch.accepted:
            self.taken.append(stretch)

    def _submit(self, window: Window) -> None:
        """Put a window's batches in flight, and a canary behind the last."""
        rows = {row.item.request_id: row for row in window.accepted}
        num_submitted = 0  # tokens
        for items in batches([row.item for row in window.accepted], self.session.contract.limits):
            if self.stop.is_set():
                return
            num_tokens = sum([len(item.token_ids) for item in items])
            num_submitted += num_tokens
            self._make_room()
            ticket = self.session.submit(items)
            fraction = self.meter.fraction_behind(num_submitted / window.num_tokens)
            rows_of_batch = [rows[item.request_id] for item in items]
            self.in_flight.append(_Batch(window, rows_of_batch, ticket, num_tokens, fraction))
        self._make_room()
        self.in_flight.append(_Batch(window, None, self.session.submit_canaries()))

    def _make_room(self) -> None:
        while len(self.in_flight) >= self.session.num_slots:
            self._land()

    def _land(self) -> None:
        """Wait for the oldest batch and hand it to the writer; a canary that passed commits its window."""
        batch = self.in_flight.popleft()
        if batch.rows is None:
            batch.ticket.wait()
            self.writer.commit(batch.window)
            return
        self.writer.put(batch.rows, batch.ticket.wait())
        self.report.num_tokens += batch.num_tokens
        self.meter.num_rows += len(batch.rows)
        self.on_progress(self.meter.measured(self.report, batch.fraction))

    def _write_ledgers(self) -> None:
        """Give every row that was taken and not committed its reason, and publish the refusals.

        A run that ends by itself has no such rows; if it had, they would be missing in the report, which says so. A run
        that read less than what is settled keeps the longer list of refusals that is there.
        """
        error = self.report.stopped_by
        reason = (_code(error), str(error)) if error else (INTERRUPTED, "the run was asked to stop")
        uncommitted = [row for window in self.taken if window.end > self.store.settled_end for row in window.accepted]
        try:
            if error or self.report.is_interrupted:
                self.failed.write([(row, *reason) for row in uncommitted if row.number not in self.failed.rows])
            if self.report.read >= self.store.settled_rows:
                self.refused.publish()
            self.report.refused_path = self.refused.path
        except StoreError as full:
            self.report.stopped_by = error or full

    def _seal(self) -> None:
        try:
            self.store.seal()
        except StoreError as error:
            self.report.stopped_by = error


def _code(error: ExtractionError) -> str:
    """A stable word for an error: ``canary_error``, ``disk_full`` …"""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(error).__name__).lower()


def _ignore(progress: Progress) -> None:
    """What becomes of progress that nobody asked for."""
