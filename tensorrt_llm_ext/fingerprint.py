"""One way to hash an identity: canonical JSON, SHA-256.

A fingerprint is ``sha256:`` and 64 hex digits. Canonical JSON has sorted keys, no spaces, ASCII only, and refuses
NaN and Inf, so the same identity gives the same text on every machine.
"""

from __future__ import annotations

import hashlib
import json
from itertools import pairwise
from pathlib import Path

import numpy as np

_READ_BYTES = 8 << 20


def canonical_json(value: object) -> str:
    """Return the one JSON text of ``value``. Raises ValueError for NaN, Inf and TypeError for what JSON lacks."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def fingerprint(identity: object) -> str:
    """Hash an identity made of JSON types."""
    return "sha256:" + hashlib.sha256(canonical_json(identity).encode()).hexdigest()


def file_fingerprint(path: Path) -> str:
    """Hash a file's bytes, reading 8 MiB at a time."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(_READ_BYTES):
            digest.update(piece)
    return "sha256:" + digest.hexdigest()


def token_hash(token_ids: np.ndarray) -> str:
    """Hash a sequence of token ids: SHA-256 over little-endian int32."""
    return "sha256:" + hashlib.sha256(np.ascontiguousarray(token_ids, dtype="<i4").tobytes()).hexdigest()


def token_hashes(token_ids: np.ndarray, offsets: np.ndarray) -> list[str]:
    """``token_hash`` of every sequence ``token_ids[offsets[i] : offsets[i + 1]]``, at a fraction of its cost for each."""
    packed = memoryview(np.ascontiguousarray(token_ids, dtype="<i4")).cast("B")
    sha256, bounds = hashlib.sha256, (np.asarray(offsets, dtype=np.int64) * 4).tolist()
    return ["sha256:" + sha256(packed[start:end]).hexdigest() for start, end in pairwise(bounds)]
