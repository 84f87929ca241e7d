"""Request ids that were seen before, 16 bytes each, and whether their tokens were the same."""

from __future__ import annotations

from enum import Enum

import numpy as np
import xxhash

_ID_BYTES = 12  # 96 bits: among a billion ids the chance of one false hit is 1e-11
_TOKEN_BYTES = 4  # decides only which of two refusals a repeated id gets
_ENTRY = np.dtype(f"S{_ID_BYTES + _TOKEN_BYTES}")  # sorted as bytes; all have the same length, so padding never decides
_MAX_MERGED_ENTRIES = 1 << 20  # larger levels stay apart, so that a merge never copies more than 32 MiB


class Verdict(Enum):
    """What is known of a request id."""

    NEW = "new"
    SAME_TOKENS = "seen with the same tokens"
    OTHER_TOKENS = "seen with other tokens"


class SeenIds:
    """Remembers every request id with a digest of its tokens, in sorted levels of falling size."""

    def __init__(self) -> None:
        self._levels: list[np.ndarray] = []

    @property
    def num_bytes(self) -> int:
        return sum(level.nbytes for level in self._levels)

    def claim(self, request_ids: list[str], token_hashes: list[str]) -> list[Verdict]:
        """Judge each id in order, against all that came before, in this call too; remember the new ones."""
        entries = [_entry(*pair) for pair in zip(request_ids, token_hashes, strict=True)]
        seen = self._find(entries)
        verdicts = []
        for entry in entries:
            known = seen.setdefault(entry[:_ID_BYTES], entry)
            is_same = known == entry
            verdicts.append(Verdict.NEW if known is entry else Verdict.SAME_TOKENS if is_same else Verdict.OTHER_TOKENS)
        self._remember([entry for entry, verdict in zip(entries, verdicts, strict=True) if verdict is Verdict.NEW])
        return verdicts

    def _find(self, entries: list[bytes]) -> dict[bytes, bytes]:
        """The remembered entry of each id that has one."""
        smallest = np.array([entry[:_ID_BYTES] for entry in entries], dtype=_ENTRY)  # sorts before its id with any tokens
        found: dict[bytes, bytes] = {}
        for level in self._levels:
            places = np.minimum(np.searchsorted(level, smallest), len(level) - 1)
            known = level[places].view(np.uint8).reshape(-1, _ENTRY.itemsize)
            wanted = smallest.view(np.uint8).reshape(-1, _ENTRY.itemsize)
            for position in np.flatnonzero((known == wanted)[:, :_ID_BYTES].all(axis=1)):
                found[entries[position][:_ID_BYTES]] = known[position].tobytes()
        return found

    def _remember(self, entries: list[bytes]) -> None:
        if not entries:
            return
        level = np.sort(np.array(entries, dtype=_ENTRY))
        while self._levels and len(self._levels[-1]) <= len(level) < _MAX_MERGED_ENTRIES:
            level = np.sort(np.concatenate([self._levels.pop(), level]))
        self._levels.append(level)


def _entry(request_id: str, token_hash: str) -> bytes:
    identity = xxhash.xxh3_128_digest(request_id.encode())[:_ID_BYTES]
    return identity + xxhash.xxh3_64_digest(token_hash.encode())[:_TOKEN_BYTES]
