"""Messages that are no work items: bytes, JSON, types, values and sizes, from a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

from toy_streams import items

from tensorrt_llm_ext.worker.messages import message_from_work

VALUES = [None, True, 0, -1, 1.5, 1 << 40, 1 << 70, "", "x", "\ud800", "\x00", [], [None], [[]], {}, {"a": [1]}, "a" * 3000]


def fuzzed_bodies(wanted, number: int, random: random.Random) -> Iterator[bytes]:
    """So many bodies, each in some way wrong."""
    limit = wanted.settings.max_message_bytes
    right = message_from_work(items(1)[0], wanted, "normal").body
    kinds = [_bytes, _cut, _flipped, _json, _field, _field, _field, _missing, _extra, _ids, _ids, _sized]
    for place in range(number):
        yield kinds[place % len(kinds)](random, right, limit)


def _bytes(random, right, limit):
    return random.randbytes(random.choice([0, 1, 7, 100, 5000]))


def _cut(random, right, limit):
    return right[: random.randrange(len(right))]


def _flipped(random, right, limit):
    body = bytearray(right)
    for _ in range(random.randint(1, 8)):
        body[random.randrange(len(body))] = random.randrange(128, 256)  # never in an item: it is ASCII
    return bytes(body)


def _json(random, right, limit):
    return json.dumps(random.choice([*VALUES, ["a", 1], {"token_ids": [1]}])).encode()


def _field(random, right, limit):
    value = json.loads(right)
    name = random.choice([name for name in value if name not in ("request_id", "work_item_id")])
    value[name] = random.choice([wrong for wrong in VALUES if wrong is not True])
    return json.dumps(value).encode()


def _missing(random, right, limit):
    value = json.loads(right)
    del value[random.choice(list(value))]
    return json.dumps(value).encode()


def _extra(random, right, limit):
    return json.dumps({**json.loads(right), random.choice(["", "priority", "__class__", "\ud800"]): random.choice(VALUES)}).encode()


def _ids(random, right, limit):
    wrong = [random.choice([-1, 96, 97, 1 << 31, 1 << 63]), *(random.randrange(97) for _ in range(random.randrange(200)))]
    return json.dumps({**json.loads(right), "token_ids": wrong}).encode()


def _sized(random, right, limit):
    value = json.loads(right)
    value["token_ids"] = [1] * (limit // 3)
    body = json.dumps(value).encode()
    return random.choice([body[:limit], b" " * limit, b"[" * limit, b'"' + b"a" * (limit - 2) + b'"'])
