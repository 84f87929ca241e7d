"""Runs that keep every token's states: the right rows under the right request, and the same files after any death."""

import json
import random
import shutil
import threading

import numpy as np
import pytest
from killed_runs import killed
from toy_engines import ALL, LAST, NAN_TOKEN, Toy, reference, write_engine
from toy_jobs import BAD_ROWS, LIMITS, NAN_ROW, contents_of, ledger_of, rows_of_states, run, write_input
from wrapped_sessions import Wrapped

from tensorrt_llm_ext.errors import CanaryError, DiskFull, ForeignDataset, InputError, NoRoom, StoreError
from tensorrt_llm_ext.inputs import Fields, Sharding
from tensorrt_llm_ext.job import report as report_module
from tensorrt_llm_ext.store import states

SERVED = [row for row in range(50) if row not in BAD_ROWS and row != NAN_ROW]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return write_engine(tmp_path_factory.mktemp("engine"), Toy(taps=(ALL,), limits=LIMITS))


@pytest.fixture(scope="module")
def undisturbed(engine, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    prompts = write_input(folder / "prompts.jsonl")
    report = run(engine, prompts, folder / "out")
    assert (report.read, report.stored, report.failed.total(), report.shortfall) == (50, 46, 1, 0)
    return prompts, contents_of(folder / "out")


def check_rows(prompts, out, rows):
    lines = prompts.read_text().splitlines()
    found = rows_of_states(out)
    assert sorted(found) == list(rows)
    for row, (entry, token_ids, states_of_row) in found.items():
        asked = json.loads(lines[row])
        assert entry["request_id"] == asked["id"] and token_ids.tolist() == asked["ids"]
        assert np.abs(states_of_row - reference(asked["ids"], ALL)).max() < 1e-5, row


def test_every_token_s_rows_are_there_and_right(undisturbed, engine, tmp_path):
    prompts, expected = undisturbed
    run(engine, prompts, tmp_path / "out")
    check_rows(prompts, tmp_path / "out", SERVED)
    assert contents_of(tmp_path / "out") == expected
    names = [str(path) for path, _ in expected[0]]
    assert sum(name.endswith(".safetensors") for name in names) > 4 and "states/manifest.json" in names


STEPS = {
    "while the dataset is made": [["write json", 0, "before"], ["write json", 0, "after"]],
    "within a window": [["append states", 0, "before"], ["append states", 12, "after"]],
    "at a commit": [["commit states", 1, "before"], ["commit states", 2, "after"]],
    "around a shard": [["write shard", 0, "before"], ["write shard", 1, "after"]],
    "between a shard and its index": [["write index", 0, "before"], ["write index", 2, "before"]],
    "within a group": [["publish index", 1, "after"], ["publish index", 0, "before"], ["publish index", 0, "after"]],
    "at the end": [["publish", 0, "before"], ["publish", 0, "after"], ["write json", 0, "after"]],
}


def test_a_kill_at_any_step_loses_nothing_doubles_nothing_and_changes_no_byte(engine, undisturbed, tmp_path):
    prompts, expected = undisturbed
    died = killed(engine, prompts, tmp_path, STEPS)
    assert died == {name: len(deaths) for name, deaths in STEPS.items()}, "a planted kill did not happen"
    for name in STEPS:
        assert contents_of(tmp_path / name) == expected, name


def check_random_kills(engine, undisturbed, tmp_path, *, seed, num_runs, num_deaths, timeout_s=200):
    prompts, expected = undisturbed
    rng = random.Random(seed)
    scenarios = {f"run {n}": [rng.uniform(0.02, 0.25) for _ in range(num_deaths)] for n in range(num_runs)}
    died = killed(engine, prompts, tmp_path, scenarios, timeout_s)
    for name in scenarios:
        assert contents_of(tmp_path / name) == expected, (name, scenarios[name])
        shutil.rmtree(tmp_path / name)
    assert died == {name: num_deaths for name in scenarios}, "not every kill came in time"


def test_twenty_kills_at_random_moments_change_nothing(engine, undisturbed, tmp_path):
    check_random_kills(engine, undisturbed, tmp_path, seed=1, num_runs=5, num_deaths=4)


@pytest.mark.slow
def test_a_thousand_kills_at_random_moments_change_nothing(engine, undisturbed, tmp_path):
    check_random_kills(engine, undisturbed, tmp_path, seed=2, num_runs=200, num_deaths=5, timeout_s=3000)


@pytest.mark.parametrize("drift_from", [0, 4, 14])
def test_a_drift_stores_no_bad_row_and_loses_no_good_one(engine, undisturbed, tmp_path, drift_from):
    prompts, expected = undisturbed
    out = tmp_path / "out"
    report = run(engine, prompts, out, wrap=lambda session: Wrapped(session, drift_from=drift_from))
    assert type(report.stopped_by) is CanaryError and report.shortfall == 0 and report.failed["canary_error"] > 0
    stored = sorted(rows_of_states(out))
    assert stored == SERVED[: len(stored)] and len(stored) >= drift_from
    check_rows(prompts, out, stored)
    assert not (out / "states" / "manifest.json").exists()
    run(engine, prompts, out, resume=True)
    assert contents_of(out) == expected


@pytest.mark.parametrize("fault", ["other request", "missing answer", "answer twice", "changed bit"])
def test_an_answer_that_is_not_its_request_s_is_never_stored(engine, undisturbed, tmp_path, fault):
    prompts, expected = undisturbed
    out = tmp_path / "out"
    report = run(engine, prompts, out, wrap=lambda session: Wrapped(session, fault=fault, from_batch=8))
    assert report.stopped_by is not None and report.shortfall == 0
    check_rows(prompts, out, sorted(rows_of_states(out)))
    run(engine, prompts, out, resume=True)
    assert contents_of(out) == expected


def test_a_stop_keeps_what_a_canary_has_proven(engine, undisturbed, tmp_path):
    prompts, expected = undisturbed
    stop, seen = threading.Event(), []

    def progress(step):
        seen.append(step)
        if len(seen) == 9:
            stop.set()

    report = run(engine, prompts, tmp_path / "out", stop=stop, progress=progress)
    assert report.is_interrupted and report.shortfall == 0 and 0 < report.stored == len(rows_of_states(tmp_path / "out"))
    run(engine, prompts, tmp_path / "out", resume=True)
    assert contents_of(tmp_path / "out") == expected


def test_a_loss_mask_that_changed_is_noticed_when_its_run_goes_on(engine, tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    rows = [{"id": f"r{row}", "ids": [row, row + 1, row + 2], "mask": [0, 1, 1]} for row in range(40)]
    options = {"fields": Fields(ids="ids", request_id="id", loss_mask="mask"), "loss_mask": "field"}

    def write():
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))

    write()
    run(engine, prompts, out, limit=20, **options)
    rows[13]["mask"] = [0, 0, 1]
    write()
    with pytest.raises(ForeignDataset, match="row 13 of the input is not the row") as caught:
        run(engine, prompts, out, resume=True, **options)
    assert caught.value.expected.endswith("from its token 1 on, loss mask 11")
    assert caught.value.found.endswith("from its token 1 on, loss mask 01")
    rows[13]["mask"] = [0, 1, 1]
    rows[25]["mask"] = [1, 0, 1]  # not settled yet
    write()
    assert run(engine, prompts, out, resume=True, **options).already_stored == 20
    check_rows(prompts, out, range(40))


@pytest.mark.parametrize("was", ["another", "none"])
def test_a_changed_loss_mask_of_a_row_that_failed_is_noticed_too(engine, tmp_path, was):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    rows = [{"id": f"r{row}", "ids": [row, NAN_TOKEN if row == 3 else 1], "mask": [0, 1]} for row in range(20)]
    options = {"fields": Fields(ids="ids", request_id="id", loss_mask="mask"), "loss_mask": "field"}
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run(engine, prompts, out, **options).failed == {"not_finite": 1}
    report = run(engine, prompts, out, resume=True, **options)
    assert (report.already_stored, report.failed) == (19, {"not_finite": 1})
    if was == "another":
        rows[3]["mask"] = [0, 0]
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        (line,) = ledger_of(out / "failed.jsonl")
        del line["loss_mask"]
        (out / "failed.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(ForeignDataset, match="row 3 of the input is not the row") as caught:
        run(engine, prompts, out, resume=True, **options)
    expected, found = {"another": ("from its token 1 on, loss mask 1", "loss mask 0"), "none": ("loss mask none", "loss mask 01")}[was]
    assert caught.value.expected.endswith(expected) and caught.value.found.endswith(found)


@pytest.mark.parametrize("step, number", [("write_shard", 0), ("write_shard", 2), ("write_part", 1), ("publish_part", 1)])
def test_a_full_disk_stops_the_run_and_counts_what_was_not_published(
    engine, undisturbed, tmp_path, monkeypatch, step, number
):
    prompts, expected = undisturbed
    original, calls = getattr(states, step), iter(range(100))

    def full(*args, **kwargs):
        if next(calls) >= number:
            raise OSError(28, "No space left on device")
        return original(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(states, step, full)
        report = run(engine, prompts, tmp_path / "out")
    assert type(report.stopped_by) is DiskFull and report.shortfall == 0
    assert report.stored == len(rows_of_states(tmp_path / "out"))
    lines = ledger_of(tmp_path / "out" / "failed.jsonl")
    assert len({line["row"] for line in lines}) == len(lines) == report.failed.total()
    run(engine, prompts, tmp_path / "out", resume=True)
    assert contents_of(tmp_path / "out") == expected


class _Disk:
    def __init__(self, free):
        self.free = free


def test_a_dataset_that_will_not_fit_is_refused_before_a_batch_is_computed(engine, undisturbed, tmp_path, monkeypatch):
    prompts, _ = undisturbed
    monkeypatch.setattr(report_module.shutil, "disk_usage", lambda path: _Disk(free=20_000))
    submitted = []
    with pytest.raises(NoRoom, match="will not fit") as caught:
        run(engine, prompts, tmp_path / "out", wrap=lambda session: Wrapped(session, events=submitted))
    assert submitted == [] and "--force" in caught.value.fix and "GB free" in caught.value.expected
    assert not list((tmp_path / "out" / "states").glob("shard-*"))
    assert run(engine, prompts, tmp_path / "out", resume=True, force=True).shortfall == 0


def test_progress_says_how_large_the_dataset_will_be(engine, undisturbed, tmp_path):
    prompts, expected = undisturbed
    seen = []
    run(engine, prompts, tmp_path / "out", progress=seen.append)
    num_bytes = sum(len(content) for path, content in expected[0] if path.suffix == ".safetensors")
    assert 0.5 < seen[0].expected_bytes / num_bytes < 2 and 0.9 < seen[-1].expected_bytes / num_bytes < 1.5


def test_the_parts_of_a_run_are_together_the_whole(engine, undisturbed, tmp_path):
    prompts, expected = undisturbed
    reports, rows = [], []
    for index in range(3):
        out = tmp_path / str(index)
        reports.append(run(engine, prompts, out, sharding=Sharding(index, 3)))
        assert reports[-1].shortfall == 0 and reports[-1].read < 50
        check_rows(prompts, out, sorted(rows_of_states(out)))
        rows += rows_of_states(out)
    assert sorted(rows) == SERVED
    assert sum(report.read for report in reports) == 50 and sum(report.refused.total() for report in reports) == 3


def test_a_part_of_a_run_resumes_to_the_same_bytes(engine, undisturbed, tmp_path):
    prompts, _ = undisturbed
    sharding = Sharding(1, 2)
    run(engine, prompts, tmp_path / "whole", sharding=sharding)
    out = tmp_path / "out"
    for wrap in (lambda session: Wrapped(session, drift_from=3), lambda session: Wrapped(session, failing_batch=2)):
        report = run(engine, prompts, out, sharding=sharding, resume=True, wrap=wrap)
        assert report.stopped_by is not None and report.shortfall == 0
    report = run(engine, prompts, out, sharding=sharding, resume=True, limit=20)
    assert report.shortfall == 0
    report = run(engine, prompts, out, sharding=sharding, resume=True)
    assert report.shortfall == 0 and report.already_stored > 0
    assert {row: values[1].tolist() for row, values in rows_of_states(out).items()} == {
        row: values[1].tolist() for row, values in rows_of_states(tmp_path / "whole").items()
    }


def test_some_of_an_engine_s_taps_are_stored(undisturbed, tmp_path):
    prompts, expected = undisturbed
    engine = write_engine(tmp_path / "engine", Toy(taps=(LAST, ALL), limits=LIMITS))
    options = {"loss_mask": "ones"}
    assert run(engine, prompts, tmp_path / "states", taps=(ALL,), **options).stored == 46
    check_rows(prompts, tmp_path / "states", SERVED)
    assert run(engine, prompts, tmp_path / "vectors", taps=(LAST,)).stored == 46


def test_a_policy_without_a_loss_mask_is_refused(engine, undisturbed, tmp_path):
    with pytest.raises(InputError, match="needs a loss mask"):
        run(engine, undisturbed[0], tmp_path / "out", loss_mask=None)


def test_a_policy_with_a_loss_mask_is_refused_for_vectors(undisturbed, tmp_path):
    engine = write_engine(tmp_path / "engine", Toy(taps=(LAST,), limits=LIMITS))
    with pytest.raises(InputError, match="no meaning for taps of one row a request"):
        run(engine, undisturbed[0], tmp_path / "out", loss_mask="ones")


@pytest.mark.parametrize("word, found", [(b'"U8"', "no 'X8'"), (b'"loss_mask"', "no 'loss_mask'")])
def test_a_shard_whose_header_is_damaged_is_said_when_its_run_goes_on(engine, undisturbed, tmp_path, word, found):
    prompts, out = undisturbed[0], tmp_path / "out"
    run(engine, prompts, out, limit=30)
    shard = min((out / "states").glob("shard-*"))
    shard.write_bytes(shard.read_bytes().replace(word, word.replace(b"U", b"X").replace(b"loss", b"lost")))
    error = run(engine, prompts, out, resume=True).stopped_by
    assert isinstance(error, StoreError) and error.what.endswith("is damaged") and error.found == found
