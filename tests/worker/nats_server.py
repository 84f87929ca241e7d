"""A nats-server with JetStream for tests: on a free port, its store in a temporary folder."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from pathlib import Path

PROGRAM = shutil.which("nats-server") or shutil.which("nats-server", path="/usr/sbin:/usr/local/sbin")
MISSING = "no nats-server here: apt-get install nats-server (.ci/run does)"


class NatsServer:
    """One server that can be stopped, killed and started again with what it has stored."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self._options = options
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.process: subprocess.Popen | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def start(self) -> NatsServer:
        words = [PROGRAM, "-a", "127.0.0.1", "-p", str(self.port), "-js", "-sd", str(self.folder / "store"), *self._options]
        with open(self.folder / "server.log", "a") as log:
            self.process = subprocess.Popen(words, stdout=log, stderr=log)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            assert self.process.poll() is None, (self.folder / "server.log").read_text()
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return self
            except OSError:
                time.sleep(0.02)
        raise AssertionError("nats-server does not listen")

    def stop(self, *, kill: bool = False) -> None:
        if self.process is not None:
            self.process.kill() if kill else self.process.terminate()
            self.process.wait(30)
            self.process = None
