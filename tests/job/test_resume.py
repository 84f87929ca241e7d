"""A run that ends anywhere, by a drift or SIGKILL, goes on to the dataset that an undisturbed run makes, byte for byte."""

import json
import random
import shutil
from dataclasses import replace

import pytest
from killed_runs import killed
from toy_engines import LAST, MEAN, Toy, reference, write_engine
from toy_jobs import BAD_ROWS, LIMITS, NAN_ROW, WINDOWS, contents_of, ledger_of, run, table_of, write_input
from wrapped_sessions import Wrapped

from tensorrt_llm_ext.errors import CanaryError, ForeignDataset
from tensorrt_llm_ext.job import WindowLimits

SERVED = [row for row in range(50) if row not in BAD_ROWS and row != NAN_ROW]


@pytest.fixture(scope="module")
def undisturbed(engine, tmp_path_factory):
    """An input and the dataset that an undisturbed run makes of it."""
    folder = tmp_path_factory.mktemp("undisturbed")
    prompts = write_input(folder / "prompts.jsonl")
    run(engine, prompts, folder / "out")
    return prompts, contents_of(folder / "out")


STEPS = {
    "while the dataset is made": [["create", 0, "before"], ["create", 0, "after"]],
    "at the first batch": [["extend", 0, "before"]],
    "within a window": [["extend", 4, "after"], ["extend", 1, "before"]],
    "before a data file": [["write", 2, "before"]],
    "between a data file and its commit": [["write", 0, "after"], ["write", 3, "after"]],
    "at a commit": [["commit", 1, "before"], ["commit", 1, "after"], ["commit", 0, "after"]],
    "around a failed row": [["failed", 0, "before"], ["failed", 0, "after"]],
    "at the end": [["publish", 0, "before"], ["publish", 0, "after"]],
}


def test_a_kill_at_any_step_loses_nothing_doubles_nothing_and_changes_no_byte(engine, undisturbed, tmp_path):
    prompts, expected = undisturbed
    died = killed(engine, prompts, tmp_path, STEPS)
    assert died == {name: len(deaths) for name, deaths in STEPS.items()}, "a planted kill did not happen"
    for name in STEPS:
        assert contents_of(tmp_path / name) == expected, name


def random_deaths(seed, num_runs, num_deaths, longest_s=0.5):
    rng = random.Random(seed)
    return {f"run {n}": [rng.uniform(0.02, longest_s) for _ in range(num_deaths)] for n in range(num_runs)}


def check_random_kills(engine, undisturbed, tmp_path, scenarios, timeout_s=120):
    prompts, expected = undisturbed
    died = killed(engine, prompts, tmp_path, scenarios, timeout_s)
    for name in scenarios:
        assert contents_of(tmp_path / name) == expected, (name, scenarios[name])
    assert sum(died.values()) >= len(scenarios), f"hardly any run was killed in time: {died}"


def test_kills_at_random_moments_change_nothing(engine, undisturbed, tmp_path):
    check_random_kills(engine, undisturbed, tmp_path, random_deaths(seed=1, num_runs=3, num_deaths=3))


@pytest.mark.slow
def test_four_hundred_kills_at_random_moments_change_nothing(engine, undisturbed, tmp_path):
    check_random_kills(engine, undisturbed, tmp_path, random_deaths(seed=2, num_runs=50, num_deaths=8), timeout_s=900)


@pytest.mark.parametrize("drift_from", [0, 1, 4, 9, 14])
def test_a_drift_stores_no_bad_row_and_loses_no_good_one(engine, undisturbed, tmp_path, drift_from):
    prompts, expected = undisturbed
    out = tmp_path / "out"
    report = run(engine, prompts, out, wrap=lambda session: Wrapped(session, drift_from=drift_from))
    assert type(report.stopped_by) is CanaryError and report.shortfall == 0
    stored = table_of(out).to_pylist()
    assert stored == expected[0][: len(stored)], "a row of the drifted engine was stored, or a good one was lost"
    assert len({row["window_end"] for row in stored}) >= drift_from // 4  # what a canary had proven before is there
    failed = ledger_of(out / "failed.jsonl")
    assert {line["code"] for line in failed} <= {"canary_error", "not_finite"} and report.failed["canary_error"] > 0
    assert all("a canary is off" in line["reason"] for line in failed if line["code"] == "canary_error")
    run(engine, prompts, out, resume=True)
    assert contents_of(out) == expected


def test_resuming_what_is_whole_computes_nothing_and_rebuilds_the_refusals(engine, undisturbed, tmp_path):
    prompts, expected = undisturbed
    out = tmp_path / "out"
    run(engine, prompts, out)
    (out / "refused.jsonl").unlink()
    report = run(engine, prompts, out, resume=True, wrap=lambda session: Wrapped(session, failing_batch=0))
    assert (report.read, report.stored, report.already_stored, report.num_tokens) == (50, 0, 46, 0)
    assert report.refused.total() == 3 and report.failed == {"not_finite": 1} and report.shortfall == 0
    assert contents_of(out) == expected


def test_resume_begins_where_there_is_nothing(engine, undisturbed, tmp_path):
    prompts, expected = undisturbed
    assert run(engine, prompts, tmp_path / "out", resume=True).stored == 46
    assert contents_of(tmp_path / "out") == expected


def test_without_resume_a_dataset_is_not_touched(engine, undisturbed, tmp_path):
    prompts, expected = undisturbed
    run(engine, prompts, tmp_path / "out", limit=20)
    before = contents_of(tmp_path / "out")
    with pytest.raises(ForeignDataset, match="already holds a dataset"):
        run(engine, prompts, tmp_path / "out")
    assert contents_of(tmp_path / "out") == before


def test_a_larger_limit_goes_on_and_a_smaller_one_reads_less(engine, undisturbed, tmp_path):
    prompts, expected = undisturbed
    out = tmp_path / "out"
    run(engine, prompts, out, limit=21)
    report = run(engine, prompts, out, limit=10, resume=True)
    assert (report.read, report.stored, report.already_stored, report.shortfall) == (10, 0, 9, 0)
    report = run(engine, prompts, out, resume=True)
    assert (report.read, report.already_stored, report.shortfall) == (50, 19, 0)
    assert [row["request_id"] for row in table_of(out).to_pylist()] == [row["request_id"] for row in expected[0]]


def test_a_smaller_limit_keeps_the_longer_list_of_refusals(engine, undisturbed, tmp_path):
    prompts, _ = undisturbed
    run(engine, prompts, tmp_path / "out")
    before = ledger_of(tmp_path / "out" / "refused.jsonl")
    run(engine, prompts, tmp_path / "out", limit=10, resume=True)
    assert ledger_of(tmp_path / "out" / "refused.jsonl") == before and len(before) > 1


def test_an_input_that_has_grown_goes_on(engine, undisturbed, tmp_path):
    prompts, _ = undisturbed
    grown = tmp_path / "prompts.jsonl"
    grown.write_text("".join(prompts.read_text().splitlines(keepends=True)[:30]))
    run(engine, grown, tmp_path / "out")
    shutil.copy(prompts, grown)
    report = run(engine, grown, tmp_path / "out", resume=True)
    assert report.read == 50 and report.shortfall == 0
    assert table_of(tmp_path / "out")["row"].to_pylist() == SERVED


def other_tokens(lines):
    lines[5] = json.dumps({**json.loads(lines[5]), "ids": [1, 2]})


def other_id(lines):
    lines[5] = json.dumps({**json.loads(lines[5]), "id": "somebody"})


def good_where_one_was_refused(lines):
    lines[7] = json.dumps({"id": "r7", "ids": [4]})


def refused_where_one_was_good(lines):
    lines[5] = "not json"


def other_tokens_where_one_failed(lines):
    lines[NAN_ROW] = json.dumps({"id": f"r{NAN_ROW}", "ids": [4]})


OTHER_INPUTS = {
    other_tokens: "row 5 of the input is not the row",
    other_id: "row 5 of the input is not the row",
    good_where_one_was_refused: "row 7 of the input is not the row",
    refused_where_one_was_good: "row 5 of the input is not the row",
    other_tokens_where_one_failed: f"row {NAN_ROW} of the input is not the row",
    lambda lines: lines.pop(3): "row 3 of the input is not the row",
    lambda lines: lines.insert(3, json.dumps({"id": "new", "ids": [4]})): "row 3 of the input is not the row",
    lambda lines: lines.__delitem__(slice(30, None)): "the input is shorter",
}


@pytest.mark.parametrize("change", OTHER_INPUTS)
def test_another_input_is_detected_before_anything_is_computed(engine, undisturbed, tmp_path, change):
    prompts, expected = undisturbed
    out = tmp_path / "out"
    run(engine, prompts, out)
    lines = prompts.read_text().splitlines()
    change(lines)
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(ForeignDataset, match=OTHER_INPUTS[change]):
        run(engine, tmp_path / "prompts.jsonl", out, resume=True, wrap=lambda session: Wrapped(session, failing_batch=0))
    assert contents_of(out) == expected


def test_a_lost_ledger_of_failures_is_missed(engine, undisturbed, tmp_path):
    prompts, _ = undisturbed
    run(engine, prompts, tmp_path / "out")
    (tmp_path / "out" / "failed.jsonl").unlink()
    with pytest.raises(ForeignDataset, match=f"row {NAN_ROW} of the input") as caught:
        run(engine, prompts, tmp_path / "out", resume=True)
    assert "failed.jsonl" in caught.value.fix


def other_engine(tmp_path):
    return write_engine(tmp_path / "engine", Toy(taps=(LAST, MEAN), limits=LIMITS, later_share=0.0), model_name="other")


def test_another_engine_s_dataset_is_refused(engine, undisturbed, tmp_path):
    prompts, _ = undisturbed
    run(engine, prompts, tmp_path / "out", limit=10)
    with pytest.raises(ForeignDataset, match="another engine") as caught:
        run(other_engine(tmp_path), prompts, tmp_path / "out", resume=True)
    assert "origin.engine_fingerprint" in caught.value.found


@pytest.mark.parametrize(
    "name, options",
    [
        ("job.windows.max_rows", {"windows": replace(WINDOWS, max_rows=9)}),
        ("job.windows.max_tokens", {"windows": WindowLimits(8, 61)}),
        ("job.policy.max_length", {"max_length": 12}),
        ("job.policy.too_long", {"too_long": "truncate-left"}),
    ],
)
def test_other_windows_or_another_policy_are_refused(engine, undisturbed, tmp_path, name, options):
    prompts, _ = undisturbed
    run(engine, prompts, tmp_path / "out", limit=10)
    with pytest.raises(ForeignDataset) as caught:
        run(engine, prompts, tmp_path / "out", resume=True, **options)
    assert name in caught.value.found


def test_stored_rows_are_right_after_a_resume(engine, undisturbed, tmp_path):
    prompts, _ = undisturbed
    out = tmp_path / "out"
    run(engine, prompts, out, wrap=lambda session: Wrapped(session, drift_from=9))
    run(engine, prompts, out, resume=True)
    lines = prompts.read_text().splitlines()
    for row in table_of(out).to_pylist():
        right = reference(json.loads(lines[row["row"]])["ids"], LAST)[0]
        assert abs(right - row["final_post_last"]).max() < 1e-5
