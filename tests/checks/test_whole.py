"""check finds one flipped bit, one truncated shard, one missing row, and says where; a dataset that is right passes."""

import json
import shutil
import sys
import threading
from pathlib import Path

import lance
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "job"), str(TESTS / "backends")]

from toy_engines import ALL, LAST, Toy, write_engine  # noqa: E402
from toy_jobs import LIMITS, run, write_input  # noqa: E402

from tensorrt_llm_ext.checks.whole import check_dataset  # noqa: E402
from tensorrt_llm_ext.cli import main  # noqa: E402
from tensorrt_llm_ext.errors import ForeignDataset  # noqa: E402
from tensorrt_llm_ext.inputs import Sharding  # noqa: E402
from tensorrt_llm_ext.store import open_states  # noqa: E402


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return write_engine(tmp_path_factory.mktemp("engine"), Toy(taps=(ALL,), limits=LIMITS))


@pytest.fixture(scope="module")
def original(engine, tmp_path_factory):
    folder = tmp_path_factory.mktemp("original")
    prompts = write_input(folder / "prompts.jsonl")
    run(engine, prompts, folder / "out")
    return prompts, folder / "out"


@pytest.fixture
def out(original, tmp_path):
    shutil.copytree(original[1], tmp_path / "out")
    return tmp_path / "out"


def shards_of(out):
    return sorted((out / "states").glob("shard-*"))


def test_what_is_whole_passes(out):
    whole = check_dataset(out)
    assert whole.damages == () and whole.num_rows == 46 and whole.num_bytes > 0
    assert check_dataset(out / "states").damages == ()


def flipped_bit(out, place=None):
    path = shards_of(out)[1]
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if place is None else place] ^= 4
    path.write_bytes(content)


def truncated_shard(out):
    shards_of(out)[1].write_bytes(shards_of(out)[1].read_bytes()[:-1])


def missing_shard(out):
    shards_of(out)[1].unlink()


def changed_index(out):
    path = out / "states" / "index" / "000001.parquet"
    table = pq.read_table(path)
    pq.write_table(table.slice(1), path)  # the metadata stays: one request is missing


def missing_part(out):
    (out / "states" / "index" / "000001.parquet").unlink()


def lost_tail(out):
    last = sorted((out / "states" / "index").glob("*.parquet"))[-1]
    last.unlink()
    shards_of(out)[-1].unlink()


def lost_reason(out):
    (out / "failed.jsonl").write_text("")


def unfinished(out):
    (out / "states" / "manifest.json").unlink()


DAMAGES = {
    flipped_bit: "shard-000001",
    truncated_shard: "shard-000001",
    missing_shard: "shard-000001",
    changed_index: "manifest.json, shard 1",
    missing_part: "has gaps",
    lost_tail: "manifest.json",
    lost_reason: "the input's rows",
    unfinished: "manifest.json",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_damage_is_found_where_it_is(out, damage):
    damage(out)
    found = check_dataset(out).damages
    assert found and any(DAMAGES[damage] in one.place for one in found), found


@pytest.mark.parametrize("place", [3, 40, 900, -1, -60])
def test_a_bit_anywhere_is_found(out, place):
    flipped_bit(out, place)
    assert check_dataset(out).damages


def test_the_request_whose_row_was_changed_is_named(out):
    flipped_bit(out)
    assert any("request 'r" in damage.place and "final_post_all" in damage.place for damage in check_dataset(out).damages)


def test_a_missing_row_is_named(out):
    changed_index(out)
    lost = [damage for damage in check_dataset(out).damages if damage.place == "the input's rows"]
    assert len(lost) == 1 and lost[0].found.startswith("1 nowhere")


def test_vectors_too(tmp_path):
    engine = write_engine(tmp_path / "engine", Toy(taps=(LAST,), limits=LIMITS))
    run(engine, write_input(tmp_path / "prompts.jsonl"), tmp_path / "out")
    assert check_dataset(tmp_path / "out").damages == ()
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "out", copy)
    lance.dataset(str(copy / "vectors.lance")).delete("row = 3")
    assert [damage.place for damage in check_dataset(copy).damages] == ["manifest.json, num_rows", "the input's rows"]
    stored = lance.dataset(str(tmp_path / "out" / "vectors.lance")).to_table()["final_post_last"][0].values.to_numpy().tobytes()
    (file,) = (path for path in (tmp_path / "out" / "vectors.lance" / "data").iterdir() if stored in path.read_bytes())
    content = bytearray(file.read_bytes())
    content[content.find(stored) + 4] ^= 1
    file.write_bytes(content)
    assert check_dataset(tmp_path / "out").damages


@pytest.fixture(scope="module")
def vectors_engine(tmp_path_factory):
    return write_engine(tmp_path_factory.mktemp("vectors"), Toy(taps=(LAST,), limits=LIMITS))


@pytest.mark.parametrize("stop_at", [0, 20])
def test_vectors_of_a_run_that_was_interrupted_are_not_whole_until_it_is_resumed(vectors_engine, tmp_path, stop_at):
    prompts, out, stop = write_input(tmp_path / "prompts.jsonl"), tmp_path / "out", threading.Event()

    if not stop_at:
        stop.set()
    report = run(vectors_engine, prompts, out, stop=stop, progress=lambda now: now.num_rows >= stop_at and stop.set())
    assert report.is_interrupted
    whole = check_dataset(out)
    assert (whole.num_rows > 0) == (stop_at > 0)
    assert [(damage.place, damage.found.partition(":")[0]) for damage in whole.damages] == [("manifest.json", "none")]
    assert "go on with run --resume" in CliRunner().invoke(main, ["show", str(out)]).stdout
    run(vectors_engine, prompts, out, resume=True)
    assert check_dataset(out).damages == () and check_dataset(out).num_rows == 46


def test_vectors_that_grow_after_they_were_finished_are_unfinished_again_until_their_run_ends(vectors_engine, tmp_path):
    prompts, out = write_input(tmp_path / "prompts.jsonl"), tmp_path / "out"
    run(vectors_engine, prompts, out, limit=10)
    assert check_dataset(out).damages == ()
    stop = threading.Event()
    run(vectors_engine, prompts, out, resume=True, stop=stop, progress=lambda now: now.num_rows >= 30 and stop.set())
    assert [damage.place for damage in check_dataset(out).damages] == ["manifest.json"]


def test_a_lost_tail_of_vectors_is_found(vectors_engine, tmp_path):
    run(vectors_engine, write_input(tmp_path / "prompts.jsonl"), tmp_path / "out")
    vectors = lance.dataset(str(tmp_path / "out" / "vectors.lance"))
    vectors.delete(f"window_end = {max(vectors.to_table()['window_end'].to_pylist())}")
    places = [damage.place for damage in check_dataset(tmp_path / "out").damages]
    assert places == ["manifest.json, num_rows", "the input's rows"]


def test_what_is_no_dataset_is_said(tmp_path):
    with pytest.raises(ForeignDataset):
        check_dataset(tmp_path)


def test_the_parts_of_a_run_are_read_together_without_renumbering(engine, original, tmp_path):
    prompts, whole = original
    for index in range(3):
        run(engine, prompts, tmp_path / str(index), sharding=Sharding(index, 3))
    parts = [tmp_path / str(index) for index in (2, 0, 1)]
    together, alone = list(open_states(*parts).sequences()), list(open_states(whole).sequences())
    assert [(one.row, one.request_id) for one in together] == [(one.row, one.request_id) for one in alone]
    for one, other in zip(together, alone, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist() and one.loss_mask.tolist() == other.loss_mask.tolist()
        assert abs(one.states["final_post_all"] - other.states["final_post_all"]).max() < 1e-5
    for wrong in (parts[:2], [*parts[:2], parts[0]]):
        with pytest.raises(ForeignDataset, match="not the parts of one run"):
            open_states(*wrong)
    with pytest.raises(ForeignDataset):
        open_states(parts[0], whole)


def test_an_unfinished_dataset_is_not_read(out):
    unfinished(out)
    with pytest.raises(ForeignDataset, match="is not finished"):
        open_states(out)


def test_the_verb_s_exit_code_is_the_answer(out):
    result = CliRunner().invoke(main, ["check", str(out), "--json"])
    assert result.exit_code == 0 and json.loads(result.stdout)["is_whole"]
    truncated_shard(out)
    result = CliRunner().invoke(main, ["check", str(out)])
    assert result.exit_code == 1 and "DAMAGED shard-000001" in result.stdout


def test_the_verb_checks_several_datasets_of_vectors_and_one_of_states_side_by_side(original, out, tmp_path):
    vectors = write_engine(tmp_path / "engine", Toy(taps=(LAST,), limits=LIMITS))
    run(vectors, original[0], tmp_path / "vectors")
    result = CliRunner().invoke(main, ["check", *[str(tmp_path / "vectors")] * 2, str(out)])
    assert result.exit_code == 0 and "Everything is as it was written" in result.stdout


def test_show_says_what_it_is(out):
    for path in (out, out / "states"):
        result = CliRunner().invoke(main, ["show", str(path)])
        assert result.exit_code == 0 and "states of 46 requests to toy" in result.stdout and "the whole" in result.stdout
    unfinished(out)
    assert "go on with run --resume" in CliRunner().invoke(main, ["show", str(out)]).stdout
