"""Canaries: known sequences whose right hidden states the contract carries. Wrong numbers never serve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tensorrt_llm_ext.errors import CanaryError
from tensorrt_llm_ext.fingerprint import token_hash
from tensorrt_llm_ext.recipes.contract import Canary, CanaryState, Contract, row_distances
from tensorrt_llm_ext.results.record import Failure, Record, WorkItem
from tensorrt_llm_ext.taps import Tap

if TYPE_CHECKING:
    from tensorrt_llm_ext.runtime.session import Ticket

_PREFIX = "canary:"


@dataclass(frozen=True)
class CanaryDistance:
    """How far one canary's state lies from the contract's: its farthest row by ``row_distances``."""

    canary: int  # its number in the contract
    tap: Tap
    distance: float
    tolerance: float
    source: str  # who gave the right numbers


class CanaryTicket:
    """Canaries in flight, behind everything that was submitted before them."""

    def __init__(self, ticket: Ticket, contract: Contract) -> None:
        self._ticket = ticket
        self._contract = contract

    def wait(self, timeout_s: float | None = None) -> list[CanaryDistance]:
        """Return every distance when all canaries came back right; raise CanaryError when one did not.

        Waits and fails like ``Ticket.wait``.
        """
        return [distance for answer in self._ticket.wait(timeout_s) for distance in _compared(answer, self._contract)]


def canary_items(contract: Contract) -> list[WorkItem]:
    """Make a work item of every canary. Raises CanaryError when a tap has no canary that could tell it is wrong."""
    covered = [{state.tap for state in canary.states} for canary in contract.canaries]
    missing = [tap for tap in contract.taps if not any(tap in taps for taps in covered)]
    if missing or not contract.canaries:
        spellings = [tap.spelling(contract.architecture.num_layers) for tap in missing]
        raise CanaryError(
            "the contract has no canary for every tap, so a wrong engine could not be told from a right one",
            expected="at least one canary with a state for each tap",
            found=f"{len(contract.canaries)} canaries; none for {', '.join(spellings)}",
            fix="build the engine again, or `trtllm-extract verify ENGINE --checkpoint … --update-canaries`",
        )
    return [_item(index, canary) for index, canary in enumerate(contract.canaries)]


def _item(index: int, canary: Canary) -> WorkItem:
    token_ids = np.asarray(canary.token_ids, dtype=np.int32)
    name = f"{_PREFIX}{index}"
    return WorkItem(request_id=name, work_item_id=name, token_ids=token_ids, token_hash=token_hash(token_ids))


def _compared(answer: Record | Failure, contract: Contract) -> list[CanaryDistance]:
    index = int(answer.request_id.removeprefix(_PREFIX))
    canary = contract.canaries[index]
    if isinstance(answer, Failure):
        raise _wrong(index, "finite rows", answer.reason)
    found = {state.tap: state.rows for state in answer.states}
    return [_distance(index, canary.source, state, found[state.tap], contract) for state in canary.states]


def _distance(index: int, source: str, right: CanaryState, rows: np.ndarray, contract: Contract) -> CanaryDistance:
    spelling = right.tap.spelling(contract.architecture.num_layers)
    if rows.shape != right.rows.shape:
        raise _wrong(index, f"{spelling} of shape {list(right.rows.shape)}", f"shape {list(rows.shape)}")
    distances = row_distances(rows, right.rows)
    distance = float(distances.max())
    if not distance <= right.tolerance:
        raise _wrong(
            index,
            f"every row of {spelling} within {right.tolerance:g} of {source}",
            f"row {distances.argmax()}, {distance:g} away ({right.confusion_with} would be {right.confusion:g} away)",
        )
    return CanaryDistance(index, right.tap, distance, right.tolerance, source)


def _wrong(index: int, expected: str, found: str) -> CanaryError:
    return CanaryError(
        f"canary {index} came back with other numbers than the contract promises",
        expected=expected,
        found=found,
        fix="do not use this engine's numbers: `trtllm-extract verify` says how far they are off; build it again",
    )
