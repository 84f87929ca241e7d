"""Connection: one connection to a NATS server, its event loop in a thread of its own, and the ways to be let in.

Credentials come from files and go nowhere else: not on the command line, not into a log, not into an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from tensorrt_llm_ext.errors import BrokerError, InputError, MissingExtra

T = TypeVar("T")

CALL_S = 60.0
"""Seconds a call waits for a broker that is away before it raises; a restart takes far less."""

_CONNECT_S = 20.0
_TRY_S = 5.0  # for one attempt at a call
_PAUSE_S = 0.25


@dataclass(frozen=True)
class Access:
    """Where the broker is, and the files that open it. ``url`` holds no password."""

    url: str  # nats://host:port or tls://host:port, several by commas
    creds: Path | None = None  # a NATS credentials file (JWT and key)
    token_file: Path | None = None
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None

    def __post_init__(self) -> None:
        for server in self.servers:
            parts = urlsplit(server)
            if "@" in parts.netloc:
                raise InputError(
                    "the broker's address holds a password or a token, which others could read",
                    expected="nats://host:port, and a file for what is secret",
                    found=f"{parts.scheme}://…@{parts.netloc.rpartition('@')[2]}",
                    fix="write it into a file: --creds FILE or --token-file FILE",
                )
            if parts.scheme not in ("nats", "tls") or not parts.hostname:
                raise InputError(
                    "this is not the address of a NATS server",
                    expected="nats://host:port or tls://host:port",
                    found=repr(server)[:200],
                    fix="correct --broker",
                )
        for option in ("creds", "token_file", "tls_ca", "tls_cert", "tls_key"):
            path = getattr(self, option)
            if path is not None and not Path(path).is_file():
                name = option.replace("_", "-")
                raise InputError(f"--{name} names no file", expected="a file", found=path, fix="name an existing file")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InputError(
                "a TLS certificate needs its key, and a key its certificate",
                expected="both --tls-cert and --tls-key, or neither",
                found=f"--tls-cert {self.tls_cert}, --tls-key {self.tls_key}",
                fix="name both",
            )

    @property
    def servers(self) -> list[str]:
        return self.url.split(",")

    def options(self) -> dict[str, Any]:
        """What ``nats.connect`` takes. Raises InputError for a certificate that cannot be read."""
        options: dict[str, Any] = {}
        if self.creds is not None:
            options["user_credentials"] = str(self.creds)
        if self.token_file is not None:
            options["token"] = Path(self.token_file).read_text().strip()
        if self.tls_ca or self.tls_cert or any(server.startswith("tls:") for server in self.servers):
            try:
                context = ssl.create_default_context(cafile=self.tls_ca)
                if self.tls_cert is not None:
                    context.load_cert_chain(self.tls_cert, self.tls_key)
            except (ssl.SSLError, OSError) as error:
                raise InputError(
                    "a TLS file cannot be read",
                    expected="certificates and keys in PEM format",
                    found=type(error).__name__,
                    fix="correct --tls-ca, --tls-cert, --tls-key",
                ) from error
            options["tls"] = context
        return options


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
        """The coroutine's result, tried again while the broker does not answer, for at most CALL_S."""
        import nats

        away = (TimeoutError, asyncio.TimeoutError, nats.errors.Error, OSError)
        deadline = time.monotonic() + CALL_S
        while True:
            try:
                return await make()
            except away as error:
                if not _is_passing(error) or self.client.is_closed or time.monotonic() > deadline:
                    raise BrokerError(
                        f"the broker refused or did not answer: {what}",
                        expected=f"an answer within {CALL_S:g} s",
                        found=f"{type(error).__name__}: {error}",
                        fix="look at the server's log; check the name of the stream and the rights of this user",
                    ) from error
            await asyncio.sleep(_PAUSE_S)

    @property
    def is_connected(self) -> bool:
        return self.client.is_connected

    def close(self) -> None:
        """Send what is still to be sent and close. Idempotent."""
        if self._thread.is_alive():
            with contextlib.suppress(Exception):  # the server may be away
                self._run(self._flushed_and_closed(), 10)
            self._stop()

    async def _flushed_and_closed(self) -> None:
        with contextlib.suppress(Exception):
            await self.client.flush(timeout=3)
        await self.client.close()

    async def _connect(self, nats: Any, name: str) -> Any:
        connecting = nats.connect(
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
        try:
            return await asyncio.wait_for(connecting, _CONNECT_S)
        except (nats.errors.Error, asyncio.TimeoutError, OSError, ValueError) as error:
            found = self._last_error or error
            raise BrokerError(
                "the broker does not let us in",
                expected=f"a NATS server at {self.access.url}",
                found=f"{type(found).__name__}: {found}",
                fix="start the server, or correct --broker, --creds, --token-file and the TLS options",
            ) from error

    async def _on_error(self, error: BaseException) -> None:
        self._last_error = error

    def _told(self, event: str) -> Callable[[], Coroutine[Any, Any, None]]:
        async def tell() -> None:
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


def _is_passing(error: BaseException) -> bool:
    """Whether the same call may succeed later: the server is away, starting, or busy. What it refuses, it refuses again."""
    from nats.js.errors import APIError, ServiceUnavailableError

    return not isinstance(error, APIError) or isinstance(error, ServiceUnavailableError)
