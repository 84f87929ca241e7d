"""What says how quick the host is runs, and what it says adds up; the figures themselves are a quiet machine's business."""

import argparse
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import file_to_dataset  # noqa: E402
import host_cost  # noqa: E402
from ids_files import FIELDS, write_ids  # noqa: E402
from instant_engine import ENGINE, write_instant_engine  # noqa: E402

from tensorrt_llm_ext.errors import CanaryError  # noqa: E402
from tensorrt_llm_ext.inputs import open_input  # noqa: E402
from tensorrt_llm_ext.runtime import Session  # noqa: E402


@pytest.fixture
def engine(tmp_path):
    yield write_instant_engine(tmp_path / "engine")
    ENGINE.tokens_per_s = None


def test_both_kinds_of_file_hold_the_same_ids(tmp_path):
    found = []
    for name in ("ids.jsonl", "ids.parquet"):
        write_ids(tmp_path / name, 9, 4, 100)
        found.append([row.fields["ids"].tolist() for row in open_input(str(tmp_path / name), FIELDS).rows()])
    assert found[0] == found[1] and len(found[0]) == 9


def test_an_instant_engine_with_other_numbers_fails_its_canaries(engine, monkeypatch):
    monkeypatch.setattr(ENGINE, "_table", ENGINE._table[::-1].copy())
    with pytest.raises(CanaryError):
        Session.open(engine)


def test_the_cost_of_a_record_is_the_sum_of_its_threads(engine, tmp_path):
    write_ids(tmp_path / "ids.parquet", 3000, 16, 100)
    figures = host_cost.measured(engine, tmp_path / "ids.parquet", tmp_path / "out")
    of_threads = {name: figures[name] for name in ("main", "read ahead", "write", "native")}
    assert all(value > 0 for value in of_threads.values())
    assert figures["all"] == pytest.approx(sum(of_threads.values())) and 0 < figures["engine waited"] < 1


def test_a_run_is_held_against_the_same_batches_without_it(engine, tmp_path, monkeypatch):
    ENGINE.tokens_per_s = 2e6
    arguments = argparse.Namespace(folder=tmp_path, rows=12000, length=16, rounds=2, format="jsonl")
    with Session.open(engine) as session:
        report = file_to_dataset.measured(session, arguments)
    assert len(report["rounds"]) == 2 and report["batches"] >= 4
    for found in report["rounds"]:
        assert found["ratio"] == pytest.approx(found["run records/s"] / found["engine records/s"])
        assert sum(value for name, value in found.items() if name.startswith("main thread")) == pytest.approx(1.0)
        assert 0 < found["fixed seconds of a run"] < 12000 / found["run records/s"]
        assert found["seconds for a million"] > 0.8 * 1_000_000 * 16 / 2e6  # the first batch may be heard of late
