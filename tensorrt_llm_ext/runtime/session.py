"""Session: an engine that is open, measured and proven, and the batches in flight on it.

The life of a batch is four names: ``pack`` and ``enqueue`` in ``Session.submit``, ``wait`` and ``records`` in
``Ticket.wait``. While one batch runs, the next is packed and the one before becomes records and is stored.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

from tensorrt_llm_ext.backends import Engine, open_engine
from tensorrt_llm_ext.errors import ContractError, Refusal
from tensorrt_llm_ext.recipes.contract import Contract, Convention, read_contract
from tensorrt_llm_ext.results.record import Failure, Origin, Record, Tokenisation, WorkItem, origin_from_contract
from tensorrt_llm_ext.runtime.canaries import CanaryDistance, CanaryTicket, canary_items
from tensorrt_llm_ext.runtime.convention import ConventionEvidence, measure_convention
from tensorrt_llm_ext.runtime.door import check_files, check_inputs, flattened
from tensorrt_llm_ext.runtime.packing import batches, batches_of_windows
from tensorrt_llm_ext.runtime.pipeline import Flight, Pipeline
from tensorrt_llm_ext.runtime.unpacking import records

DEADLINE_S = 600.0
"""Seconds a batch may take before waiting for it is an error: far beyond any batch, well before a night is lost."""

NUM_SLOTS = 2
"""Batches in flight: one runs while the next is packed. The one before has its rows copied out, its slot is free."""


class Ticket:
    """A batch in flight. Its rows come by ``wait``, once; a ticket that is dropped gives its slot back by itself."""

    def __init__(self, session: Session, items: tuple[WorkItem, ...], flight: Flight) -> None:
        self.request_ids = flight.plan.request_ids
        self._session = session
        self._items = items
        self._flight = flight
        self._dropping = weakref.finalize(self, session._pipeline.drop, flight)
        self._dropping.atexit = False

    def wait(self, timeout_s: float | None = None) -> Sequence[Record | Failure]:
        """Return one answer for every item submitted: its Record, or a Failure that says why its rows are not one.

        Records of taps ``last`` and ``mean`` are pieces of one copy of the batch, which lives as long as one of them.
        ``timeout_s`` is the session's deadline unless given. Raises DeadlineExceeded (the batch goes on: wait again, or
        drop the ticket), the BackendError or OutOfMemory that failed this batch, SessionClosed when the session was
        closed or an earlier batch failed, PlanError when the ticket was waited for before.
        """
        session = self._session
        with session._pipeline.wait(self._flight, timeout_s) as batch:
            self._dropping.detach()
            return records(self._items, batch, session.contract, session.origin)


class Session:
    """An open engine, ready to serve. Made by ``Session.open``; thread-safe; a context manager."""

    def __init__(self, pipeline: Pipeline, contract: Contract, evidence: ConventionEvidence, origin: Origin) -> None:
        self.contract = contract
        self.evidence = evidence
        self.origin = origin
        self.num_slots = pipeline.num_slots
        self._pipeline = pipeline
        self._closing = weakref.finalize(self, pipeline.close)

    @classmethod
    def open(
        cls,
        engine_path: Path | str,
        *,
        num_threads: int | None = None,
        num_slots: int = NUM_SLOTS,
        deadline_s: float = DEADLINE_S,
        tokenisation: Tokenisation = Tokenisation(),
        prove: bool = True,
    ) -> Session:
        """Open an engine directory, measure its gather convention, and prove it on every canary.

        ``num_threads`` bounds the threads of a CPU backend; ``tokenisation`` goes into every record's origin. Without
        ``prove`` the canaries wait for ``check_canaries``: for commands that say how wrong an engine is. Raises
        EngineError (ContractError, IncompatibleEngine, ConventionError, CanaryError) when the engine cannot be trusted.
        """
        engine_path = Path(engine_path)
        contract = read_contract(engine_path)
        check_files(engine_path, contract)
        check_inputs(contract)
        engine = open_engine(engine_path, contract, num_threads=num_threads)
        try:
            pipeline = Pipeline(engine, contract, num_slots=num_slots, deadline_s=deadline_s)
        except BaseException:
            engine.close()
            raise
        try:
            evidence = measure_convention(pipeline.run, contract)
            session = cls(pipeline, contract, evidence, origin_from_contract(contract, evidence.convention, tokenisation))
            if prove:
                session.check_canaries()
        except BaseException:
            pipeline.close()
            raise
        return session

    @cached_property
    def _canary_batches(self) -> list[list[WorkItem]]:
        return batches(_proven_fit(canary_items(self.contract), self.contract), self.contract.limits)

    @cached_property
    def _next_canaries(self) -> Iterator[list[WorkItem]]:
        return itertools.cycle(self._canary_batches)

    @property
    def convention(self) -> Convention:
        """The gather convention as measured."""
        return self.evidence.convention

    @property
    def engine(self) -> Engine:
        """The open engine, for what is measured of it alone; batches go through ``submit``."""
        return self._pipeline._engine

    def submit(self, items: Sequence[WorkItem]) -> Ticket:
        """Put one batch in flight. Waits for a free slot: at most ``num_slots`` tickets may be open in one thread.

        Raises Refusal for items the engine does not take, DeadlineExceeded when no slot came free, SessionClosed.
        """
        items = tuple(items)
        token_ids, offsets = flattened(items, self.contract)
        request_ids = tuple(item.request_id for item in items)
        flight = self._pipeline.pack(token_ids, offsets, request_ids, self.convention)
        self._pipeline.enqueue(flight)
        return Ticket(self, items, flight)

    def extract(self, items: Iterable[WorkItem]) -> Iterator[Record | Failure]:
        """Answer every item, in batches formed window by window; answers come in the order of the batches.

        Raises what ``submit`` and ``Ticket.wait`` raise.
        """
        in_flight: deque[Ticket] = deque()
        for batch in batches_of_windows(items, self.contract.limits):
            answers = in_flight.popleft().wait() if len(in_flight) == self.num_slots else []
            in_flight.append(self.submit(batch))
            yield from answers  # the caller stores them while the next batches run
        while in_flight:
            yield from in_flight.popleft().wait()

    def submit_canaries(self) -> CanaryTicket:
        """Put canaries in flight behind every batch submitted so far; commit those batches once its ``wait`` returned.

        Where the canaries do not fit one batch, calls take turns.
        """
        return CanaryTicket(self.submit(next(self._next_canaries)), self.contract)

    def check_canaries(self) -> list[CanaryDistance]:
        """Run every canary and say how far each state lies from the contract's; CanaryError when one is wrong."""
        tickets = (CanaryTicket(self.submit(items), self.contract) for items in self._canary_batches)
        return [distance for ticket in tickets for distance in ticket.wait()]

    def stats(self) -> dict[str, int]:
        """Count plans made, consumed, refused and open, results of another batch (must be 0), and slots out."""
        return self._pipeline.stats()

    def close(self) -> None:
        """Let the running batch end, drop the others, free the engine. Idempotent; records stay valid."""
        self._closing()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _proven_fit(items: list[WorkItem], contract: Contract) -> list[WorkItem]:
    for item in items:
        try:
            flattened([item], contract)
        except Refusal as refusal:
            raise ContractError(
                f"the contract's {item.request_id} is not a batch its own engine takes",
                expected=refusal.expected,
                found=refusal.found,
                fix="build the engine again",
            ) from refusal
    return items
