"""Access: where the broker is, and the ways to be let in.

Credentials come from files and go nowhere else: not on the command line, not into a log, not into an error.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tensorrt_llm_ext.errors import InputError


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
        """What ``nats.connect`` takes. Raises InputError for a file that is not what it should be."""
        options: dict[str, Any] = {}
        if self.creds is not None:
            _check_creds(Path(self.creds))
            options["user_credentials"] = str(self.creds)
        if self.token_file is not None:
            options["token"] = _token(Path(self.token_file))
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


def _check_creds(path: Path) -> None:
    """Raise InputError for a file that is no credentials file; the client would stumble over it, and say what is in it."""
    import nkeys

    blocks: dict[str, str] = {}
    lines = path.read_bytes().decode("ascii", "replace").splitlines()
    for marker, line in zip(lines, lines[1:], strict=False):
        for name in ("NATS USER JWT", "USER NKEY SEED"):
            if f"BEGIN {name}" in marker:
                blocks[name] = line.strip()
    try:
        nkeys.from_seed(bytearray(blocks["USER NKEY SEED"].encode())).wipe()
        is_right = blocks["NATS USER JWT"].count(".") == 2
    except Exception:  # whatever the library meets: it is not a seed
        is_right = False
    if not is_right:
        raise InputError(
            "--creds is not a credentials file",
            expected="a NATS USER JWT and a USER NKEY SEED, as `nsc generate creds` writes them",
            found=f"{path}: {len(lines)} lines with {' and '.join(blocks) or 'neither of them'}",
            fix="make the file again, or name another",
        )


def _token(path: Path) -> str:
    token = path.read_text().strip()
    if not token:
        raise InputError("--token-file holds no token", expected="a token", found=f"{path}: nothing", fix="write it there")
    return token
