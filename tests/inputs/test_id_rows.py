"""Rows of token ids that are read many at a time become what they become one by one."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import LIMITS
from tensorrt_llm_ext._runtime import read_id_lines
from tensorrt_llm_ext.errors import Refusal
from tensorrt_llm_ext.fingerprint import token_hash
from tensorrt_llm_ext.inputs import AcceptedRow, Fields, IdRows, RefusedRow, Row, open_input, token_policy, work_items
from tensorrt_llm_ext.inputs.lines import _parsed

FIELDS = Fields(ids="ids", request_id="id")
POLICY = token_policy(FIELDS, None, LIMITS, max_length=5)
VOCAB_SIZE = 100

PLAIN = [
    b'{"id": "a", "ids": [1, 2, 3]}',
    b'{"ids":[0],"id":"b c"}',
    b' \t{ "ids" : [ 1 ,2 ] , "id" : 17 , "text" : "x" , "n" : -1.5e+3 , "b" : true, "c": null, "d": 0 } \r',
    b'{"id": 0, "ids": [2147483647]}',
]
NOT_PLAIN = [
    b"",
    b"  ",
    b"[]",
    b"{}",
    b"1",
    b'{"id": "a"}',
    b'{"ids": [1]}',
    b'{"id": "a", "ids": []}',
    b'{"id": "a", "ids": [1,]}',
    b'{"id": "a", "ids": [01]}',
    b'{"id": "a", "ids": [-1]}',
    b'{"id": "a", "ids": [1.0]}',
    b'{"id": "a", "ids": [1e1]}',
    b'{"id": "a", "ids": [true]}',
    b'{"id": "a", "ids": [null]}',
    b'{"id": "a", "ids": [2147483648]}',
    b'{"id": "a", "ids": [99999999999999999999999999]}',
    b'{"id": "a", "ids": ["1"]}',
    b'{"id": "a", "ids": [1], "ids": [2]}',
    b'{"id": "a", "ids": [1], "x": 1, "x": 1}',
    b'{"id": "a", "ids": [1], "x": [1]}',
    b'{"id": "a", "ids": [1], "x": {}}',
    b'{"id": "a", "ids": [1], "x": NaN}',
    b'{"id": "a", "ids": [1], "x": 01}',
    b'{"id": "a", "ids": [1], "x": 1.}',
    b'{"id": "a", "ids": [1], "x": .5}',
    b'{"id": "a", "ids": [1], "x": -}',
    b'{"id": "a", "ids": [1], "x": nulls}',
    b'{"id": "a", "ids": [1], }',
    b'{"id": "a", "ids": [1]} x',
    b'{"id": "a", "ids": [1]}{}',
    b'{"id": "a", "ids": [1]',
    b'{"id": "a", "ids": [1',
    b'{"id": "a", "ids": 1}',
    b'{"id": "a" "ids": [1]}',
    b'{"id": "a\\n", "ids": [1]}',
    b'{"\\u0069d": "a", "ids": [1]}',
    b'{"id": "", "ids": [1]}',
    b'{"id": null, "ids": [1]}',
    b'{"id": true, "ids": [1]}',
    b'{"id": 1.5, "ids": [1]}',
    b'{"id": -1, "ids": [1]}',
    b'{"id": 01, "ids": [1]}',
    '{"id": "é", "ids": [1]}'.encode(),
    b'{"id": "\xff", "ids": [1]}',
    b'{"id": "a\x00", "ids": [1]}',
    b'{"id": "a\x7f", "ids": [1]}',
]


def plainly_read(lines, request_id_field="id"):
    token_ids, offsets, request_ids = read_id_lines(lines, "ids", request_id_field)
    spans = zip(offsets[:-1].tolist(), offsets[1:].tolist())
    assert not token_ids.flags.writeable and token_ids.dtype == np.int32 and offsets[-1] == len(token_ids)
    return [token_ids[start:end].tolist() for start, end in spans], request_ids


def test_plain_lines_are_read_as_json_reads_them():
    token_ids, request_ids = plainly_read(PLAIN)
    assert token_ids == [json.loads(line)["ids"] for line in PLAIN]
    assert request_ids == [str(json.loads(line)["id"]) for line in PLAIN]
    assert plainly_read([b'{"ids": [4, 5]}'], None) == ([[4, 5]], None)
    assert plainly_read([]) == ([], [])


@pytest.mark.parametrize("line", NOT_PLAIN)
def test_reading_stops_at_a_line_that_is_not_plain(line):
    assert plainly_read([*PLAIN, line, *PLAIN]) == plainly_read(PLAIN)


def test_reading_stops_at_what_is_not_a_line():
    refusal = Refusal("line_too_long", "x", expected=1, found=2, fix="x")
    assert plainly_read([PLAIN[0], refusal, PLAIN[1]]) == plainly_read(PLAIN[:1])


PIECES = st.sampled_from('{ } [ ] , : " \\ "id" "ids" "x" 1 0 23 -4 5.5 1e2 true null NaN \t é'.split(" "))


@settings(max_examples=400, deadline=None)
@given(st.one_of(st.lists(PIECES, max_size=14).map("".join), st.tuples(st.sampled_from(PLAIN), PIECES, st.integers(0, 60)).map(
    lambda parts: parts[0].decode()[: parts[2]] + parts[1] + parts[0].decode()[parts[2] :]
)))
def test_a_line_that_counts_as_plain_means_to_json_what_was_read(line):
    token_ids, request_ids = plainly_read([line.encode()])
    if token_ids:
        value = _parsed(line)
        assert isinstance(value, dict) and value["ids"] == token_ids[0] and str(value["id"]) == request_ids[0]
        assert all(type(token) is int for token in value["ids"]) and type(value["id"]) in (str, int)


def rows_of_every_kind():
    """Rows of JSON values: most plain, some refused for each reason that ids have."""
    rows = [{"ids": [n, n + 1, n % 7][: 1 + n % 3], "id": f"r{n}"} for n in range(40)]
    rows[3]["ids"] = [VOCAB_SIZE]
    rows[9]["ids"] = []
    rows[12]["ids"] = [1, 2, 3, 4, 5, 6]
    rows[17]["ids"] = None
    rows[20] = {"ids": rows[1]["ids"], "id": "r1"}
    rows[21] = {"ids": [5], "id": "r2"}
    rows[30]["ids"] = [2**40]
    return rows


def told(rows):
    """What became of rows, in a form that compares."""
    return [
        (row.number, row.line, row.request_id, row.refusal.to_dict())
        if isinstance(row, RefusedRow)
        else (row.number, row.item.request_id, row.item.work_item_id, row.item.token_ids.tolist(), row.item.token_hash)
        for row in rows
    ]


def made(rows, fields=FIELDS, policy=POLICY):
    return list(work_items(rows, fields, None, policy, vocab_size=VOCAB_SIZE, source="file"))


def written_folder(folder, table):
    """As save_to_disk writes it, in one record batch: the reader cuts it."""
    folder.mkdir()
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    with pa.ipc.new_stream(str(folder / "data.arrow"), table.schema) as stream:
        stream.write_table(table)
    return folder


@pytest.fixture(params=["jsonl", "parquet", "large lists", "fixed lists", "arrow", "arrow fixed lists"])
def written(request, tmp_path):
    """Write rows as the kind asks; returns the path."""

    def write(rows):
        if request.param == "jsonl":
            (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            return tmp_path / "rows.jsonl"
        width = len(rows[0]["ids"] or [])
        fixed, large = pa.list_(pa.int32(), width), pa.large_list(pa.int64())
        type = fixed if "fixed" in request.param else large if "large" in request.param else pa.list_(pa.int64())
        if type is fixed and any(len(row["ids"] or []) != width for row in rows):
            pytest.skip("rows of several lengths are not a fixed list")
        columns = {"id": pa.array([row["id"] for row in rows])} if "id" in rows[0] else {}
        table = pa.table({**columns, "ids": pa.array([row["ids"] for row in rows], type)})
        if "arrow" in request.param:
            return written_folder(tmp_path / "rows", table)
        pq.write_table(table, tmp_path / "rows.parquet", row_group_size=16)
        return tmp_path / "rows.parquet"

    return write


def test_refused_rows_among_plain_ones_are_refused_as_one_by_one(written):
    rows = rows_of_every_kind()
    path = written(rows)
    opened = open_input(str(path), FIELDS)
    has_lines = path.suffix == ".jsonl"
    alone = made(Row(n, n + 1 if has_lines else None, row, None) for n, row in enumerate(rows))
    assert told(made(opened.pieces())) == told(made(opened.rows())) == told(alone)
    assert sum(isinstance(row, RefusedRow) for row in alone) == 7


@pytest.mark.parametrize("has_request_ids", [True, False])
def test_plain_rows_come_many_at_a_time_with_their_numbers_hashes_and_fractions(written, has_request_ids):
    rows = [{"id": n, "ids": [n % 90, 5]} if has_request_ids else {"ids": [n % 90, 5]} for n in range(1500)]
    fields = FIELDS if has_request_ids else Fields(ids="ids")
    opened = open_input(str(written(rows)), fields)
    pieces = list(opened.pieces())
    assert all(isinstance(piece, IdRows) for piece in pieces) and sum(map(len, pieces)) == 1500 > len(pieces) > 1
    items = made(pieces, fields)
    assert [row.number for row in items] == list(range(1500))
    for row in items:
        assert isinstance(row, AcceptedRow) and row.item.request_id == str(row.number) and not row.item.token_ids.flags.writeable
        assert row.item.token_ids.tolist() == rows[row.number]["ids"] and row.item.token_hash == token_hash(row.item.token_ids)
    fractions = [row.fraction for row in items]
    assert fractions == sorted(fractions) and 0 < fractions[0] < 0.01 and fractions[-1] == 1.0


def test_a_policy_that_makes_a_loss_mask_or_cuts_looks_at_each_row(written):
    rows = [{"id": f"r{n}", "ids": [1, 2, 3, 4, 5, 6, 7]} for n in range(20)]
    opened = open_input(str(written(rows)), FIELDS)
    ones = token_policy(FIELDS, None, LIMITS, loss_mask="ones")
    assert [row.item.loss_mask.tolist() for row in made(opened.pieces(), policy=ones)] == [[1] * 7] * 20
    cut = token_policy(FIELDS, None, LIMITS, max_length=4, too_long="truncate-left")
    items = [row.item for row in made(opened.pieces(), policy=cut)]
    assert {(*item.token_ids.tolist(), item.truncated_from) for item in items} == {(4, 5, 6, 7, 7)}


def test_what_is_not_a_request_id_is_refused_row_by_row(tmp_path):
    ids = pa.array([[1], [2], [3]], pa.list_(pa.int32()))
    names = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2]), pa.array(["a", None, ""]))
    folder, lines = written_folder(tmp_path / "rows", pa.table({"id": names, "ids": ids})), tmp_path / "rows.jsonl"
    lines.write_text('{"ids": [1]}\n')
    twice = Fields(ids="ids", request_id="ids")
    for path, fields, codes in (
        (folder, FIELDS, [None, "missing_field", "bad_request_id"]),
        (folder, twice, ["bad_request_id"] * 3),
        (lines, twice, ["bad_request_id"]),
    ):
        rows = made(open_input(str(path), fields).pieces(), fields)
        assert [row.refusal.code if isinstance(row, RefusedRow) else None for row in rows] == codes
