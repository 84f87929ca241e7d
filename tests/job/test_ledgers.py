"""The two files beside a dataset: whole or as they were, and never a line of a run that did not commit it."""

import json
import resource

import numpy as np
import pytest
from toy_engines import work_item

from tensorrt_llm_ext.errors import DiskFull, Refusal, StoreError
from tensorrt_llm_ext.inputs import AcceptedRow, RefusedRow
from tensorrt_llm_ext.job.ledgers import FailedLedger, RefusedLedger


def refused(number):
    refusal = Refusal("not_text", "it is a number", expected="text", found="\ud800", fix="write text")
    return RefusedRow(number, None, number + 1, f"r{number}", refusal)


def failure(number):
    return AcceptedRow(number, None, work_item(f"r{number}", np.ones(2))), "not_finite", "NaN"


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_refusals_are_published_whole_by_rename(tmp_path):
    (tmp_path / "refused.jsonl").write_text("of an earlier run\n")
    ledger = RefusedLedger(tmp_path)
    ledger.write([refused(4), refused(6)])
    assert (tmp_path / "refused.jsonl").read_text() == "of an earlier run\n"
    ledger.publish()
    ledger.close()
    assert lines(tmp_path / "refused.jsonl")[0] == {
        "row": 4,
        "line": 5,
        "request_id": "r4",
        "code": "not_text",
        "what": "it is a number",
        "expected": "text",
        "found": "\ud800",
        "fix": "write text",
    }
    assert [path.name for path in tmp_path.iterdir()] == ["refused.jsonl"] and ledger.counts == {"not_text": 2}


def test_what_is_not_published_is_gone(tmp_path):
    ledger = RefusedLedger(tmp_path)
    ledger.write([refused(1)])
    ledger.close()
    assert list(tmp_path.iterdir()) == []


def test_failures_are_on_disk_when_write_returns_in_row_order(tmp_path):
    ledger = FailedLedger(tmp_path, 0)
    ledger.write([failure(5), failure(2)])
    assert [(line["row"], line["code"], line["reason"]) for line in lines(tmp_path / "failed.jsonl")] == [
        (2, "not_finite", "NaN"),
        (5, "not_finite", "NaN"),
    ]
    assert ledger.counts == {"not_finite": 2}
    ledger.close()


def test_lines_beyond_the_last_commit_and_torn_lines_are_dropped(tmp_path):
    ledger = FailedLedger(tmp_path, 0)
    ledger.write([failure(number) for number in range(6)])
    ledger.close()
    with open(tmp_path / "failed.jsonl", "a") as file:
        file.write('{"row": 1, "to')
    again = FailedLedger(tmp_path, 4)
    assert [line["row"] for line in again.settled()] == [0, 1, 2, 3]
    assert again.counts == {}  # of this run
    again.close()
    assert [line["row"] for line in lines(tmp_path / "failed.jsonl")] == [0, 1, 2, 3]


def test_a_damaged_ledger_is_not_guessed_at(tmp_path):
    (tmp_path / "failed.jsonl").write_text("{}}\n")
    with pytest.raises(StoreError, match="is damaged"):
        FailedLedger(tmp_path, 4)


def test_a_full_disk_is_typed(tmp_path):
    ledgers = RefusedLedger(tmp_path), FailedLedger(tmp_path, 0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
    try:
        with pytest.raises(DiskFull):
            ledgers[0].write([refused(number) for number in range(1000)])
        with pytest.raises(DiskFull):
            ledgers[1].write([failure(number) for number in range(1000)])
        for ledger in ledgers:
            ledger.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
