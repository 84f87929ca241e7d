"""Processes of the real command around a real server: killed, restarted, drained; every item ends in one place."""

import contextlib
import dataclasses
import fcntl
import json
import signal
import subprocess
import time

import numpy as np
import pytest
import tiny
from fleet import COMMAND, Fleet, run_chaos, settled
from toy_engines import Toy, write_engine

from tensorrt_llm_ext.builder import build_engine
from tensorrt_llm_ext.checkpoint import Tokenizer
from tensorrt_llm_ext.inputs import Fields, token_policy
from tensorrt_llm_ext.recipes import read_contract
from tensorrt_llm_ext.store import open_states
from tensorrt_llm_ext.worker import Access, JetStreamBroker, StreamSettings, Wanted, make_stream, status_of

SETTINGS = StreamSettings(num_partitions=1, ack_wait_s=3.0, lease_s=3.0)
SAME = 1e-4  # of the largest value of a request's rows: another batch rounds float32 in another order


@pytest.fixture(scope="module")
def states_engine(tiny_checkpoint):
    build_engine(tiny_checkpoint, tiny_checkpoint.parent / "states", taps="eagle3", max_seq_len=64, opt_num_tokens=256)
    return tiny_checkpoint.parent / "states"


def command(*words, url, stream):
    words = [*COMMAND, *map(str, words), "--broker", url, "--stream", stream, "--json"]
    return subprocess.run(words, capture_output=True, text=True, timeout=120)


def write_prompts(path, num_rows, seed=0):
    """Log-normal lengths; every fiftieth row is too long."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(2.5, 0.7, num_rows), 1, 60).astype(int)
    lengths[49::50] = 90
    rows = [{"id": f"r{n}", "ids": rng.integers(3, 250, size=length).tolist()} for n, length in enumerate(lengths)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return num_rows - len(lengths[49::50])


def made_stream(engine, url, stream, settings=SETTINGS):
    """A stream with short deadlines, as the verbs make it otherwise."""
    contract = read_contract(engine)
    loss_mask = "ones" if contract.taps[0].rows == "all" else None
    policy = token_policy(Fields(ids="ids"), Tokenizer.load(engine), contract.limits, loss_mask=loss_mask)
    with JetStreamBroker.open(Access(url), stream, name="test") as broker:
        return make_stream(broker, Wanted(contract, policy, settings))


def submitted(engine, prompts, url, stream):
    words = ["submit", prompts, "--engine", engine, "--ids-field", "ids", "--id-field", "id"]
    return command(*words, url=url, stream=stream)


def check_every_item_once(out, num_items, result):
    rows, lines = settled(out)
    sequences = [sequence for sequence, _ in rows] + [line["sequence"] for line in lines]
    assert sorted(sequences) == list(range(1, num_items + 1))  # each settled once, in one place
    assert len({name for _, name in rows}) == len(rows)
    assert all(line["code"] and line["what"] for line in lines)
    status = result["status"]
    assert (status.stored, status.refused + status.failed) == (len(rows), len(lines))
    assert status.stored + status.refused + status.failed + status.open == status.submitted == num_items
    assert status.open == 0


def test_a_small_fleet_under_sigkill_and_a_broker_restart_settles_every_item_once(tiny_engine, own_nats_server, tmp_path):
    num_items = write_prompts(tmp_path / "prompts.jsonl", 300)
    made_stream(tiny_engine, own_nats_server.url, "s")
    first = submitted(tiny_engine, tmp_path / "prompts.jsonl", own_nats_server.url, "s")
    report = json.loads(first.stdout)
    assert first.returncode == 0 and (report["submitted"], report["refused_by_code"]) == (num_items, {"too_long": 6})
    assert "too_long" in first.stderr and "90 tokens" in first.stderr
    result = run_chaos(
        tiny_engine, own_nats_server, "s", tmp_path, num_workers=2, kill_every_s=1.2, calm_after=4, restart_after=1, timeout_s=100
    )
    check_every_item_once(tmp_path, num_items, result)
    assert result["killed"].total() >= 1 and result["broker_restarted"] and not result["ended"]
    assert set(result["exit_codes"].values()) <= {0, -signal.SIGTERM}  # the latter: it was only just started again
    again = json.loads(submitted(tiny_engine, tmp_path / "prompts.jsonl", own_nats_server.url, "s").stdout)
    assert (again["submitted"], again["already_submitted"], again["shortfall"]) == (0, num_items, 0)
    status = command("broker-status", url=own_nats_server.url, stream="s")
    assert status.returncode == 0 and json.loads(status.stdout)["done"] is True


def check_states_equal_a_run(engine, prompts, out):
    """`check` finds nothing, and the rows are those that `run` writes for the same file, within what batches may change."""
    words = ["run", engine, "--input", prompts, "--out", out / "run", "--ids-field", "ids", "--id-field", "id", "--shard-mib", "16"]
    subprocess.run([*COMMAND, *map(str, words)], check=True, capture_output=True, timeout=600)
    for dataset in (out / "data" / "part-0", out / "run"):
        subprocess.run([*COMMAND, "check", str(dataset)], check=True, capture_output=True, timeout=100)
    right = {one.request_id: one for one in open_states(out / "run").sequences()}
    stored = {one.request_id: one for one in open_states(out / "data" / "part-0").sequences()}
    assert stored.keys() == right.keys() and len(stored) > 0
    largest = 0.0
    for request_id, one in stored.items():
        assert one.token_ids.tolist() == right[request_id].token_ids.tolist()
        assert one.loss_mask.tolist() == right[request_id].loss_mask.tolist() and one.states.keys() == right[request_id].states.keys()
        for column, rows in one.states.items():
            expected = right[request_id].states[column]
            largest = max(largest, float(np.abs(rows - expected).max() / np.abs(expected).max()))
    assert largest < SAME
    return largest


def test_states_of_a_small_fleet_under_sigkill_are_those_of_a_run_each_once(states_engine, own_nats_server, tmp_path):
    """Workers and store killed in any step, the broker restarted: rows by reference, none lost, none twice, none left over."""
    num_items, prompts = write_prompts(tmp_path / "prompts.jsonl", 200), tmp_path / "prompts.jsonl"
    made_stream(states_engine, own_nats_server.url, "s", dataclasses.replace(SETTINGS, max_message_bytes=8192, max_rows_bytes=4 << 20))
    assert submitted(states_engine, prompts, own_nats_server.url, "s").returncode == 0
    result = run_chaos(
        states_engine, own_nats_server, "s", tmp_path, num_workers=2, kill_every_s=1.2, calm_after=5, restart_after=1, timeout_s=200,
        store_options=("--shard-mib", "1"),
    )  # fmt: skip
    check_every_item_once(tmp_path, num_items, result)
    assert result["killed"].total() >= 2 and result["broker_restarted"] and not result["ended"]
    check_states_equal_a_run(states_engine, prompts, tmp_path)
    assert result["status"].unstored_rows_bytes == 0


def test_a_worker_of_another_engine_exits_non_zero_field_by_field(tiny_engine, nats_server, tmp_path):
    made_stream(tiny_engine, nats_server.url, "door", dataclasses.replace(SETTINGS, lease_s=60.0))
    other = write_engine(tmp_path / "other", Toy())
    result = command("work", other, url=nats_server.url, stream="door")
    error = json.loads(result.stdout)
    assert result.returncode == 1 and error["error"] == "NotAdmitted"
    for field in ("model", "checkpoint", "tokenizer", "engine", "length"):
        assert field in error["expected"] and field in error["found"]
    words = [*COMMAND, "broker-status", "--broker", nats_server.url, "--stream", "door"]
    status = subprocess.run(words, capture_output=True, text=True, timeout=60)
    (workers,) = (line for line in status.stdout.splitlines() if line.startswith("workers"))
    assert "not admitted: other model, checkpoint, tokenizer" in workers and len(workers) < 200 and status.stderr == ""


@pytest.mark.slow
def test_500_items_of_smollm2_for_training_under_sigkill_are_those_of_a_run(own_nats_server, tmp_path):
    """EAGLE-3's four taps: 9 kB a token, so that nearly every answer goes by reference."""
    engine, prompts = tmp_path / "engine", tmp_path / "prompts.jsonl"
    build_engine(tiny.smollm2_gguf(), engine, taps="eagle3", max_seq_len=512)
    write_prompts(prompts, 500)
    made_stream(engine, own_nats_server.url, "s", dataclasses.replace(SETTINGS, ack_wait_s=15.0, lease_s=6.0, max_message_bytes=1 << 16))
    assert submitted(engine, prompts, own_nats_server.url, "s").returncode == 0
    result = run_chaos(
        engine, own_nats_server, "s", tmp_path, num_workers=2, kill_every_s=8.0, calm_after=12, restart_after=3, timeout_s=1800,
        store_options=("--shard-mib", "64"),
    )  # fmt: skip
    check_every_item_once(tmp_path, 500, result)
    assert not result["ended"]
    largest = check_states_equal_a_run(engine, prompts, tmp_path)
    print({name: value for name, value in result.items() if name != "status"}, f"largest difference {largest:.2g}")


@pytest.mark.slow
def test_10_000_items_of_smollm2_under_sigkill_every_few_seconds(own_nats_server, tmp_path):
    """Three workers and a store writer, one of the four killed every few seconds to the end, the broker once."""
    engine = tmp_path / "engine"
    build_engine(tiny.smollm2_gguf(), engine, recipe="smollm2-135m")
    num_rows = 10_000
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(3.0, 0.8, num_rows), 1, 512).astype(int)
    rows = [{"id": f"r{n}", "ids": rng.integers(3, 49000, size=length).tolist()} for n, length in enumerate(lengths)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made_stream(engine, own_nats_server.url, "s", dataclasses.replace(SETTINGS, ack_wait_s=15.0, lease_s=6.0))
    assert submitted(engine, tmp_path / "prompts.jsonl", own_nats_server.url, "s").returncode == 0
    result = run_chaos(
        engine, own_nats_server, "s", tmp_path, num_workers=3, kill_every_s=8.0, calm_after=None, restart_after=5, timeout_s=3 * 3600
    )
    check_every_item_once(tmp_path, num_rows, result)
    assert not result["ended"]
    print({name: value for name, value in result.items() if name != "status"}, result["status"].by_code)


def test_a_writer_stopped_past_its_lease_and_resumed_commits_nothing(tiny_engine, own_nats_server, tmp_path):
    """SIGSTOP, another takes over and stores, SIGCONT: the first stands by again, and each row is there once."""
    num_items = write_prompts(tmp_path / "prompts.jsonl", 100)
    made_stream(tiny_engine, own_nats_server.url, "s")
    submitted(tiny_engine, tmp_path / "prompts.jsonl", own_nats_server.url, "s")
    first, second = (Fleet(tiny_engine, own_nats_server.url, "s", tmp_path, 0) for _ in range(2))
    workers = Fleet(tiny_engine, own_nats_server.url, "s", tmp_path, 1)
    try:
        with JetStreamBroker.open(Access(own_nats_server.url), "s", name="test") as broker:
            first.start("store")
            wait_for(lambda: status_of(broker).writers == ["0"])
            workers.start("worker-0")
            wait_for(lambda: status_of(broker).unstored or status_of(broker).stored)
            stop_between_commits(first.processes["store"], tmp_path / "data" / "part-0.fence")
            second.start("store")
            wait_for(lambda: status_of(broker).is_done, 60)
            first.processes["store"].send_signal(signal.SIGCONT)
            time.sleep(1.0)
            assert [fleet.stop()["store"] for fleet in (first, second)] == [0, 0]
            result = {"status": status_of(broker)}
        check_every_item_once(tmp_path, num_items, result)
    finally:
        for fleet in (first, second, workers):
            for process in fleet.processes.values():
                process.send_signal(signal.SIGCONT)
            fleet.kill()


def stop_between_commits(process, fence):
    """Stop a writer that holds no lock. One that does keeps every other out until it goes on, whatever its lease."""
    for _ in range(100):
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.05)
        with open(fence) as file, contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        process.send_signal(signal.SIGCONT)
        time.sleep(0.05)
    raise AssertionError("the writer held its lock at each of 100 moments")


def wait_for(is_so, timeout_s=40.0):
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)
