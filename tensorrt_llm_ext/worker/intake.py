"""Intake: a thread that pulls work within the token bound, refuses what cannot be served, and keeps deadlines alive."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable

from tensorrt_llm_ext.errors import Refusal
from tensorrt_llm_ext.worker.broker import Broker, Delivery
from tensorrt_llm_ext.worker.door import worker_key
from tensorrt_llm_ext.worker.held import Held, HeldItem
from tensorrt_llm_ext.worker.lanes import FairLanes
from tensorrt_llm_ext.worker.messages import Outcome, request_id_of, work_from_body
from tensorrt_llm_ext.worker.wanted import Lane, Wanted

_IDLE_S = 0.05

Refuse = Callable[[Delivery, Outcome], None]


class Intake:
    """Runs from ``start`` to ``close``; ``stop_pulling`` ends the pulling, deadlines are extended until ``close``.

    An error of the broker ends it and is in ``error``.
    """

    def __init__(self, broker: Broker, wanted: Wanted, held: Held, refuse: Refuse, name: str, facts: Callable[[], dict]) -> None:
        self.error: BaseException | None = None
        self.last_work = time.monotonic()  # when a message last came
        self._broker = broker
        self._wanted = wanted
        self._held = held
        self._refuse = refuse
        self._presence = worker_key(name)
        self._facts = facts
        self._lanes = FairLanes(wanted)
        self._extended = self._seen = 0.0
        self._revision: int | None = None  # of the presence
        self._is_stopping = threading.Event()
        self._has_stopped = threading.Event()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="intake", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop_pulling(self) -> None:
        """Take no more work. Returns once the pull under way has ended."""
        self._is_stopping.set()
        self._has_stopped.wait()

    def close(self) -> None:
        """End the thread, and take this worker's presence away. Idempotent. Raises BrokerError."""
        self._is_stopping.set()
        self._is_closed.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._revision is not None:
            self._broker.delete("leases", self._presence, revision=self._revision)
            self._revision = None

    def _run(self) -> None:
        try:
            while not self._is_closed.is_set():
                self._keep_alive()
                if self._is_stopping.is_set():
                    self._has_stopped.set()
                    self._is_closed.wait(_IDLE_S)
                elif not self._pull():
                    self._held.wait(_IDLE_S)
        except BaseException as error:  # handed to the worker, whatever it is
            self.error = error
        finally:
            self._has_stopped.set()

    def _pull(self) -> bool:
        """One pull; whether anything came."""
        wants = self._lanes.wants(self._held.free_tokens, time.monotonic())
        if not wants:
            return False
        taken: dict[Lane, list[int]] = {}
        for lane, deliveries in self._broker.pull_work(wants).items():
            items = [self._read(lane, delivery) for delivery in deliveries]
            taken[lane] = [0 if held is None else held.num_tokens for held in items]
            self._held.add(held for held in items if held is not None)
        self._lanes.took(wants, taken, time.monotonic())
        if not any(taken.values()):
            return False
        self.last_work = time.monotonic()
        return True

    def _read(self, lane: Lane, delivery: Delivery) -> HeldItem | None:
        """The item of a delivery, or None when it was refused."""
        settings = self._wanted.settings
        try:
            item = work_from_body(delivery.body, self._wanted)
            self._check_lane(lane, len(item.token_ids))
        except Refusal as refusal:
            request_id = request_id_of(delivery.body, settings.max_message_bytes)
            self._refuse(delivery, Outcome.of_refusal(refusal, request_id))
            return None
        return HeldItem(delivery, item, runs_alone=delivery.num_delivered > settings.deliveries_before_alone)

    def _check_lane(self, lane: Lane, num_tokens: int) -> None:
        if num_tokens > (most := self._wanted.max_tokens_of(lane)):
            raise Refusal(
                "wrong_lane",
                f"the work item does not belong into the lane '{lane.name}'",
                expected=f"at most {most:,} tokens there",
                found=f"{num_tokens:,} tokens",
                fix="publish it with `trtllm-extract submit`, which chooses the lane",
            )

    def _keep_alive(self) -> None:
        """Extend the deadline of everything held, and renew this worker's presence, well before they end."""
        now, settings = time.monotonic(), self._wanted.settings
        if now - self._extended > settings.ack_wait_s / 3:
            self._broker.settle(self._held.deliveries(), "extend")
            self._extended = now
        if now - self._seen > settings.lease_s / 3:
            self._revision = self._broker.put("leases", self._presence, json.dumps(self._facts()).encode())
            self._seen = now
