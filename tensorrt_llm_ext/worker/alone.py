"""Alone: what is written down before an item runs alone that may be what ends the workers that run it."""

from __future__ import annotations

from tensorrt_llm_ext.errors import Refusal
from tensorrt_llm_ext.worker.broker import Broker
from tensorrt_llm_ext.worker.held import HeldItem


def note_run_alone(broker: Broker, held: HeldItem, max_alone: int) -> None:
    """Write down that an item is about to run alone. Raises Refusal when it did so ``max_alone`` times, unanswered."""
    key = f"alone.{held.delivery.sequence}"
    entry = broker.get("facts", key)
    number = int(entry.value) if entry else 0
    if number >= max_alone:
        raise Refusal(
            "poison",
            "the work item came again and again, ran alone, and was never answered",
            expected=f"an answer in {max_alone} runs alone",
            found=f"delivery {held.delivery.num_delivered}, {number} runs alone",
            fix="look at the logs of the workers that ended while they held it",
        )
    broker.put("facts", key, str(number + 1).encode())
