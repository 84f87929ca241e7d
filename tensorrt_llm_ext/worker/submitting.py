"""Submitting: rows of an input become work items on a stream; the first submitter says what the stream asks for."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from tensorrt_llm_ext.errors import BrokerError, Refusal
from tensorrt_llm_ext.inputs import AcceptedRow, RefusedRow
from tensorrt_llm_ext.worker.broker import Broker, NotPublished, Published, work_subject
from tensorrt_llm_ext.worker.messages import check_ids, message_from_work
from tensorrt_llm_ext.worker.wanted import KEY, Wanted, check_priority, check_taps, differences, lines_of, read_wanted

_ROWS_AT_ONCE = 512
_Refused = tuple[int, str | None, Refusal]  # of a row: its number and request id


@dataclass
class SubmitReport:
    """What became of the rows: ``submitted + already_submitted + refused = read``."""

    read: int = 0
    submitted: int = 0
    already_submitted: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # by code
    num_tokens: int = 0  # submitted

    @property
    def shortfall(self) -> int:
        """Rows that are nowhere; anything but 0 is a defect."""
        return self.read - self.submitted - self.already_submitted - self.refused.total()

    def to_dict(self) -> dict:
        return {
            "read": self.read,
            "submitted": self.submitted,
            "already_submitted": self.already_submitted,
            "refused": self.refused.total(),
            "refused_by_code": dict(sorted(self.refused.items())),
            "tokens": self.num_tokens,
            "shortfall": self.shortfall,
        }


def make_stream(broker: Broker, wanted: Wanted, *, defaults: Iterable[str] = ()) -> Wanted:
    """Make the stream that asks for this, or go on with one that is there; returns what it asks for.

    ``defaults`` names settings nobody chose: a stream that is there keeps its own. A chat template that writes the date goes
    on with the date of the first submit. Raises TapError and InputError (``check_taps``), BrokerError with every difference
    when the stream asks for something else.
    """
    check_taps(wanted)
    if broker.get("facts", KEY) is None:
        broker.create(wanted)
        if broker.put("facts", KEY, wanted.to_json(), revision=0) is not None:
            return wanted
    there = read_wanted(broker.get("facts", KEY).value, broker.stream)
    dated = dataclasses.replace(wanted.policy, template_date=there.policy.template_date)
    kept = {name: getattr(there.settings, name) for name in defaults}
    asked = dataclasses.replace(wanted, policy=dated, settings=dataclasses.replace(wanted.settings, **kept))
    if asked.version == there.version:
        return there
    mine, theirs = _flat(asked.to_dict()), _flat(there.to_dict())
    names = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
    if engines := differences(there, asked.contract):  # else a hundred fields of two contracts would hide the few that matter
        names = [name for name in names if not name.startswith("contract.")]
    wanted_lines, lines = ([line] if engines else [] for line in lines_of(engines))
    raise BrokerError(
        f"the stream '{broker.stream}' asks for something else",
        expected="; ".join([*wanted_lines, *(f"{name} {theirs.get(name)}" for name in names)])[:2000],
        found="; ".join([*lines, *(f"{name} {mine.get(name)}" for name in names)])[:2000],
        fix="submit with the engine and the options that made the stream, or name another stream",
    )


def submit(
    rows: Iterable[AcceptedRow | RefusedRow],
    broker: Broker,
    wanted: Wanted,
    *,
    priority: str = "normal",
    on_refused: Callable[[int, str | None, Refusal], None] = lambda row, request_id, refusal: None,
) -> SubmitReport:
    """Put every row on the stream once: a request id that is there already, with the same tokens, stays as it is, whatever
    its priority.

    ``on_refused`` hears of each row that is not there at the end: its number, request id and reason.
    """
    check_priority(priority)
    report, stream = SubmitReport(), iter(rows)
    while some := list(islice(stream, _ROWS_AT_ONCE)):
        report.read += len(some)
        refused: list[_Refused] = [(row.number, row.request_id, row.refusal) for row in some if isinstance(row, RefusedRow)]
        accepted = _with_fitting_ids([row for row in some if isinstance(row, AcceptedRow)], refused)
        refused += _published(accepted, broker, wanted, priority, report)
        for number, request_id, refusal in refused:
            report.refused[refusal.code] += 1
            on_refused(number, request_id, refusal)
    return report


def _with_fitting_ids(rows: Sequence[AcceptedRow], refused: list[_Refused]) -> list[AcceptedRow]:
    """The rows whose ids messages can carry; the others are added to ``refused``."""
    kept = []
    for row in rows:
        try:
            check_ids(row.item.request_id, row.item.work_item_id)
            kept.append(row)
        except Refusal as refusal:
            refused.append((row.number, row.item.request_id, refusal))
    return kept


def _published(
    rows: Sequence[AcceptedRow], broker: Broker, wanted: Wanted, priority: str, report: SubmitReport
) -> list[_Refused]:
    """Publish rows and count them; the ones the broker did not take, with the reason."""
    before = _in_other_lanes(rows, broker, wanted, priority)
    rest = [row for row in rows if id(row) not in before]
    outcomes = broker.publish([message_from_work(row.item, wanted, priority) for row in rest])
    there = before | {id(row): outcome.sequence for row, outcome in zip(rest, outcomes, strict=True) if _is_there(outcome)}
    bodies = dict(zip(there, broker.read("work", [sequence or 0 for sequence in there.values()]), strict=True))
    refused = []
    for row, outcome in zip(rest, outcomes, strict=True):
        if id(row) in there:
            continue
        if isinstance(outcome, NotPublished):
            refused.append((row.number, row.item.request_id, _not_taken(outcome)))
        else:
            report.submitted += 1
            report.num_tokens += len(row.item.token_ids)
    for row in (row for row in rows if id(row) in there):
        if _token_hash(bodies[id(row)]) == row.item.token_hash:
            report.already_submitted += 1
        else:
            refused.append((row.number, row.item.request_id, _conflict(row.item.request_id)))
    return refused


def _in_other_lanes(rows: Sequence[AcceptedRow], broker: Broker, wanted: Wanted, priority: str) -> dict[int, int]:
    """Work items of these rows' request ids, of another priority or length, by the row's ``id``.

    The broker itself keeps a request id once in a lane only; of two submits at the same moment the store keeps one.
    """
    used, pairs = broker.used_lanes(), []
    for row in rows:
        own = wanted.lane_of(len(row.item.token_ids), priority)
        pairs += [(row, work_subject(lane, row.item.request_id)) for lane in used if lane != own]
    found = broker.find_work([subject for _, subject in pairs])
    return {id(row): sequence for (row, _), sequence in zip(pairs, found, strict=True) if sequence is not None}


def _is_there(outcome: Published | NotPublished) -> bool:
    return outcome.is_duplicate if isinstance(outcome, Published) else outcome.code == "taken"


def _token_hash(body: bytes | None) -> str | None:
    try:
        return json.loads(body or b"{}").get("token_hash")
    except (ValueError, AttributeError):
        return None


def _conflict(request_id: str) -> Refusal:
    return Refusal(
        "conflicting_id",
        "the stream has a work item of this request id",
        expected="each request id once",
        found=f"{request_id!r} again, with other tokens",
        fix="give each request an id of its own",
    )


def _not_taken(outcome: NotPublished) -> Refusal:
    what = "the broker did not take the work item"
    return Refusal(outcome.code, what, expected=outcome.expected, found=outcome.found, fix=outcome.fix)


def _flat(value: dict, prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, part in value.items():
        flat |= _flat(part, f"{prefix}{name}.") if isinstance(part, dict) else {prefix + name: part}
    return flat
