"""Connection: one connection to a NATS server, its event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from tensorrt_llm_ext.errors import BrokerError, MissingExtra
from tensorrt_llm_ext.worker.access import Access

T = TypeVar("T")

CALL_S = 60.0
"""Seconds a call waits for a broker that is away before it raises; a restart takes far less."""

_CONNECT_S = 20.0
_TRY_S = 5.0  # for one attempt at a call
_PAUSE_S = 0.25
_NOBODY_THERE = ConnectionRefusedError, socket.gaierror


class Connection:
    """An open connection that comes back by itself when the server does. Any thread may ``call``."""

    def __init__(self, access: Access, name: str, on_event: Callable[[str], None]) -> None:
        try:
            import nats
        except ImportError as error:
            raise MissingExtra(
                "a broker needs the extra 'worker'",
                expected="the package nats-py",
                found=error,
                fix="pip install 'tensorrt_llm_ext[worker]'",
            ) from error
        self.access = access
        self._on_event = on_event
        self._last_error: BaseException | None = None
        self._denied: BaseException | None = None  # something that this user may not do
        self._connecting: asyncio.Future | None = None
        self._is_closing = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="broker", daemon=True)
        self._thread.start()
        try:
            self.client = self._run(self._connect(nats, name), _CONNECT_S + 5)
        except BaseException:
            self._stop()
            raise
        self.jetstream = self.client.jetstream(timeout=_TRY_S)

    def call(self, make: Callable[[], Awaitable[T]], what: str) -> T:
        """Run a coroutine on the loop; again, with a new one, while the broker is away. Raises BrokerError."""
        return self._run(self.retried(make, what), CALL_S + 30)

    async def retried(self, make: Callable[[], Awaitable[T]], what: str) -> T:
        """The coroutine's result, tried again while the broker does not answer, for at most CALL_S.

        What a user may not do is not answered at all; the server says so beside, and that ends every call from then on.
        """
        import nats

        away = (TimeoutError, asyncio.TimeoutError, nats.errors.Error, OSError)
        deadline = time.monotonic() + CALL_S
        while self._denied is None:
            try:
                return await make()
            except away as error:
                if not _is_passing(error) or self.client.is_closed or time.monotonic() > deadline:
                    raise _refused(what, error) from error
            await asyncio.sleep(_PAUSE_S)
        raise _refused(what, self._denied)

    @property
    def is_connected(self) -> bool:
        return self.client.is_connected

    def close(self) -> None:
        """Send what is still to be sent and close. Idempotent."""
        if self._thread.is_alive():
            self._is_closing = True
            with contextlib.suppress(Exception):  # the server may be away
                self._run(self._flushed_and_closed(), 10)
            self._stop()

    async def _flushed_and_closed(self) -> None:
        with contextlib.suppress(Exception):
            await self.client.flush(timeout=3)
        await self.client.close()

    async def _connect(self, nats: Any, name: str) -> Any:
        self._connecting = asyncio.ensure_future(
            nats.connect(
                self.access.servers,
                name=name,
                connect_timeout=3,
                reconnect_time_wait=0.3,
                max_reconnect_attempts=-1,
                error_cb=self._on_error,
                disconnected_cb=self._told("disconnected"),
                reconnected_cb=self._told("reconnected"),
                **self.access.options(),
            )
        )
        try:
            return await asyncio.wait_for(self._connecting, _CONNECT_S)
        except (nats.errors.Error, asyncio.TimeoutError, asyncio.CancelledError, OSError, ValueError) as error:
            found = self._last_error or error
            raise BrokerError(
                "the broker cannot be reached" if isinstance(found, _NOBODY_THERE) else "the broker does not let us in",
                expected=f"a NATS server at {self.access.url}",
                found=f"{type(found).__name__}: {found}",
                fix="start the server, or correct --broker, --creds, --token-file and the TLS options",
            ) from error

    async def _on_error(self, error: BaseException) -> None:
        self._last_error = error
        if "permissions violation" in str(error).lower():
            self._denied = error
        if not self._connecting.done() and _is_final(error):
            self._connecting.cancel()

    def _told(self, event: str) -> Callable[[], Coroutine[Any, Any, None]]:
        async def tell() -> None:
            if not self._is_closing:
                self._on_event(event)

        return tell

    def _run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        if not self._thread.is_alive():
            coroutine.close()
            raise BrokerError("the connection was closed", expected="an open broker", found="closed", fix="open another")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _is_final(error: BaseException) -> bool:
    """Whether a server that was reached will never let us in."""
    return isinstance(error, ssl.SSLError) or "authorization violation" in str(error).lower()


def _refused(what: str, error: BaseException) -> BrokerError:
    return BrokerError(
        f"the broker refused or did not answer: {what}",
        expected=f"an answer within {CALL_S:g} s",
        found=f"{type(error).__name__}: {error}",
        fix="look at the server's log; check the name of the stream and the rights of this user",
    )


def _is_passing(error: BaseException) -> bool:
    """Whether the same call may succeed later: the server is away, starting, or busy. What it refuses, it refuses again."""
    from nats.js.errors import APIError, ServiceUnavailableError

    return not isinstance(error, APIError) or isinstance(error, ServiceUnavailableError)
