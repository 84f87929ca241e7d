"""Plan: what a batch must bring back. Made by the packer, carried by the ticket, verified, consumed exactly once."""

from __future__ import annotations

import itertools
import json
import threading
from dataclasses import dataclass

import numpy as np
import xxhash

from tensorrt_llm_ext.errors import PlanError


@dataclass(frozen=True)
class Plan:
    """The promise of one batch: who is in it, in which order, with how many rows."""

    batch: int  # serial number within the session
    request_ids: tuple[str, ...]
    row_counts: tuple[int, ...]  # tokens of each request, in batch order
    total_rows: int
    layout_digest: str


def layout_digest(request_ids: tuple[str, ...], row_counts: tuple[int, ...]) -> str:
    """Hash who lies where in the packed batch: 32 hex digits of XXH3, which travel with the batch as 16 bytes."""
    digest = xxhash.xxh3_128(json.dumps(request_ids).encode())
    digest.update(np.asarray(row_counts, dtype="<i4").tobytes())
    return digest.hexdigest()


class PlanRegistry:
    """Counts every plan: made, consumed, refused; refuses a second consumption and rows of another batch.

    Thread-safe. ``num_cross_request`` counts results that carried another batch's identity; it must stay 0.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer may abandon a plan while this thread is in here
        self._serial = itertools.count()
        self._open: dict[int, Plan] = {}
        self.num_made = 0
        self.num_consumed = 0
        self.num_refused = 0
        self.num_cross_request = 0

    def make(self, request_ids: tuple[str, ...], row_counts: tuple[int, ...]) -> Plan:
        """Register the plan of a batch about to be enqueued."""
        with self._lock:
            plan = Plan(
                next(self._serial), request_ids, row_counts, sum(row_counts), layout_digest(request_ids, row_counts)
            )
            self._open[plan.batch] = plan
            self.num_made += 1
            return plan

    def consume(self, plan: Plan, *, total_rows: int, digest: str) -> None:
        """Accept what came back for ``plan``, once. Raises PlanError and counts the refusal otherwise."""
        with self._lock:
            registered = self._open.pop(plan.batch, None)
            if registered is not plan:
                self.num_refused += 1
                raise PlanError(
                    f"the plan of batch {plan.batch} was consumed before, or was never made here",
                    expected="a plan that is open",
                    found="no open plan of this number",
                    fix="wait for each ticket once, in the session that submitted it",
                )
            if digest != plan.layout_digest or total_rows != plan.total_rows:
                self.num_refused += 1
                self.num_cross_request += digest != plan.layout_digest
                raise PlanError(
                    f"what came back is not batch {plan.batch}",
                    expected=f"{plan.total_rows} rows, layout {plan.layout_digest}",
                    found=f"{total_rows} rows, layout {digest}",
                    fix="this is a defect of the runtime or the backend: keep the input and report it",
                )
            self.num_consumed += 1

    def abandon(self, plan: Plan) -> None:
        """Close the plan of a batch that failed; its requests failed with it."""
        with self._lock:
            if self._open.pop(plan.batch, None) is not None:
                self.num_refused += 1

    def stats(self) -> dict[str, int]:
        with self._lock:
            return {
                "made": self.num_made,
                "consumed": self.num_consumed,
                "refused": self.num_refused,
                "open": len(self._open),
                "cross_request": self.num_cross_request,
            }
