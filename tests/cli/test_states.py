"""``run`` with taps @all, and what comes after it: chat messages with their mask, parts of a run, check, show, refusals."""

import json
import shutil

import pyarrow.parquet as pq
import pytest
import safetensors.numpy

from tensorrt_llm_ext.builder import build_engine
from tensorrt_llm_ext.checkpoint import Tokenizer
from tensorrt_llm_ext.store import open_states


@pytest.fixture(scope="module")
def states_engine(checkpoint_path, tmp_path_factory):
    engine = tmp_path_factory.mktemp("states") / "engine"
    build_engine(checkpoint_path, engine, taps="final@last,eagle3", max_seq_len=64, max_num_tokens=128, opt_num_tokens=128)
    return engine


@pytest.fixture
def chats(tmp_path):
    lines = []
    for number in range(24):
        chat = [{"role": "user", "content": f"q{number}"}, {"role": "assistant", "content": f"answer {number}"}]
        lines.append(json.dumps({"id": f"c{number}", "chat": chat}))
    lines[5] = json.dumps({"id": "c5", "chat": []})
    (tmp_path / "chats.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path / "chats.jsonl"


def words_for(engine, chats, out, *more):
    fields = ["--messages-field", "chat", "--id-field", "id"]
    return ["run", engine, "--input", chats, "--out", out, "--taps", "eagle3", "--shard-mib", "1", *fields, *more]


def test_chat_messages_become_training_data_with_the_assistant_s_mask(command, states_engine, chats, tmp_path):
    out = tmp_path / "out"
    report = json.loads(command(*words_for(states_engine, chats, out, "--limit", "7", "--json")).stdout)
    assert (report["stored"], report["refused"], report["shortfall"]) == (6, 1, 0)
    report = json.loads(command(*words_for(states_engine, chats, out, "--resume", "--json")).stdout)
    assert (report["read"], report["stored"], report["already_stored"], report["refused"]) == (24, 17, 6, 1)
    tokenizer = Tokenizer.load(states_engine)
    for entry in pq.read_table(out / "states" / "index").to_pylist():
        shard = safetensors.numpy.load_file(out / "states" / entry["shard"])
        place = slice(entry["first_row"], entry["first_row"] + entry["num_rows"])
        learnt = shard["token_ids"][place][shard["loss_mask"][place] == 1].tolist()
        (expected,) = tokenizer.encode_batch([f"answer {entry['row']}</s>"], False)
        assert learnt == expected.tolist()
        assert entry["taps"].split(",") == ["layer_002_pre_all", "layer_004_pre_all", "layer_005_pre_all", "final_pre_all"]
    checked = command("check", out)
    assert checked.exit_code == 0 and " kB, every hash computed again" in checked.stdout
    assert command("show", out).exit_code == 0
    assert json.loads((out / "states" / "manifest.json").read_text())["job"]["policy"]["loss_mask"] == "assistant"


def test_the_parts_of_a_run_are_exported_together(command, states_engine, chats, tmp_path):
    parts = [tmp_path / str(index) for index in range(2)]
    for index, part in enumerate(parts):
        assert command(*words_for(states_engine, chats, part, "--shard", f"{index}/2")).exit_code == 0
    assert [one.row for one in open_states(*parts).sequences()] == [row for row in range(24) if row != 5]
    assert command("check", *parts).exit_code == 0
    result = command("export", *parts, "--to", "numpy", "--out", tmp_path / "numpy", "--json")
    assert result.exit_code == 0 and json.loads(result.stdout)["sequences"] == 23
    result = command("check", parts[0], parts[0])
    assert result.exit_code == 2 and "not the parts of one run" in result.stderr


@pytest.mark.parametrize(
    "words, text",
    [
        (["--taps", "layer:1@all"], "does not have these taps"),
        (["--taps", "final@last", "--loss-mask", "ones"], "no meaning for taps of one row a request"),
        (["--taps", "final@last,eagle3"], "these taps give both"),
        (["--shard", "2/2"], "not a part of a run"),
        (["--loss-mask", "ones", "--loss-mask-field", "mask"], "do not belong together"),
    ],
)
def test_wrong_words_are_refused_before_anything_is_made(command, states_engine, chats, tmp_path, words, text):
    result = command(*words_for(states_engine, chats, tmp_path / "out"), *words)
    assert result.exit_code == 2 and text in result.stderr and not (tmp_path / "out").exists()


def test_a_disk_that_is_too_small_is_said_first_and_force_goes_on(command, states_engine, chats, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("tensorrt_llm_ext.job.report.shutil.disk_usage", lambda path: usage._replace(free=1000))
    result = command(*words_for(states_engine, chats, tmp_path / "out"))
    assert result.exit_code == 1 and result.stderr.startswith("NoRoom: the dataset will not fit")
    assert command(*words_for(states_engine, chats, tmp_path / "out", "--resume", "--force")).exit_code == 0
