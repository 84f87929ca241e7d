"""The broker NATS JetStream: three streams and two buckets for one stream of work (``broker`` says which)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal

from tensorrt_llm_ext.errors import BrokerError
from tensorrt_llm_ext.worker.access import Access
from tensorrt_llm_ext.worker.broker import (
    FULL,
    STREAM_TOO_SMALL,
    Bucket,
    Counts,
    Delivery,
    Entry,
    Message,
    NotPublished,
    Part,
    Published,
    Settling,
    check_stream_name,
    reference_subject,
    rows_subject,
)
from tensorrt_llm_ext.worker.connection import Connection
from tensorrt_llm_ext.worker.jetstream_parts import HEADER_BYTES, RAISE_MAX_PAYLOAD, check_max_payload, create_parts, lane_consumer
from tensorrt_llm_ext.worker.wanted import LANES, Lane, Wanted

_PULL_S = 2.0
_PATIENT_S, _PATIENT_EVERY_S = 0.01, 1.0
_SETTLINGS = {"ack": b"+ACK", "extend": b"+WPI", "give_back": b"-NAK", "terminate": b"+TERM"}
_TAKEN, _FULL, _TOO_LARGE = (10071, 10164), (10077, 10047), (10054,)  # the server's error codes


class JetStreamBroker:
    """One stream of work at a NATS server. Made by ``JetStreamBroker.open``; a context manager."""

    def __init__(self, connection: Connection, stream: str) -> None:
        self.stream = stream
        self._connection = connection
        self._js = connection.jetstream
        self._inboxes: dict[str, Any] = {}  # subscription by consumer
        self._buckets: dict[Bucket, Any] = {}
        self._patient_at: dict[str, float] = {}  # by consumer: when it is asked patiently again

    @classmethod
    def open(cls, access: Access, stream: str, *, name: str, on_event: Callable[[str], None] = lambda event: None):
        """Connect. ``on_event`` hears ``disconnected`` and ``reconnected``. Raises BrokerError, InputError, MissingExtra."""
        check_stream_name(stream)
        connection = Connection(access, name, on_event)
        try:
            check_max_payload(connection.client.max_payload)
        except BrokerError:
            connection.close()
            raise
        return cls(connection, stream)

    def create(self, wanted: Wanted) -> None:
        self._connection.call(lambda: create_parts(self._js, self.stream, wanted), f"make the stream '{self.stream}'")

    def publish(self, messages: Sequence[Message]) -> list[Published | NotPublished]:
        return self._for_each(self._publish, messages, "publish")

    async def _publish(self, message: Message) -> Published | NotPublished:
        from nats.js.errors import APIError

        if self.max_body_bytes() < len(message.body):
            expected, fix = self._room, f"shorten it, or {RAISE_MAX_PAYLOAD}"
            return NotPublished("too_large", f"{len(message.body):,} bytes", expected=expected, fix=fix)
        headers = dict(message.headers)
        if message.message_id is not None:
            headers["Nats-Msg-Id"] = message.message_id
        if message.is_first:
            headers["Nats-Expected-Last-Subject-Sequence"] = "0"
        try:
            answer = await self._js.publish(f"{self.stream}.{message.subject}", message.body, headers=headers or None)
        except APIError as error:
            if error.err_code in _TAKEN:
                last = re.search(r"\d+$", error.description or "")
                return NotPublished("taken", error.description, int(last[0]) if last else None)
            if error.err_code in _FULL:
                return NotPublished("full", error.description, **FULL)
            if error.err_code in _TOO_LARGE:
                found, expected = f"{len(message.body):,} bytes; {error.description}", "at most the stream's max_message_bytes"
                return NotPublished("too_large", found, expected=expected, fix=STREAM_TOO_SMALL)
            raise
        return Published(answer.seq, bool(answer.duplicate))

    def pull_work(self, wants: Mapping[Lane, int]) -> dict[Lane, list[Delivery]]:
        async def from_every_lane() -> list[list[Delivery]]:
            return await asyncio.gather(*(self._pull("work", lane_consumer(lane), num) for lane, num in wants.items()))

        return dict(zip(wants, self._connection.call(from_every_lane, "pull work"), strict=True))

    def pull_results(self, partition: int, num_messages: int) -> list[Delivery]:
        return self._connection.call(lambda: self._pull("results", f"part-{partition}", num_messages), "pull results")

    async def _pull(self, part: str, consumer: str, num_messages: int) -> list[Delivery]:
        """Ask for messages that are there now; the server ends its answer with a status when they are fewer.

        After a restart a server may count a consumer's messages wrongly (2.9.10 does), and say at once that it has none, for
        ever. One that may wait for a moment looks at them: so it is asked like that now and then.
        """
        client = self._connection.client
        if num_messages < 1 or not client.is_connected:
            return []
        if consumer not in self._inboxes:
            self._inboxes[consumer] = await client.subscribe(client.new_inbox())
        inbox = self._inboxes[consumer]
        request = {"batch": num_messages, "no_wait": True}
        if (now := time.monotonic()) > self._patient_at.get(consumer, 0.0):
            request["expires"] = int(_PATIENT_S * 1e9)
            self._patient_at[consumer] = now + _PATIENT_EVERY_S
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self.stream}_{part}.{consumer}"
        await client.publish(subject, json.dumps(request).encode(), inbox.subject)
        deliveries: list[Delivery] = []
        with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
            while len(deliveries) < num_messages:
                message = await inbox.next_msg(timeout=_PULL_S)
                if "Status" in (message.headers or {}) and not message.reply:
                    break
                deliveries.append(self._delivery(message))
        return deliveries

    def _delivery(self, message: Any) -> Delivery:
        about, subject = message.metadata, message.subject.removeprefix(f"{self.stream}.")
        headers = message.headers or {}
        return Delivery(subject, message.data, headers, about.sequence.stream, about.num_delivered, message.reply)

    def settle(self, deliveries: Sequence[Delivery], how: Settling) -> None:
        async def send() -> None:
            for delivery in deliveries:
                await self._connection.client.publish(delivery.reply, _SETTLINGS[how])

        if deliveries:
            self._connection.call(send, how)

    def max_body_bytes(self) -> int:
        """What the server takes, less room for headers: it counts them, and closes the connection of who sends more."""
        return self._connection.client.max_payload - HEADER_BYTES

    @property
    def _room(self) -> str:
        """The largest body, in words."""
        payload = self._connection.client.max_payload
        return f"at most {self.max_body_bytes():,} bytes: the server's max_payload of {payload:,} less {HEADER_BYTES:,} for headers"

    def read(self, part: Part, sequences: Sequence[int]) -> list[bytes | None]:
        found = self._for_each(lambda sequence: self._message(part, seq=sequence), sequences, f"read {part}")
        return [None if message is None else message.data or b"" for message in found]

    def find_work(self, subjects: Sequence[str]) -> list[int | None]:
        subjects = [f"{self.stream}.{subject}" for subject in subjects]
        found = self._for_each(lambda subject: self._message("work", subject=subject), subjects, "find work items")
        return [None if message is None else message.seq for message in found]

    async def _message(self, part: Part | Literal["results"], **place: int | str) -> Any:
        """A message of a stream, or None where there is none: none has the number 0.

        Any replica answers a direct question, and may not have heard of a message yet; before a number is said to be
        gone, the leader is asked. Of results only the leader is asked: what it does not know is nowhere.
        """
        from nats.js.errors import NotFoundError

        if place.get("seq") == 0:
            return None
        for is_direct in (False,) if part == "results" else (True, False) if "seq" in place else (True,):
            with contextlib.suppress(NotFoundError):
                return await self._js.get_msg(f"{self.stream}_{part}", direct=is_direct, **place)
        return None

    def used_lanes(self) -> set[Lane]:
        lanes = self._connection.call(self._lanes, "look at the lanes")
        return {lane for lane, info in lanes.items() if info.num_pending or info.delivered.stream_seq}

    async def _lanes(self) -> dict[Lane, Any]:
        return {lane: await self._js.consumer_info(f"{self.stream}_work", lane_consumer(lane)) for lane in LANES}

    def items_with_rows(self, partition: int) -> tuple[list[int], int]:
        prefix = f"{self.stream}.{rows_subject(partition)}"

        async def read() -> tuple[list[int], int]:
            state = (await self._js.stream_info(f"{self.stream}_rows", subjects_filter=f"{prefix}>")).state
            items = (subject.removeprefix(prefix) for subject in state.subjects or ())
            return sorted(int(item) for item in items if item.isdecimal()), state.last_seq

        return self._connection.call(read, "list rows")

    def items_referred_to(self, partition: int, items: Sequence[int]) -> set[int]:
        subjects = [f"{self.stream}.{reference_subject(partition, item)}" for item in items]
        found = self._for_each(lambda subject: self._message("results", subject=subject), subjects, "look for references")
        return {item for item, message in zip(items, found, strict=True) if message is not None}

    def remove_rows(self, partition: int, items: Sequence[int], *, through: int | None = None) -> None:
        stream, first_kept = f"{self.stream}_rows", None if through is None else through + 1
        subjects = [f"{self.stream}.{rows_subject(partition, item)}" for item in items]
        self._for_each(lambda subject: self._js.purge_stream(stream, seq=first_kept, subject=subject), subjects, "remove rows")

    def remove_chunks(self, sequences: Sequence[int]) -> None:
        self._for_each(self._remove_chunk, sequences, "remove chunks of rows")

    async def _remove_chunk(self, sequence: int) -> None:
        from nats.js.errors import APIError

        with contextlib.suppress(APIError):  # gone already
            await self._js.delete_msg(f"{self.stream}_rows", sequence)

    def _for_each(self, make: Callable[[Any], Awaitable[Any]], things: Sequence[Any], what: str) -> list[Any]:
        """The results of calls that run side by side, each again while the broker is away."""

        async def all_of_them() -> list[Any]:
            return await asyncio.gather(*(self._connection.retried(lambda t=thing: make(t), what) for thing in things))

        return self._connection.call(all_of_them, what)

    def get(self, bucket: Bucket, key: str) -> Entry | None:
        from nats.js.errors import NotFoundError

        stream = f"{self.stream}_{bucket}"

        async def read() -> Entry | None:
            """From the leader: a bucket's own ``get`` asks any replica, which may not have heard of what was written."""
            with contextlib.suppress(NotFoundError):  # no such stream, or no such key
                message = await self._js.get_last_msg(f"KV_{stream}", f"$KV.{stream}.{key}", direct=False)
                if "KV-Operation" not in (message.headers or {}):  # else it was removed
                    return Entry(message.data or b"", message.seq)
            return None

        return self._connection.call(read, f"read '{key}'")

    def put(self, bucket: Bucket, key: str, value: bytes, *, revision: int | None = None) -> int | None:
        from nats.js.errors import KeyNotFoundError, KeyWrongLastSequenceError

        if len(value) > self.max_body_bytes():
            found = f"{len(value):,} bytes"
            raise BrokerError(f"'{key}' is too large for the server", expected=self._room, found=found, fix=RAISE_MAX_PAYLOAD)

        async def write() -> int | None:
            opened = await self._bucket(bucket)
            while True:
                try:
                    if revision is None:
                        return await opened.put(key, value)
                    return await (opened.update(key, value, last=revision) if revision else opened.create(key, value))
                except KeyWrongLastSequenceError:
                    return None
                except KeyNotFoundError:  # a lease that ended after it was in the way, while ``create`` looked at it: again
                    pass

        return self._connection.call(write, f"write '{key}'")

    def delete(self, bucket: Bucket, key: str, *, revision: int) -> None:
        from nats.js.errors import APIError

        async def remove() -> None:
            with contextlib.suppress(APIError):  # somebody else's by now
                await (await self._bucket(bucket)).delete(key, last=revision)

        self._connection.call(remove, f"remove '{key}'")

    def keys(self, bucket: Bucket) -> list[str]:
        from nats.js.errors import NoKeysError

        async def read() -> list[str]:
            with contextlib.suppress(NoKeysError):
                return sorted(await (await self._bucket(bucket)).keys())
            return []

        return self._connection.call(read, f"list the {bucket}")

    async def _bucket(self, bucket: Bucket) -> Any:
        from nats.js.errors import NotFoundError

        if bucket not in self._buckets:
            try:
                self._buckets[bucket] = await self._js.key_value(f"{self.stream}_{bucket}")
            except NotFoundError as error:
                raise BrokerError(
                    f"the broker has no stream '{self.stream}'",
                    expected=f"a stream made by `trtllm-extract submit … --stream {self.stream}`",
                    found=f"no bucket {self.stream}_{bucket}",
                    fix="submit the first work items, or correct --stream",
                ) from error
        return self._buckets[bucket]

    def counts(self) -> Counts:
        async def read() -> Counts:
            work = await self._js.stream_info(f"{self.stream}_work")
            results = await self._js.stream_info(f"{self.stream}_results")
            rows = await self._js.stream_info(f"{self.stream}_rows")
            lanes = await self._lanes()
            return Counts(
                work.state.messages,
                {lane.name: info.num_pending for lane, info in lanes.items()},
                {lane.name: info.num_ack_pending for lane, info in lanes.items()},
                results.state.messages,
                results.state.bytes,
                rows.state.bytes,
            )

        return self._connection.call(read, "count")

    def is_connected(self) -> bool:
        return self._connection.is_connected

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> JetStreamBroker:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
