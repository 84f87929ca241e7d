"""The parts of one stream of work at a NATS server: three streams with their consumers, and two buckets.

What waits is bounded in messages, never in bytes: an older server (Debian 12's 2.9.10 is one) takes a message that does not
quite fit a stream's ``max_bytes`` and drops the stream's OLDEST for it, whatever its discard policy says (nats-server issues
4771 and 4775).
"""

from __future__ import annotations

from typing import Any

from tensorrt_llm_ext.errors import BrokerError
from tensorrt_llm_ext.worker.wanted import LANES, Lane, StreamSettings, Wanted

HEADER_BYTES = 4096
"""Room for a message's headers, beside its body."""

MIN_BODY_BYTES = 1024
"""Room for a short work item (some 340 bytes), a refusal or a reference: where there is less, no item has an answer."""

RAISE_MAX_PAYLOAD = "raise max_payload in the server's configuration"
"""What to do about a message that is larger than its server takes."""

_DUPLICATES_S = 600.0  # how long the broker knows an answer's message id; the store knows it for ever
_MAX_UNACKNOWLEDGED = 65536  # of a consumer; what a worker holds is bounded by its tokens


def check_max_payload(max_payload: int) -> None:
    """Raise BrokerError for a server whose largest message, in bytes, is too small for a short work item and its answer."""
    least = HEADER_BYTES + MIN_BODY_BYTES
    if max_payload < least:
        raise BrokerError(
            "the server's largest message is too small for work items and answers",
            expected=f"a max_payload of at least {least:,} bytes",
            found=f"{max_payload:,} bytes",
            fix=f"{RAISE_MAX_PAYLOAD}; a NATS server's default is 1 MiB",
        )


async def create_parts(js: Any, stream: str, wanted: Wanted) -> None:
    """Make what is not there yet; what is there stays as it is."""
    settings = wanted.settings
    for config in _streams(stream, wanted):
        await _add_stream(js, config)
    consumers = {lane_consumer(lane): ("work", f"work.{lane.name}.>") for lane in LANES}
    consumers |= {f"part-{n}": ("results", f"results.{n}.>") for n in range(settings.num_partitions)}
    for name, (part, subject) in consumers.items():
        await js.add_consumer(f"{stream}_{part}", _consumer(name, f"{stream}.{subject}", settings))
    await _add_buckets(js, stream, settings)


def lane_consumer(lane: Lane) -> str:
    """The name of the consumer that hands out a lane's work."""
    return f"work-{lane.priority}-{lane.length}"


def _streams(stream: str, wanted: Wanted) -> list[Any]:
    from nats.js import api

    largest = wanted.settings.max_message_bytes + HEADER_BYTES
    work = api.StreamConfig(f"{stream}_work", subjects=[f"{stream}.work.>"], max_msg_size=largest, allow_direct=True)
    results = api.StreamConfig(
        f"{stream}_results",
        subjects=[f"{stream}.results.>"],
        retention=api.RetentionPolicy.WORK_QUEUE,
        discard=api.DiscardPolicy.NEW,
        max_msgs=wanted.max_results,
        max_msg_size=largest,
        duplicate_window=_DUPLICATES_S,
    )
    rows = api.StreamConfig(
        f"{stream}_rows",
        subjects=[f"{stream}.rows.>"],
        discard=api.DiscardPolicy.NEW,
        max_msgs=wanted.settings.max_chunks,
        max_msg_size=largest,
        allow_direct=True,
    )
    return [work, results, rows]


def _consumer(name: str, subject: str, settings: StreamSettings) -> Any:
    from nats.js import api

    return api.ConsumerConfig(
        durable_name=name,
        filter_subject=subject,
        ack_wait=settings.ack_wait_s,
        max_deliver=-1,
        max_ack_pending=_MAX_UNACKNOWLEDGED,
    )


async def _add_stream(js: Any, config: Any) -> None:
    from nats.js.errors import BadRequestError

    try:
        await js.add_stream(config)
    except BadRequestError as error:
        if error.err_code != 10058:  # the name is in use with another configuration: it stays as it is
            raise


async def _add_buckets(js: Any, stream: str, settings: StreamSettings) -> None:
    from nats.js import api

    await js.create_key_value(api.KeyValueConfig(f"{stream}_facts"))
    await js.create_key_value(api.KeyValueConfig(f"{stream}_leases", ttl=settings.lease_s))
