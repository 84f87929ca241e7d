"""A server in operator mode for tests: an operator, accounts and users, their keys and the tokens they sign for each other.

A token is a JWT of NATS's kind: header and claims as JSON, each base64url without padding, signed by ed25519.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import time
from pathlib import Path

import nkeys

UNLIMITED = dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), -1)
JETSTREAM = dict.fromkeys(("mem_storage", "disk_storage", "streams", "consumer"), -1)


class Key:
    """An nkey of one kind: ``operator``, ``account`` or ``user``."""

    def __init__(self, kind: str) -> None:
        prefix = {"operator": nkeys.PREFIX_BYTE_OPERATOR, "account": nkeys.PREFIX_BYTE_ACCOUNT, "user": nkeys.PREFIX_BYTE_USER}
        self.kind = kind
        self.seed = bytes(nkeys.encode_seed(os.urandom(32), prefix[kind]))
        self._pair = nkeys.from_seed(bytearray(self.seed))
        self.public = self._pair.public_key.decode()

    def token_for(self, other: Key, **nats: object) -> str:
        """A token in which this key says what the other may do."""
        claims = {
            "iat": int(time.time()),
            "iss": self.public,
            "name": other.kind,
            "sub": other.public,
            "nats": {"type": other.kind, "version": 2, **nats},
        }
        claims["jti"] = base64.b32encode(hashlib.sha256(json.dumps(claims).encode()).digest()).decode().rstrip("=")
        signed = f"{_encoded({'typ': 'JWT', 'alg': 'ed25519-nkey'})}.{_encoded(claims)}"
        return f"{signed}.{_base64(self._pair.sign(signed.encode()))}"


class OperatorMode:
    """An operator with a system account and one account that has JetStream. ``config`` is the server's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.operator, self.system, self.account = Key("operator"), Key("account"), Key("account")
        tokens = {
            self.system: self.operator.token_for(self.system, limits=UNLIMITED),
            self.account: self.operator.token_for(self.account, limits=UNLIMITED | JETSTREAM),
        }
        preload = "\n".join(f"  {key.public}: {token}" for key, token in tokens.items())
        operator = self.operator.token_for(self.operator, system_account=self.system.public)
        self.config = folder / "operator.conf"
        self.config.write_text(
            f"operator: {operator}\nsystem_account: {self.system.public}\nresolver: MEMORY\nresolver_preload: {{\n{preload}\n}}\n"
        )

    def creds(self, name: str, *, account: Key | None = None, **permissions: object) -> Path:
        """A credentials file of a new user of the account, or of one that no server knows."""
        user = Key("user")
        token = (account or self.account).token_for(user, subs=-1, data=-1, payload=-1, **permissions)
        path = self.folder / f"{name}.creds"
        path.write_text(
            f"-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n"
            f"-----BEGIN USER NKEY SEED-----\n{user.seed.decode()}\n------END USER NKEY SEED------\n"
        )
        path.chmod(0o600)
        return path


def secrets_of(creds: Path) -> list[str]:
    """The token and the seed of a credentials file: what must never be said."""
    return [line for line in creds.read_text().splitlines() if line and not line.startswith("-")]


def _encoded(value: dict) -> str:
    return _base64(json.dumps(value, separators=(",", ":")).encode())


def _base64(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).decode().rstrip("=")
