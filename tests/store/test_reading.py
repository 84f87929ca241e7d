"""Reading back: the same records, damage found, neighbours in order."""

import json
from dataclasses import replace

import lance
import numpy as np
import pytest
from store_answers import make_answer, make_header

from tensorrt_llm_ext.errors import ForeignDataset, StoreError
from tensorrt_llm_ext.store import VectorStore, open_vectors
from tensorrt_llm_ext.store.header import read_header


@pytest.fixture
def dataset(tmp_path, fill, request):
    header = make_header(dtype=getattr(request, "param", "float32"))
    with VectorStore.create(tmp_path, header) as store:
        fill(store, range(10))
        fill(store, range(10, 15))
    return tmp_path


def same(record, other):
    def parts(record):
        return [(state.tap, state.rows.tobytes(), state.rows.dtype, state.payload_hash) for state in record.states]

    names = ("request_id", "work_item_id", "token_hash", "num_tokens", "truncated_from", "origin")
    return parts(record) == parts(other) and all(getattr(record, name) == getattr(other, name) for name in names)


@pytest.mark.parametrize("dataset", ["float32", "float16", "bfloat16"], indirect=True)
def test_every_record_comes_back_as_it_was(dataset):
    opened = open_vectors(dataset)
    records = list(opened.records())
    assert len(opened) == len(records) == 15
    assert all(same(record, make_answer(opened.header, row)[1]) for row, record in enumerate(records))
    assert not same(records[0], records[1])


def test_a_vector_is_found_by_its_request_id(dataset):
    opened = open_vectors(dataset)
    expected = make_answer(opened.header, 3)[1].states[1].rows[0]
    assert np.array_equal(opened.vector("id 3", "final_post_mean"), expected)


def test_a_request_id_with_a_quote_is_only_a_text(tmp_path, header):
    with VectorStore.create(tmp_path, header) as store:
        item, record = make_answer(header, 0)
        name = "it's' OR 'a'='a"
        store.append(0, replace(item, request_id=name), replace(record, request_id=name))
        store.commit(1)
    assert len(open_vectors(tmp_path).vector(name, "final_post_last")) == 24


@pytest.mark.parametrize(
    "request_id, column, text", [("id 99", "final_post_last", "no request 'id 99'"), ("id 1", "final_last", "no vectors")]
)
def test_what_is_not_there_is_said(dataset, request_id, column, text):
    with pytest.raises(StoreError, match=text):
        open_vectors(dataset).vector(request_id, column)


def test_a_damaged_value_is_found_by_its_hash(dataset):
    lance.dataset(str(dataset / "vectors.lance")).update({"final_post_mean_hash": "'xxh3-128:0'"}, where="row = 12")
    with pytest.raises(StoreError, match="the row of request 'id 12' is damaged"):
        list(open_vectors(dataset).records())


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:-100])])
def test_a_file_that_is_missing_or_cut_short_is_damage(dataset, damage):
    opened, header = open_vectors(dataset), make_header()
    damage(min((dataset / "vectors.lance" / "data").iterdir(), key=lambda path: path.stat().st_mtime_ns))
    for read in (
        lambda: list(open_vectors(dataset).records()),
        lambda: opened.vector("id 3", "final_post_mean"),
        lambda: opened.nearest("final_post_mean", np.ones(24), 3),
    ):
        with pytest.raises(StoreError, match="vectors.lance' is damaged"):
            read()
    with VectorStore.open(dataset, header) as store:
        for resume in (lambda: store.settled_rows, lambda: list(store.identities())):
            with pytest.raises(StoreError, match="vectors.lance' is damaged"):
                resume()


@pytest.mark.parametrize("change", [lambda value: value.pop("origin"), lambda value: value["contract"].update(taps=[{}])])
def test_a_header_that_lacks_a_field_is_damage(dataset, change):
    schema = lance.dataset(str(dataset / "vectors.lance")).schema
    value = json.loads(schema.metadata[b"tensorrt_llm_ext"])
    change(value)
    with pytest.raises(ForeignDataset, match="the header of 'here' is damaged"):
        read_header(schema.with_metadata({"tensorrt_llm_ext": json.dumps(value)}), "here")


@pytest.mark.parametrize("dataset", ["float32", "float16"], indirect=True)
@pytest.mark.parametrize("metric", ["cosine", "l2"])
def test_neighbours_come_in_the_order_of_their_distance(dataset, metric):
    opened = open_vectors(dataset)
    rows = np.array([make_answer(opened.header, row)[1].states[0].rows[0] for row in range(15)], dtype=np.float64)
    query = rows[6] + 0.1 * rows[2]
    expected = {
        "l2": ((rows - query) ** 2).sum(axis=1),
        "cosine": 1 - rows @ query / np.linalg.norm(rows, axis=1) / np.linalg.norm(query),
    }[metric]
    found = opened.nearest("final_post_last", query, 4, metric)
    assert [neighbour.request_id for neighbour in found] == [f"id {row}" for row in np.argsort(expected)[:4]]
    assert np.allclose([neighbour.distance for neighbour in found], np.sort(expected)[:4], rtol=1e-2, atol=1e-3)


def test_another_folder_is_refused(tmp_path):
    with pytest.raises(ForeignDataset, match="holds no dataset"):
        open_vectors(tmp_path / "absent")
