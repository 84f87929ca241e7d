"""The worker's door: before it takes any work, its engine must be what the stream asks for, and prove its numbers."""

from __future__ import annotations

import dataclasses
import json

from tensorrt_llm_ext.errors import BrokerError, NotAdmitted
from tensorrt_llm_ext.results import Tokenisation
from tensorrt_llm_ext.runtime import Session
from tensorrt_llm_ext.worker.broker import Broker
from tensorrt_llm_ext.worker.wanted import KEY, Difference, Wanted, differences, lines_of, longest_of, read_wanted


def wanted_by(broker: Broker) -> Wanted:
    """What the stream's owner asks for. Raises BrokerError when nobody has said it."""
    entry = broker.get("facts", KEY)
    if entry is None:
        raise BrokerError(
            f"nobody has said what the stream '{broker.stream}' asks for",
            expected=f"a contract under the key '{KEY}'",
            found="none",
            fix=f"submit the first work items: trtllm-extract submit FILE --engine ENGINE --stream {broker.stream}",
        )
    return read_wanted(entry.value, broker.stream)


def worker_key(name: str) -> str:
    """The key of a worker's presence among the leases."""
    return f"worker.{name}"


def admitted(session: Session, broker: Broker, name: str) -> Wanted:
    """Prove an open session's canaries, publish its contract, and hold it against what the stream asks for.

    Raises CanaryError when the numbers are wrong, NotAdmitted with every field that differs.
    """
    wanted = wanted_by(broker)
    distances = session.check_canaries()
    found = differences(wanted, session.contract) + _tokenisation_differences(wanted, session)
    presence = {
        "contract": dataclasses.replace(session.contract, canaries=()).to_dict(),
        "convention": session.convention,
        "longest": longest_of(session.contract),
        "largest_canary_distance": max(distance.distance for distance in distances),
        "admitted": not found,
        "differences": [dataclasses.asdict(difference) for difference in found],
    }
    broker.put("leases", worker_key(name), json.dumps(presence).encode())
    if found:
        asked, has = lines_of(found)
        raise NotAdmitted(
            f"this engine is not what the stream '{broker.stream}' asks for; the worker has not joined",
            expected=asked,
            found=has,
            fix="run the engine that the stream's owner named, or join another stream",
        )
    return wanted


def _tokenisation_differences(wanted: Wanted, session: Session) -> list[Difference]:
    origin = session.origin
    asked, has = wanted.policy.tokenisation(), Tokenisation(origin.special_tokens, origin.template_hash, origin.prefix)
    return [] if asked == has else [Difference("tokenisation", str(asked), str(has))]
