"""The broker NATS JetStream: two streams and two buckets for one stream of work (``broker`` says which)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tensorrt_llm_ext.errors import BrokerError
from tensorrt_llm_ext.worker.broker import (
    Bucket,
    Counts,
    Delivery,
    Entry,
    Message,
    NotPublished,
    Published,
    Settling,
    check_stream_name,
)
from tensorrt_llm_ext.worker.connection import Access, Connection
from tensorrt_llm_ext.worker.wanted import LANES, Lane, StreamSettings

_DUPLICATES_S = 600.0  # how long the broker knows an answer's message id; the store knows it for ever
_MAX_UNACKNOWLEDGED = 65536  # of a consumer; what a worker holds is bounded by its tokens
_PULL_S = 2.0
_HEADER_BYTES = 4096
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

    @classmethod
    def open(cls, access: Access, stream: str, *, name: str, on_event: Callable[[str], None] = lambda event: None):
        """Connect. ``on_event`` hears ``disconnected`` and ``reconnected``. Raises BrokerError, InputError, MissingExtra."""
        check_stream_name(stream)
        return cls(Connection(access, name, on_event), stream)

    def create(self, settings: StreamSettings) -> None:
        self._connection.call(lambda: self._create(settings), f"make the stream '{self.stream}'")

    async def _create(self, settings: StreamSettings) -> None:
        from nats.js import api

        largest = settings.max_message_bytes + _HEADER_BYTES
        await self._add_stream(
            api.StreamConfig(f"{self.stream}_work", subjects=[f"{self.stream}.work.>"], max_msg_size=largest, allow_direct=True)
        )
        await self._add_stream(
            api.StreamConfig(
                f"{self.stream}_results",
                subjects=[f"{self.stream}.results.>"],
                retention=api.RetentionPolicy.WORK_QUEUE,
                discard=api.DiscardPolicy.NEW,
                max_bytes=settings.max_results_bytes,
                max_msg_size=largest,
                duplicate_window=_DUPLICATES_S,
            )
        )
        filters = {_lane_consumer(lane): ("work", f"work.{lane.name}.>") for lane in LANES}
        filters |= {f"part-{n}": ("results", f"results.{n}.>") for n in range(settings.num_partitions)}
        for name, (part, subject) in filters.items():
            config = api.ConsumerConfig(
                durable_name=name,
                filter_subject=f"{self.stream}.{subject}",
                ack_wait=settings.ack_wait_s,
                max_deliver=-1,
                max_ack_pending=_MAX_UNACKNOWLEDGED,
            )
            await self._js.add_consumer(f"{self.stream}_{part}", config)
        await self._js.create_key_value(api.KeyValueConfig(f"{self.stream}_facts"))
        await self._js.create_key_value(api.KeyValueConfig(f"{self.stream}_leases", ttl=settings.lease_s))

    async def _add_stream(self, config: Any) -> None:
        from nats.js.errors import BadRequestError

        try:
            await self._js.add_stream(config)
        except BadRequestError as error:
            if error.err_code != 10058:  # the name is in use with another configuration: it stays as it is
                raise

    def publish(self, messages: Sequence[Message]) -> list[Published | NotPublished]:
        async def all_of_them() -> list[Published | NotPublished]:
            return await asyncio.gather(*(self._connection.retried(lambda m=m: self._publish(m), "publish") for m in messages))

        return self._connection.call(all_of_them, "publish")

    async def _publish(self, message: Message) -> Published | NotPublished:
        import nats.errors
        from nats.js.errors import APIError

        headers = dict(message.headers)
        if message.message_id is not None:
            headers["Nats-Msg-Id"] = message.message_id
        if message.is_first:
            headers["Nats-Expected-Last-Subject-Sequence"] = "0"
        try:
            answer = await self._js.publish(f"{self.stream}.{message.subject}", message.body, headers=headers or None)
        except nats.errors.MaxPayloadError:
            limit = self._connection.client.max_payload
            return NotPublished("too_large", f"{len(message.body):,} bytes; the server takes {limit:,}")
        except APIError as error:
            if error.err_code in _TAKEN:
                last = re.search(r"\d+$", error.description or "")
                return NotPublished("taken", error.description, int(last[0]) if last else None)
            if error.err_code in _FULL:
                return NotPublished("full", error.description)
            if error.err_code in _TOO_LARGE:
                return NotPublished("too_large", f"{len(message.body):,} bytes; {error.description}")
            raise
        return Published(answer.seq, bool(answer.duplicate))

    def pull_work(self, wants: Mapping[Lane, int]) -> dict[Lane, list[Delivery]]:
        async def from_every_lane() -> list[list[Delivery]]:
            return await asyncio.gather(*(self._pull("work", _lane_consumer(lane), num) for lane, num in wants.items()))

        return dict(zip(wants, self._connection.call(from_every_lane, "pull work"), strict=True))

    def pull_results(self, partition: int, num_messages: int) -> list[Delivery]:
        return self._connection.call(lambda: self._pull("results", f"part-{partition}", num_messages), "pull results")

    async def _pull(self, part: str, consumer: str, num_messages: int) -> list[Delivery]:
        """Ask for messages that are there now; the server ends its answer with a status when they are fewer."""
        client = self._connection.client
        if num_messages < 1 or not client.is_connected:
            return []
        if consumer not in self._inboxes:
            self._inboxes[consumer] = await client.subscribe(client.new_inbox())
        inbox = self._inboxes[consumer]
        request = json.dumps({"batch": num_messages, "no_wait": True}).encode()
        await client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{self.stream}_{part}.{consumer}", request, inbox.subject)
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

    def work(self, sequences: Sequence[int]) -> list[bytes | None]:
        async def all_of_them() -> list[bytes | None]:
            return await asyncio.gather(*(self._work(sequence) for sequence in sequences))

        return self._connection.call(all_of_them, "read work items")

    async def _work(self, sequence: int) -> bytes | None:
        from nats.js.errors import NotFoundError

        async def read() -> bytes | None:
            try:
                return (await self._js.get_msg(f"{self.stream}_work", seq=sequence, direct=True)).data or b""
            except NotFoundError:
                return None

        return await self._connection.retried(read, f"read work item {sequence}") if sequence > 0 else None

    def get(self, bucket: Bucket, key: str) -> Entry | None:
        from nats.js.errors import KeyNotFoundError

        async def read() -> Entry | None:
            try:
                entry = await (await self._bucket(bucket)).get(key)
            except (KeyNotFoundError, BrokerError):  # BrokerError: there is no such stream, so no such key
                return None
            return Entry(entry.value or b"", entry.revision)

        return self._connection.call(read, f"read '{key}'")

    def put(self, bucket: Bucket, key: str, value: bytes, *, revision: int | None = None) -> int | None:
        from nats.js.errors import KeyWrongLastSequenceError

        async def write() -> int | None:
            opened = await self._bucket(bucket)
            try:
                if revision is None:
                    return await opened.put(key, value)
                return await (opened.update(key, value, last=revision) if revision else opened.create(key, value))
            except KeyWrongLastSequenceError:
                return None

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
            lanes = {lane.name: await self._js.consumer_info(f"{self.stream}_work", _lane_consumer(lane)) for lane in LANES}
            return Counts(
                work.state.messages,
                {name: info.num_pending for name, info in lanes.items()},
                {name: info.num_ack_pending for name, info in lanes.items()},
                results.state.messages,
                results.state.bytes,
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


def _lane_consumer(lane: Lane) -> str:
    return f"work-{lane.priority}-{lane.length}"
