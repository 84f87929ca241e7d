"""A run accounts for every row: stored as the engine gave it, refused or failed with its reason."""

import gc
import json
import sys
import threading
from collections import deque
from dataclasses import replace
from datetime import datetime
from itertools import islice

import lance
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toy_engines import LAST, MEAN, VOCAB_SIZE, Toy, reference, toy_contract, write_engine
from toy_jobs import BAD_ROWS, FIELDS, NAN_ROW, WINDOWS, contents_of, ledger_of, make_job, run, table_of
from wrapped_sessions import Wrapped

from fakes import byte_tokenizer, letter_tokenizer
from tensorrt_llm_ext.errors import BackendError, ContractError, DiskFull, ForeignDataset, InputError, LineageError, TapError
from tensorrt_llm_ext.fingerprint import token_hash
from tensorrt_llm_ext.inputs import Fields, lines as line_reader
from tensorrt_llm_ext.job import INTERRUPTED, WindowLimits, job as job_module, run_job
from tensorrt_llm_ext.job.ledgers import RefusedLedger
from tensorrt_llm_ext.runtime import Session
from tensorrt_llm_ext.store import open_vectors, vectors
from tensorrt_llm_ext.taps import Tap

SERVED = [row for row in range(50) if row not in BAD_ROWS and row != NAN_ROW]


def test_every_row_is_stored_refused_or_failed(engine, prompts, tmp_path):
    report = run(engine, prompts, tmp_path / "out")
    told = report.to_dict()
    assert {name: told[name] for name in ("read", "stored", "already_stored", "refused", "failed", "shortfall")} == {
        "read": 50,
        "stored": 46,
        "already_stored": 0,
        "refused": 3,
        "failed": 1,
        "shortfall": 0,
    }
    assert told["refused_by_code"] == {"missing_field": 1, "not_json": 1, "outside_vocabulary": 1}
    assert told["failed_by_code"] == {"not_finite": 1}
    assert told["stopped_by"] is None and not told["interrupted"]
    assert told["dataset"] == str(tmp_path / "out" / "vectors.lance") and told["dataset_bytes"] > 0
    assert told["tokens"] == report.num_tokens > 0 < told["tokens_per_s"]


def test_the_dataset_holds_the_right_rows_in_the_order_of_the_input(engine, prompts, tmp_path):
    run(engine, prompts, tmp_path / "out")
    table = table_of(tmp_path / "out")
    assert table["row"].to_pylist() == SERVED
    lines = prompts.read_text().splitlines()
    for stored in table.to_pylist():
        prompt = json.loads(lines[stored["row"]])
        assert stored["request_id"] == prompt["id"] and stored["work_item_id"] == f"prompts.jsonl#{stored['row']}"
        assert stored["token_hash"] == token_hash(np.array(prompt["ids"])) and stored["num_tokens"] == len(prompt["ids"])
        for tap, column in ((LAST, "final_post_last"), (MEAN, "final_post_mean")):
            right = reference(prompt["ids"], tap)[0]
            assert np.abs(np.array(stored[column]) - right).max() < 1e-5, stored["request_id"]
    records = list(open_vectors(tmp_path / "out").records())  # hashes checked
    assert len(records) == len(SERVED)


def test_the_ledgers_say_why_each_other_row_is_missing(engine, prompts, tmp_path):
    run(engine, prompts, tmp_path / "out")
    refused = ledger_of(tmp_path / "out" / "refused.jsonl")
    assert [(line["row"], line["line"], line["code"]) for line in refused] == [
        (7, 8, "not_json"),
        (19, 20, "missing_field"),
        (33, 34, "outside_vocabulary"),
    ]
    (failed,) = ledger_of(tmp_path / "out" / "failed.jsonl")
    assert (failed["row"], failed["request_id"], failed["code"]) == (NAN_ROW, f"r{NAN_ROW}", "not_finite")


def test_a_row_that_turns_nan_leaves_every_other_row_bit_unchanged(engine, prompts, tmp_path):
    run(engine, prompts, tmp_path / "with")
    lines = prompts.read_text().splitlines()
    healthy = json.loads(lines[NAN_ROW])
    healthy["ids"][-1] = 5
    prompts.write_text("\n".join([*lines[:NAN_ROW], json.dumps(healthy), *lines[NAN_ROW + 1 :]]) + "\n")
    run(engine, prompts, tmp_path / "without")
    both = [row for row in table_of(tmp_path / "without").to_pylist() if row["row"] != NAN_ROW]
    assert both == table_of(tmp_path / "with").to_pylist()


def test_the_same_run_twice_gives_the_same_bytes(engine, prompts, tmp_path):
    run(engine, prompts, tmp_path / "one")
    run(engine, prompts, tmp_path / "two")
    assert contents_of(tmp_path / "one") == contents_of(tmp_path / "two")


def test_batches_overlap_and_every_commit_follows_a_canary_behind_its_last_batch(engine, prompts, tmp_path, monkeypatch):
    events = []
    commit = vectors.VectorStore.commit
    monkeypatch.setattr(
        vectors.VectorStore, "commit", lambda store, end: (events.append(("commit", end)), commit(store, end))[1]
    )

    def wrap(session):
        return Wrapped(session, events=events)

    run(engine, prompts, tmp_path / "out", wrap=wrap)
    in_flight, most, landed, proven, ends = deque(), 0, set(), set(), []
    for kind, value in events:
        if kind in ("submit", "canaries"):
            in_flight.append((kind, value))
            most = max(most, len(in_flight))
        elif kind == "landed":
            submitted, ids = in_flight.popleft()
            assert ids == value
            landed |= set(ids) if submitted == "submit" else set()
            proven |= landed if submitted == "canaries" else set()
        else:
            ends.append(value)
            assert {f"r{row}" for row in SERVED if row < value} <= proven
    assert most == 2 and ends == sorted(set(ends)) and len(ends) > 5
    assert sum(kind == "submit" for kind, _ in events) > 2 * len(ends)  # windows of several batches


def test_the_limit_reads_no_more_rows(engine, prompts, tmp_path):
    report = run(engine, prompts, tmp_path / "out", limit=20)
    assert (report.read, report.stored, report.refused.total(), report.shortfall) == (20, 18, 2, 0)


def test_an_input_without_a_good_row_makes_an_empty_dataset(engine, tmp_path):
    (tmp_path / "prompts.jsonl").write_text("\n\n")
    report = run(engine, tmp_path / "prompts.jsonl", tmp_path / "out")
    assert (report.read, report.stored, report.refused) == (2, 0, {"empty_row": 2})
    assert table_of(tmp_path / "out").num_rows == 0 and len(open_vectors(tmp_path / "out")) == 0


def test_progress_grows_to_the_end_with_estimates_of_time_and_disk(engine, prompts, tmp_path):
    seen = []
    report = run(engine, prompts, tmp_path / "out", progress=seen.append)
    assert [step.fraction for step in seen] == sorted(step.fraction for step in seen)
    assert [step.num_rows for step in seen] == sorted(step.num_rows for step in seen) and seen[0].num_rows < 9
    assert 0 < seen[0].fraction < 0.5 and seen[-1].fraction == pytest.approx(1.0)
    assert seen[-1].num_tokens == report.num_tokens and seen[-1].num_rows == 50
    assert seen[-1].seconds_left == pytest.approx(0.0, abs=1e-6) and seen[0].seconds_left > 0
    assert 0.3 < seen[-1].expected_bytes / report.dataset_bytes < 3 and seen[0].free_bytes > 0


def test_a_run_takes_short_turns_and_leaves_the_interpreter_as_it_was(engine, prompts, tmp_path):
    def state():
        return sys.getswitchinterval(), gc.get_freeze_count()

    before, seen = state(), []
    run(engine, prompts, tmp_path / "out", progress=lambda step: seen.append(state()))
    assert seen and all(turn < 1e-3 < before[0] and num_frozen > 0 for turn, num_frozen in seen)
    with pytest.raises(ForeignDataset):  # it is there: the run begins, and ends by an error
        run(engine, prompts, tmp_path / "out")
    assert state() == before


def test_progress_follows_the_limit(engine, prompts, tmp_path):
    seen = []
    run(engine, prompts, tmp_path / "out", progress=seen.append, limit=16)
    assert seen[-1].fraction == pytest.approx(1.0)


TEXT = Fields()


@pytest.fixture(scope="module")
def text_engine(tmp_path_factory):
    fingerprints = replace(toy_contract(Toy()).fingerprints, tokenizer=letter_tokenizer().fingerprint())
    return write_engine(tmp_path_factory.mktemp("text_engine"), Toy(), fingerprints=fingerprints)


def run_text(engine, prompts, out, fields, tokenizer=None, **options):
    tokenizer = tokenizer or letter_tokenizer()
    with Session.open(engine) as opened:
        job = make_job(opened, prompts, out, fields, tokenizer, **options)
    with Session.open(engine, tokenisation=job.policy.tokenisation()) as session:
        return run_job(job, session, tokenizer)


def test_text_is_tokenised_and_its_policy_is_written_down(text_engine, tmp_path):
    (tmp_path / "prompts.txt").write_text("hello world\nno\n")
    report = run_text(text_engine, tmp_path / "prompts.txt", tmp_path / "out", TEXT)
    assert report.stored == 2 and report.shortfall == 0
    opened = open_vectors(tmp_path / "out")
    assert opened.header.origin.special_tokens == "tokenizer" and opened.header.job["policy"]["max_length"] == 40
    (ids,) = letter_tokenizer().encode_batch(["no"], True)
    assert [record.token_hash for record in opened.records()][1] == token_hash(ids)


def test_a_template_s_date_is_that_of_the_first_run(text_engine, tmp_path, monkeypatch):
    class Tomorrow(datetime):
        @classmethod
        def now(cls):
            return datetime(2031, 2, 3)

    tokenizer = letter_tokenizer()
    tokenizer._template = "{{ strftime_now('%Y-%m-%d') }} {{ messages[0].content }}"
    fields = Fields(messages="chat")
    rows = [json.dumps({"chat": [{"role": "user", "content": f"n{row}"}]}) for row in range(20)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows))
    first = run_text(text_engine, tmp_path / "prompts.jsonl", tmp_path / "out", fields, tokenizer, limit=12)
    assert first.stored == 12
    monkeypatch.setattr("tensorrt_llm_ext.inputs.policy.datetime", Tomorrow)
    report = run_text(text_engine, tmp_path / "prompts.jsonl", tmp_path / "out", fields, tokenizer, resume=True)
    assert (report.already_stored, report.stored) == (12, 8)
    assert open_vectors(tmp_path / "out").header.job["policy"]["template_date"] != "2031-02-03"


def test_a_session_of_another_tokenisation_is_refused(engine, prompts, tmp_path):
    with Session.open(engine) as session:
        job = make_job(session, prompts, tmp_path / "out")
        job = replace(job, policy=replace(job.policy, special_tokens="none"))
        with pytest.raises(InputError, match="opened for another tokenisation"):
            run_job(job, session, byte_tokenizer())


def test_another_tokenizer_than_the_engine_s_is_refused(text_engine, tmp_path):
    (tmp_path / "prompts.txt").write_text("hello\n")
    with pytest.raises(ContractError, match="not the one that the engine was built with"):
        run_text(text_engine, tmp_path / "prompts.txt", tmp_path / "out", TEXT, byte_tokenizer())
    assert not (tmp_path / "out").exists()


def stopped_report(engine, prompts, out, error, wrap=lambda session: session, **options):
    """Run into an error; claim what holds of every run that an error stops."""
    report = run(engine, prompts, out, wrap=wrap, **options)
    assert type(report.stopped_by) is error and report.shortfall == 0
    code = {BackendError: "backend_error", DiskFull: "disk_full", LineageError: "lineage_error", InputError: None}[error]
    stored = table_of(out)["row"].to_pylist()
    assert report.stored == len(stored) and stored == SERVED[: len(stored)]
    if code:
        assert report.failed[code] > 0
        assert {line["row"] for line in ledger_of(out / "failed.jsonl") if line["code"] == code}.isdisjoint(stored)
    assert len(ledger_of(report.refused_path)) == report.refused.total()
    return report


def resumed_equals_undisturbed(engine, prompts, tmp_path):
    run(engine, prompts, tmp_path / "undisturbed")
    report = run(engine, prompts, tmp_path / "out", resume=True)
    assert report.shortfall == 0 and report.stored + report.already_stored == len(SERVED)
    assert contents_of(tmp_path / "out") == contents_of(tmp_path / "undisturbed")


@pytest.mark.parametrize("batch", [0, 1, 7, 16])
def test_a_batch_that_fails_stops_the_run_and_loses_nothing_that_was_committed(engine, prompts, tmp_path, batch):
    stopped_report(engine, prompts, tmp_path / "out", BackendError, lambda session: Wrapped(session, failing_batch=batch))
    resumed_equals_undisturbed(engine, prompts, tmp_path)


@pytest.mark.parametrize("step", ["write_fragments", "commit"])
@pytest.mark.parametrize("number", [0, 3])
def test_a_full_disk_stops_the_run_with_the_last_commit_whole(engine, prompts, tmp_path, monkeypatch, step, number):
    place = {"write_fragments": vectors, "commit": lance.LanceDataset}[step]
    original, calls = getattr(place, step), iter(range(100))

    def full(*args, **kwargs):
        if next(calls) >= number:
            raise OSError("LanceError(IO): No space left on device (os error 28)")
        return original(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(place, step, full)
        report = stopped_report(engine, prompts, tmp_path / "out", DiskFull)
    assert len(set(table_of(tmp_path / "out")["window_end"].to_pylist())) == number and "--resume" in report.stopped_by.fix
    resumed_equals_undisturbed(engine, prompts, tmp_path)


def test_a_disk_that_takes_no_ledger_is_told_and_the_next_run_writes_it(engine, prompts, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:

        def full(self):
            raise DiskFull("no space", expected="room", found="none", fix="free some")

        patched.setattr(RefusedLedger, "publish", full)
        report = run(engine, prompts, tmp_path / "out")
    assert type(report.stopped_by) is DiskFull and report.shortfall == 0
    assert report.refused_path is None and report.to_dict()["refused_file"] is None
    assert not (tmp_path / "out" / "refused.jsonl").exists()
    resumed_equals_undisturbed(engine, prompts, tmp_path)
    assert run(engine, prompts, tmp_path / "out", resume=True).refused_path == tmp_path / "out" / "refused.jsonl"


@pytest.mark.parametrize("fault", ["other request", "missing answer", "answer twice", "changed bit"])
def test_an_answer_that_is_not_its_request_s_is_never_stored(engine, prompts, tmp_path, fault):
    wrap = lambda session: Wrapped(session, fault=fault, from_batch=8)  # noqa: E731
    stopped_report(engine, prompts, tmp_path / "out", LineageError, wrap)
    resumed_equals_undisturbed(engine, prompts, tmp_path)


def test_an_input_that_breaks_off_keeps_every_window_before(engine, prompts, tmp_path, monkeypatch):
    def broken(file):
        yield from islice(original(file), 30)
        raise InputError("it breaks off", expected="more", found="less", fix="copy it again")

    original = line_reader._lines
    with monkeypatch.context() as patched:
        patched.setattr(line_reader, "_lines", broken)
        monkeypatch.setattr(line_reader, "_GROUP_LINES", 4)
        report = stopped_report(engine, prompts, tmp_path / "out", InputError)
    assert report.stored > 8
    resumed_equals_undisturbed(engine, prompts, tmp_path)


@pytest.mark.parametrize("lost", [0, 12, 13, 49])
def test_a_row_that_disappears_inside_is_a_shortfall(engine, prompts, tmp_path, monkeypatch, lost):
    original = job_module.work_items

    def losing(*args, **options):
        return (row for row in original(*args, **options) if row.number != lost)

    monkeypatch.setattr(job_module, "work_items", losing)
    assert run(engine, prompts, tmp_path / "out").shortfall == 1


def test_a_stop_keeps_what_a_canary_has_proven_and_counts_the_rest(engine, prompts, tmp_path):
    stop = threading.Event()
    seen = []

    def progress(step):
        seen.append(step)
        if len(seen) == 6:
            stop.set()

    report = run(engine, prompts, tmp_path / "out", stop=stop, progress=progress)
    assert report.is_interrupted and report.shortfall == 0 and report.stopped_by is None
    assert 0 < report.read < 50 and report.stored > 0
    assert {line["code"] for line in ledger_of(tmp_path / "out" / "failed.jsonl")} <= {INTERRUPTED, "not_finite"}
    assert len(ledger_of(tmp_path / "out" / "failed.jsonl")) == report.failed.total()
    resumed_equals_undisturbed(engine, prompts, tmp_path)


def test_a_stop_before_the_first_batch_leaves_an_empty_dataset_to_resume(engine, prompts, tmp_path):
    stop = threading.Event()
    stop.set()
    report = run(engine, prompts, tmp_path / "out", stop=stop)
    assert (report.read, report.stored, report.shortfall) == (0, 0, 0)
    resumed_equals_undisturbed(engine, prompts, tmp_path)


def test_taps_that_do_not_belong_into_one_dataset_are_refused_before_the_folder_is_made(tmp_path, prompts):
    engine = write_engine(tmp_path / "engine", Toy(taps=(LAST, Tap(3, "post", "all"))))
    with pytest.raises(TapError, match="these taps give both"):
        run(engine, prompts, tmp_path / "out")
    with pytest.raises(TapError, match="does not have these taps"):
        run(engine, prompts, tmp_path / "out", taps=(Tap(2, "pre", "all"),))
    assert not (tmp_path / "out").exists()


ids = st.lists(st.integers(-1, VOCAB_SIZE), max_size=45)
good_lines = st.builds(lambda name, ids: json.dumps({"id": name, "ids": ids}), st.integers(0, 9) | st.text(max_size=3), ids)
lines = good_lines | st.text(max_size=10) | st.binary(max_size=10)


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    with Session.open(write_engine(tmp_path_factory.mktemp("engine"), Toy())) as session:
        yield session


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(lines, max_size=25), st.sampled_from([WINDOWS, WindowLimits(1, 1), WindowLimits(100, 1000)]))
def test_whatever_the_lines_hold_every_row_is_accounted_for(session, tmp_path_factory, lines, windows):
    folder = tmp_path_factory.mktemp("arbitrary")
    encoded = [line if isinstance(line, bytes) else line.encode("utf-8", "surrogatepass") for line in lines]
    content = b"".join(line + b"\n" for line in encoded)
    (folder / "prompts.jsonl").write_bytes(content)
    report = run_job(
        make_job(session, folder / "prompts.jsonl", folder / "out", FIELDS, windows=windows), session, byte_tokenizer()
    )
    assert report.shortfall == 0 and report.read == content.count(b"\n") and report.stopped_by is None
    rows = [*table_of(folder / "out")["row"].to_pylist()]
    for name in ("refused.jsonl", "failed.jsonl"):
        rows += [line["row"] for line in ledger_of(folder / "out" / name)]
    assert sorted(rows) == list(range(report.read))
