"""The states writer alone against ``dd`` with fsync on the same disk: ``python tests/bench/states_writer.py FOLDER [GB] [ROUNDS]``.

Both write the same number of bytes to FOLDER, in turn, each round; the writer hashes every row and every shard, checks
lineage and finite values, and syncs every shard. Prints the ratio of speeds of each round, the median, and the CPU time of
the writer a GB. The rows are those of an 8B model with eagle3 taps in bfloat16: 32 KiB a token. A round
that is not counted goes first: memory that a virtual machine has never touched costs it a multiple of a copy.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "backends"), str(TESTS / "store")]

from sequential import dd_speed  # noqa: E402
from store_answers import make_states_header  # noqa: E402
from toy_engines import work_item  # noqa: E402

from tensorrt_llm_ext.results import Record, State, rows_hash  # noqa: E402
from tensorrt_llm_ext.store import DEFAULT_SHARD_BYTES, SHARD_BYTES, StatesStore  # noqa: E402
from tensorrt_llm_ext.store.shard_size import row_bytes  # noqa: E402
from tensorrt_llm_ext.taps import Tap  # noqa: E402

HIDDEN_SIZE, NUM_LAYERS, SEQUENCE_TOKENS = 4096, 32, 512
WINDOW_SEQUENCES = 32  # 0.5 GB


def big_header():
    taps = tuple(Tap(layer, "pre", "all") for layer in (2, 16, 29, 32))
    header = make_states_header("bfloat16")
    architecture = replace(header.contract.architecture, num_layers=NUM_LAYERS, hidden_size=HIDDEN_SIZE)
    tensors = tuple(
        replace(header.contract.tensors[-1], name=tap.column(NUM_LAYERS), shape=("T", HIDDEN_SIZE), tap=tap) for tap in taps
    )
    contract = replace(header.contract, architecture=architecture, taps=taps, tensors=tensors)
    return replace(header, contract=contract, job={**header.job, SHARD_BYTES: DEFAULT_SHARD_BYTES})


def answers(header):
    """Sixteen different records, used in turn."""
    rng = np.random.default_rng(0)
    for number in range(16):
        item = work_item(str(number), rng.integers(0, 90, SEQUENCE_TOKENS))
        item = replace(item, loss_mask=np.ones(SEQUENCE_TOKENS, np.uint8))
        states = []
        for column in header.columns:
            rows = rng.normal(size=(SEQUENCE_TOKENS, HIDDEN_SIZE)).astype(ml_dtypes.bfloat16)
            states.append(State(column.tap, rows, "bfloat16", rows_hash(rows)))
        yield item, Record(
            item.request_id, item.work_item_id, item.token_hash, SEQUENCE_TOKENS, None, tuple(states), header.origin
        )


def write_states(folder, header, records, num_sequences):
    with StatesStore.create(folder, header) as store:
        for number in range(num_sequences):
            store.append(number, *records[number % len(records)])
            if number % WINDOW_SEQUENCES == WINDOW_SEQUENCES - 1:
                store.commit(number + 1)
        store.commit(num_sequences)
        store.flush()
        store.seal()
        return store.num_bytes


def main(folder, gigabytes="4", rounds="5"):
    header = big_header()
    records = list(answers(header))
    num_sequences = int(float(gigabytes) * 1e9 / (SEQUENCE_TOKENS * row_bytes(header)))
    ratios = []
    for number in range(-1, int(rounds)):
        out = Path(folder) / "bench-states"
        shutil.rmtree(out, ignore_errors=True)
        os.sync()
        cpu, began = time.process_time(), time.perf_counter()
        num_bytes = write_states(out, header, records, num_sequences)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        shutil.rmtree(out)
        os.sync()
        theirs = dd_speed(Path(folder) / "bench-dd", num_bytes)
        if number < 0:
            continue
        ratios.append(num_bytes / seconds / theirs)
        print(
            f"round {number}: {num_bytes / 1e9:.2f} GB, writer {num_bytes / seconds / 1e6:,.0f} MB/s, dd {theirs / 1e6:,.0f} MB/s,"
            f" ratio {ratios[-1]:.2f}, CPU {cpu / (num_bytes / 1e9):.2f} s a GB",
            flush=True,
        )
    print(f"median ratio {statistics.median(ratios):.2f} of {len(ratios)} rounds")


if __name__ == "__main__":
    main(*sys.argv[1:])
