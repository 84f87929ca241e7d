"""``run`` on a real decoder: the vectors of transformers, every row accounted for, and exit codes that say what happened."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import datasets
import lance
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from tensorrt_llm_ext.builder import build_engine
from tensorrt_llm_ext.cli import main
from tensorrt_llm_ext.cli.run import _described, _duration, _size
from tensorrt_llm_ext.errors import DiskFull
from tensorrt_llm_ext.job import Progress
from tensorrt_llm_ext.store import open_vectors

TEXTS = ["one", "A second prompt, somewhat longer.", "é", "The last."]
NUM_ROWS = 800  # several windows of this engine's 16 x 128 tokens
TAPS = "final@last,layer:3@mean"


@pytest.fixture(scope="module")
def vector_engine(checkpoint_path, tmp_path_factory):
    engine = tmp_path_factory.mktemp("vectors") / "engine"
    build_engine(checkpoint_path, engine, taps=TAPS, max_seq_len=64, opt_num_tokens=128, max_num_tokens=128)
    return engine


@pytest.fixture
def mixed(tmp_path):
    """Four prompts, and four rows that cannot be served."""
    lines = [*(json.dumps({"id": f"t{n}", "text": text}) for n, text in enumerate(TEXTS))]
    lines[2:2] = ["not json", json.dumps({"id": "t0", "text": "one"}), json.dumps({"id": "x", "text": "x" * 100}), "{}"]
    (tmp_path / "mixed.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path / "mixed.jsonl"


def states_of(checkpoint_path, texts):
    """The states of transformers, in float32: after the final norm of the last token, and layer 3's mean."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint_path, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint_path)
    for text in texts:
        with torch.no_grad():
            states = model(**tokenizer(text, return_tensors="pt"), output_hidden_states=True).hidden_states
        yield states[-1][0, -1].numpy(), states[3][0].mean(dim=0).numpy()


def test_the_vectors_are_those_of_transformers(command, vector_engine, checkpoint_path, mixed, tmp_path):
    result = command("run", vector_engine, "--input", mixed, "--out", tmp_path / "out", "--id-field", "id", "--json")
    assert result.exit_code == 0, result.output
    table = lance.dataset(str(tmp_path / "out" / "vectors.lance")).to_table()
    assert table["request_id"].to_pylist() == ["t0", "t1", "t2", "t3"] and table["row"].to_pylist() == [0, 1, 6, 7]
    right = list(states_of(checkpoint_path, TEXTS))
    for place, column in enumerate(("final_post_last", "layer_003_pre_mean")):
        for text, found, states in zip(TEXTS, table[column].to_pylist(), right, strict=True):
            assert np.abs(np.array(found) - states[place]).max() < 1e-3, (text, column)
        assert np.abs(right[0][place] - right[1][place]).max() > 0.1  # another row would be seen


def test_the_json_report_accounts_for_every_row(command, vector_engine, mixed, tmp_path):
    result = command("run", vector_engine, "--input", mixed, "--out", tmp_path / "out", "--id-field", "id", "--json")
    report = json.loads(result.stdout)
    assert result.stderr == ""  # quiet without a terminal
    assert (report["read"], report["stored"], report["refused"], report["failed"], report["shortfall"]) == (8, 4, 4, 0, 0)
    assert report["refused_by_code"] == {"duplicate_id": 1, "missing_field": 1, "not_json": 1, "too_long": 1}
    assert report["dataset"] == str(tmp_path / "out" / "vectors.lance") and report["dataset_bytes"] > 0
    refused = [json.loads(line) for line in (tmp_path / "out" / "refused.jsonl").read_text().splitlines()]
    assert [(line["line"], line["code"]) for line in refused] == [
        (3, "not_json"),
        (4, "duplicate_id"),
        (5, "too_long"),
        (6, "missing_field"),
    ]


def test_the_summary_prints_the_equation_and_where_things_are(command, vector_engine, mixed, tmp_path):
    result = command("run", vector_engine, "--input", mixed, "--out", tmp_path / "out", "--id-field", "id")
    assert "stored + already stored + refused + failed = read: 4 + 0 + 4 + 0 = 8" in result.stdout
    assert str(tmp_path / "out" / "vectors.lance") in result.stdout and "1 duplicate_id" in result.stdout
    assert result.stderr == ""


def test_where_nothing_could_be_stored_the_first_refusal_is_told(command, vector_engine, mixed, tmp_path):
    result = command("run", vector_engine, "--input", mixed, "--out", tmp_path / "out", "--text-field", "txt")
    assert result.exit_code == 0 and "refused         8" in result.stdout
    assert result.stderr.startswith("Nothing was stored. The first refusal: line 1: the row has no field 'txt'\n")
    assert "did you mean 'text'?" in result.stderr


def test_refused_rows_fail_only_when_asked(command, vector_engine, mixed, tmp_path):
    words = ["run", vector_engine, "--input", mixed, "--out", tmp_path / "out", "--id-field", "id", "--resume"]
    assert command(*words).exit_code == 0
    assert command(*words, "--fail-on-refused").exit_code == 3
    good = tmp_path / "good.txt"
    good.write_text("one\n")
    words = ["run", vector_engine, "--input", good, "--out", tmp_path / "good", "--fail-on-refused"]
    assert command(*words).exit_code == 0


def test_every_kind_of_input_gives_the_same_vectors(command, vector_engine, checkpoint_path, tmp_path, monkeypatch):
    rows = [{"text": text} for text in TEXTS]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "a.txt").write_text("".join(text + "\n" for text in TEXTS))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "a")
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint_path)
    ids = [{"ids": tokenizer(text)["input_ids"]} for text in TEXTS]
    (tmp_path / "ids.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ids))
    found = {}
    for name, words in {
        "a.jsonl": [],
        "a.txt": [],
        "a.parquet": [],
        "a": [],
        "ids.jsonl": ["--ids-field", "ids"],
    }.items():
        out = tmp_path / f"{name}.out"
        result = command("run", vector_engine, "--input", tmp_path / name, "--out", out, *words)
        assert result.exit_code == 0, result.output
        found[name] = lance.dataset(str(out / "vectors.lance")).to_table().drop_columns(["work_item_id"]).to_pylist()
    assert len(found["a.jsonl"]) == 4 and all(rows == found["a.jsonl"] for rows in found.values())


def test_standard_input_messages_and_the_policy_options(vector_engine, tmp_path):
    def run(*words, content):
        words = ["run", vector_engine, "--input", "-", *words, "--json"]
        return CliRunner().invoke(main, [str(word) for word in words], input=content)

    chat = json.dumps({"chat": [{"role": "user", "content": "hi"}]}) + "\n"
    result = run("--messages-field", "chat", "--add-generation-prompt", "--out", tmp_path / "chat", content=chat)
    assert result.exit_code == 0, result.stderr
    header = open_vectors(tmp_path / "chat").header
    assert header.origin.special_tokens == "none" and header.origin.template_hash.startswith("sha256:")
    assert header.job["policy"]["add_generation_prompt"] is True

    words = ["--format", "text", "--prefix", "query: ", "--special-tokens", "none"]
    words += ["--max-length", "9", "--too-long", "truncate-right", "--limit", "2"]
    result = run(*words, "--out", tmp_path / "text", content="no\nlonger than that\nnever read\n")
    report = json.loads(result.stdout)
    assert (report["read"], report["stored"], report["truncated"]) == (2, 2, 1)
    records = list(open_vectors(tmp_path / "text").records())
    assert [record.truncated_from for record in records] == [None, 23] and records[1].num_tokens == 9
    assert records[0].origin.prefix == "query: "


@pytest.mark.parametrize(
    "words, error",
    [
        (["--input", "absent.jsonl"], "InputError"),
        (["--input", "a.csv"], "InputError"),
        (["--input", "a.jsonl", "--text-field", "a", "--ids-field", "b"], "InputError"),
        (["--input", "a.jsonl", "--max-length", "65"], "InputError"),
        (["--input", "a.jsonl", "--ids-field", "b", "--prefix", "x"], "InputError"),
        (["--input", "a.jsonl", "--out", "taken"], "ForeignDataset"),
    ],
)
def test_wrong_input_is_an_error_before_anything_is_computed(command, vector_engine, tmp_path, monkeypatch, words, error):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text("")
    (tmp_path / "a.jsonl").write_text("")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "something").write_text("else")
    monkeypatch.setattr("tensorrt_llm_ext.runtime.Session.open", None)  # nothing may come so far
    result = command("run", vector_engine, *words, *([] if "--out" in words else ["--out", "out"]), "--json")
    assert result.exit_code == 2 and json.loads(result.stdout)["error"] == error
    assert not (tmp_path / "out").exists()


def test_an_engine_of_both_kinds_of_taps_asks_which(command, engine_path, mixed, tmp_path):
    result = command("run", engine_path, "--input", mixed, "--out", tmp_path / "out")
    assert result.exit_code == 2 and result.stderr.startswith("TapError: a dataset holds one row a request or one row a token")
    result = command("run", engine_path, "--input", mixed, "--out", tmp_path / "out", "--taps", "layer:3@all", "--id-field", "id")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "states" / "manifest.json").exists()


def test_an_engine_without_its_tokenizer_is_to_be_copied_again(command, vector_engine, mixed, tmp_path):
    copy = shutil.copytree(vector_engine, tmp_path / "copy")
    (copy / "tokenizer.json").unlink()
    result = command("run", copy, "--input", mixed, "--out", tmp_path / "out")
    assert result.exit_code == 2 and "tokenizer.json' is not the one that was published" in result.stderr
    assert "copy the engine directory again" in result.stderr and not (tmp_path / "out").exists()


def test_a_refused_file_that_was_not_written_is_not_named(command, vector_engine, mixed, tmp_path, monkeypatch):
    def full(self):
        raise DiskFull("no space", expected="room", found="none", fix="free some")

    monkeypatch.setattr("tensorrt_llm_ext.job.ledgers.RefusedLedger.publish", full)
    result = command("run", vector_engine, "--input", mixed, "--out", tmp_path / "out")
    assert result.exit_code == 1 and "refused rows    not written" in result.stdout and "DiskFull" in result.stderr


def test_rows_that_fail_are_an_exit_code_of_their_own(command, checkpoint_path, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in checkpoint_path.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    weights = load_file(broken / "model.safetensors")
    weights["model.embed_tokens.weight"][260] = float("nan")  # a token that neither a canary nor the measurement holds
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    build_engine(broken, tmp_path / "engine", taps="final@last", max_seq_len=64)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"ids": ids}) + "\n" for ids in ([5], [5, 260, 6], [5, 6], [7])))
    words = ["--input", tmp_path / "a.jsonl", "--ids-field", "ids", "--out", tmp_path / "out", "--json"]
    result = command("run", tmp_path / "engine", *words)
    report = json.loads(result.stdout)
    assert result.exit_code == 1 and report["failed_by_code"] == {"not_finite": 1} and report["stored"] == 3


def test_ctrl_c_keeps_what_is_proven_accounts_for_the_rest_and_resume_ends_it(vector_engine, tmp_path):
    """Several windows of rows come through a pipe that then stays open: the run is at work, or waits for more."""
    rows = "".join(json.dumps({"text": f"prompt number {n}"}) + "\n" for n in range(NUM_ROWS))
    (tmp_path / "prompts.jsonl").write_text(rows)
    out = tmp_path / "out"
    words = [sys.executable, "-m", "tensorrt_llm_ext.cli", "run", str(vector_engine), "--out", str(out), "--json"]
    process = subprocess.Popen([*words, "--input", "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdin.write(rows.encode())
    process.stdin.flush()
    deadline = time.monotonic() + 120
    while not (out / "vectors.lance" / "data").is_dir() or not os.listdir(out / "vectors.lance" / "data"):
        assert process.poll() is None and time.monotonic() < deadline, "no window was committed"
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert stderr.startswith(b"Stopping:")
    report = json.loads(stdout)
    assert report["interrupted"] and report["shortfall"] == 0
    assert 0 < report["stored"] < NUM_ROWS and report["stored"] + report["failed"] == report["read"]
    resumed = subprocess.run(
        [*words, "--input", str(tmp_path / "prompts.jsonl"), "--resume"], capture_output=True, text=True, timeout=120
    )
    assert resumed.returncode == 0, resumed.stderr
    report = json.loads(resumed.stdout)
    assert report["already_stored"] > 0 and report["already_stored"] + report["stored"] == report["read"] == NUM_ROWS
    assert lance.dataset(str(out / "vectors.lance")).to_table(columns=["row"])["row"].to_pylist() == list(range(NUM_ROWS))


def test_progress_says_rows_tokens_speed_time_and_disk():
    progress = Progress(1200, 34567, 3456.7, 0.25, 3725.0, 2_500_000, 10_000_000, 79_000_000_000)
    assert _described(progress) == (
        "1,200 rows · 34,567 tokens · 3,457 tokens/s · 1:02:05 left · 2.5 MB of about 10 MB · 79 GB free"
    )
    unknown = Progress(1200, 0, 0.0, None, None, 0, None, 1)
    assert _described(unknown) == "1,200 rows · 0 tokens"


def test_durations_and_sizes_are_readable():
    assert [_duration(seconds) for seconds in (0.04, 59.94, 61, 3600)] == ["0.0 s", "59.9 s", "0:01:01", "1:00:00"]
    assert [_size(size) for size in (0, 999, 1000, 123_456_789, 5e15)] == ["0 B", "999 B", "1 kB", "123 MB", "5e+03 TB"]
