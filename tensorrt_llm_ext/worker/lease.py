"""Lease: the right to write a partition, for as long as it is renewed."""

from __future__ import annotations

import json
import threading
import time

from tensorrt_llm_ext.errors import LeaseLost
from tensorrt_llm_ext.worker.broker import Broker

_POLL_S = 0.2


class Lease:
    """A held lease. ``token`` rises with every new holder and fences the ones before."""

    def __init__(self, broker: Broker, key: str, holder: str, revision: int) -> None:
        self.token = revision
        self._broker = broker
        self._key = key
        self._value = json.dumps({"holder": holder, "token": revision}).encode()
        self._revision = revision
        self._renewed = time.monotonic()

    @classmethod
    def take(cls, broker: Broker, key: str, holder: str, stop: threading.Event) -> Lease | None:
        """Wait until the lease is free, and take it; None when ``stop`` was set before that."""
        value = json.dumps({"holder": holder}).encode()
        while not stop.is_set():
            revision = broker.put("leases", key, value, revision=0)
            if revision is not None:
                return cls(broker, key, holder, revision)
            stop.wait(_POLL_S)
        return None

    def renew(self) -> None:
        """Hold it for another term. Raises LeaseLost when it has ended, whoever has it now."""
        revision = self._broker.put("leases", self._key, self._value, revision=self._revision)
        if revision is None:
            raise LeaseLost(
                f"the lease '{self._key}' has ended",
                expected=f"revision {self._revision}, renewed in time",
                found=f"{time.monotonic() - self._renewed:.1f} s after it was last renewed",
                fix="nothing: what this writer had not committed is delivered to the next",
            )
        self._revision, self._renewed = revision, time.monotonic()

    def renew_when_due(self, lease_s: float) -> None:
        """Renew it once a third of its term has passed."""
        if time.monotonic() - self._renewed > lease_s / 3:
            self.renew()

    def release(self) -> None:
        """Let the next one have it now."""
        self._broker.delete("leases", self._key, revision=self._revision)
