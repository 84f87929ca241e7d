"""Events: one line of JSON an event, through Python's logging, under the name of this package."""

from __future__ import annotations

import json
import logging
import sys
import time

LOG = logging.getLogger("tensorrt_llm_ext.worker")


class Events:
    """Writes events with what they have in common (who, which stream). Call it with a name and fields."""

    def __init__(self, **common: str) -> None:
        self._common = common

    def __call__(self, event: str, **fields: object) -> None:
        line = {"time": round(time.time(), 3), "event": event, **self._common, **fields}
        LOG.info("%s", json.dumps(line, default=str))


def log_to_standard_error() -> None:
    """Show events on standard error, as they are."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
    LOG.propagate = False
