"""Report: what a worker did, counted by the broker's word."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class WorkReport:
    """What a worker did: work items by what became of them, and how full its batches were."""

    name: str
    answered: int  # records the broker has persisted
    refused: int  # items it has persisted a reason for: refused, or failed
    given_back: int  # items that others will do
    num_tokens: int
    num_batches: int
    batch_fill: float | None  # mean of tokens over budget
    seconds: float
    busy_seconds: float  # from joining to the last answer that was persisted

    def to_dict(self) -> dict:
        return dataclasses.asdict(self)
