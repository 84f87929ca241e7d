"""Folders of states: made by a store, and looked at without one."""

import pyarrow.parquet as pq
import safetensors.numpy
from store_answers import make_answer

from tensorrt_llm_ext.store import StatesStore


def filled(folder, header, fill, num_windows=12, seal=True, window_rows=8):
    with StatesStore.create(folder, header) as store:
        for start in range(0, num_windows * window_rows, window_rows):
            fill(store, range(start, start + window_rows))
        store.flush()
        if seal:
            store.seal()
    return files_of(folder)


def files_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def index_of(folder):
    rows = pq.read_table(folder / "states" / "index").to_pylist()
    return sorted(rows, key=lambda row: row["row"])


def check_rows(folder, header, rows):
    """Every row is that of its request, by the index, read with safetensors' own reader."""
    index = index_of(folder)
    assert [entry["row"] for entry in index] == list(rows)
    for entry in index:
        item, record = make_answer(header, entry["row"])
        shard = safetensors.numpy.load_file(folder / "states" / entry["shard"])
        place = slice(entry["first_row"], entry["first_row"] + entry["num_rows"])
        assert entry["request_id"] == item.request_id and entry["token_hash"] == item.token_hash
        assert shard["token_ids"][place].tolist() == item.token_ids.tolist()
        assert shard["loss_mask"][place].tolist() == item.loss_mask.tolist()
        for column, state in zip(header.columns, record.states, strict=True):
            assert shard[column.name][place].tobytes() == state.rows.tobytes()
            assert entry[column.hash_name] == state.payload_hash
