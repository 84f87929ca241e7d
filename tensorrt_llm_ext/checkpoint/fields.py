"""Reading typed fields from a config: a value is there, of its type and finite, or the error names it.

A missing field and a null one take the default; without a default they are errors. Every function raises
DamagedCheckpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tensorrt_llm_ext.errors import DamagedCheckpoint

_RESTORE = "restore the file from where the checkpoint came from"


def integer(fields: Mapping[str, Any], key: str, default: int | None = None, *, minimum: int = 1) -> int:
    """Read a whole number of at least ``minimum``."""
    value = _value(fields, key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise _wrong(key, f"a whole number of at least {minimum}", repr(value))
    return int(value)


def number(fields: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Read a finite number of at least zero."""
    return _finite(_value(fields, key, default), key)


def positive_number(fields: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Read a finite number above zero."""
    value = number(fields, key, default)
    if value == 0:
        raise _wrong(key, "a finite number above 0", repr(value))
    return value


def positive_numbers(fields: Mapping[str, Any], key: str, count: int) -> tuple[float, ...]:
    """Read a list of exactly ``count`` finite numbers above zero."""
    value = _value(fields, key, None)
    if not isinstance(value, list) or len(value) != count:
        raise _wrong(
            key, f"a list of {count} numbers", f"{len(value)} values" if isinstance(value, list) else repr(value)
        )
    return tuple(positive_number({key: item}, key) for item in value)


def boolean(fields: Mapping[str, Any], key: str, default: bool) -> bool:
    """Read true or false."""
    value = _value(fields, key, default)
    if not isinstance(value, bool):
        raise _wrong(key, "true or false", repr(value))
    return value


def names(fields: Mapping[str, Any], key: str, *, minimum: int = 0) -> list[str]:
    """Read a list of at least ``minimum`` names. A missing or null field is an empty list."""
    value = _value(fields, key, [])
    if not isinstance(value, list) or len(value) < minimum or not all(isinstance(item, str) for item in value):
        raise _wrong(key, "a list of names", repr(value)[:80])
    return value


def settings(fields: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Read an object with fields of its own. A missing or null field is an empty object."""
    value = _value(fields, key, {})
    if not isinstance(value, dict):
        raise _wrong(key, "an object", repr(value))
    return value


def _value(fields: Mapping[str, Any], key: str, default: Any) -> Any:
    value = fields.get(key)
    value = default if value is None else value
    if value is None:
        raise _wrong(key, "a value", "nothing")
    return value


def _finite(value: Any, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise _wrong(key, "a finite number of at least 0", repr(value))
    return float(value)


def _wrong(key: str, expected: str, found: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(f"the field '{key}' cannot be used", expected=expected, found=found, fix=_RESTORE)
