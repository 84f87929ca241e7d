"""Status: how far a stream is, as the broker counts the work and the store's writers count what they hold."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass

from tensorrt_llm_ext.worker.broker import Broker
from tensorrt_llm_ext.worker.door import wanted_by
from tensorrt_llm_ext.worker.storing import facts_key


@dataclass(frozen=True)
class Status:
    """``stored + refused + failed + open = submitted``; ``open`` items wait, are in work, or are answered and not stored."""

    stream: str
    model: str
    contract_version: str
    submitted: int
    waiting: dict[str, int]  # by lane
    in_work: dict[str, int]
    unstored: int  # answers that wait for a store
    unstored_bytes: int  # of messages
    unstored_rows_bytes: int  # of rows that messages refer to
    stored: int
    refused: int
    failed: int
    by_code: dict[str, int]
    workers: dict[str, dict]
    writers: list[str]  # partitions that have a writer now

    @property
    def open(self) -> int:
        return self.submitted - self.stored - self.refused - self.failed

    @property
    def is_done(self) -> bool:
        """Whether every work item is settled."""
        return self.open == 0

    def to_dict(self) -> dict:
        return {**vars(self), "open": self.open, "done": self.is_done}


def status_of(broker: Broker) -> Status:
    """Read the status of a stream. Raises BrokerError when there is none."""
    wanted = wanted_by(broker)
    facts = [broker.get("facts", facts_key(number)) for number in range(wanted.settings.num_partitions)]
    stores = [json.loads(entry.value) for entry in facts if entry is not None]
    by_code: Counter[str] = Counter()
    for store in stores:
        by_code.update(store["by_code"])
    counts, present = broker.counts(), broker.keys("leases")
    workers = {key.removeprefix("worker."): broker.get("leases", key) for key in present if key.startswith("worker.")}
    return Status(
        stream=broker.stream,
        model=wanted.contract.model_name,
        contract_version=wanted.version,
        submitted=counts.num_work,
        waiting=dict(counts.waiting),
        in_work=dict(counts.in_work),
        unstored=counts.num_results,
        unstored_bytes=counts.results_bytes,
        unstored_rows_bytes=counts.rows_bytes,
        stored=sum(store["stored"] for store in stores),
        refused=sum(store["refused"] for store in stores),
        failed=sum(store["failed"] for store in stores),
        by_code=dict(by_code),
        workers={name: json.loads(entry.value) for name, entry in workers.items() if entry is not None},
        writers=[key.removeprefix("part-") for key in present if key.startswith("part-")],
    )
