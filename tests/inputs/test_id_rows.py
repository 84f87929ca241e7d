"""Rows of token ids that are read many at a time become what they become one by one."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fakes import LIMITS
from tensorrt_llm_ext.fingerprint import token_hash
from tensorrt_llm_ext.inputs import AcceptedRow, Fields, IdRows, RefusedRow, Row, open_input, token_policy, work_items

FIELDS = Fields(ids="ids", request_id="id")
POLICY = token_policy(FIELDS, None, LIMITS, max_length=5)
VOCAB_SIZE = 100

PLAIN = [
    b'{"id": "a", "ids": [1, 2, 3]}',
    b'{"ids":[0],"id":"b c"}',
    b' \t{ "ids" : [ 1 ,2 ] , "id" : 17 , "text" : "x: y" , "n" : -1.5e+3 , "b" : true, "c": null, "d": [[{}]] } \r',
    b'{"id": -1, "ids": [2147483647, -2147483648, -0]}',
    '{"\\u0069d": "\\ud83d\\ude00", "ids": [], "é": NaN}'.encode(),
    b'{"id": 99999999999999999999999999, "ids": [1]}',
]
REFUSED = [
    (b"", "empty_row"),
    (b"[]", "not_an_object"),
    (b"{}", "missing_field"),
    (b'{"id": "a"}', "missing_field"),
    (b'{"ids": [1]}', "missing_field"),
    (b'{"id": "a", "ids": null}', "missing_field"),
    (b'{"id": "a", "ids": 1}', "bad_ids"),
    (b'{"id": "a", "ids": [1, 1.0]}', "bad_ids"),
    (b'{"id": "a", "ids": [1, 1e1]}', "bad_ids"),
    (b'{"id": "a", "ids": [1, true]}', "bad_ids"),
    (b'{"id": "a", "ids": [1, null]}', "bad_ids"),
    (b'{"id": "a", "ids": [1, "1"]}', "bad_ids"),
    (b'{"id": "a", "ids": [1, [1]]}', "bad_ids"),
    (b'{"id": "a", "ids": [1, 2147483648]}', "outside_vocabulary"),
    (b'{"id": "a", "ids": [1, -2147483649]}', "outside_vocabulary"),
    (b'{"id": "a", "ids": [1, 99999999999999999999999999]}', "outside_vocabulary"),
    (b'{"id": "a", "ids": [01]}', "not_json"),
    (b'{"id": "a", "ids": [1,]}', "not_json"),
    (b'{"id": "a", "ids": [1]', "not_json"),
    (b'{"id": "a", "ids": [1]}{}', "not_json"),
    (b'{"id": "a", "ids": [1], "ids": [1]}', "not_json"),
    (b'{"id": "a", "ids": [1], "x": [{"y": 1, "y": 1}]}', "not_json"),
    (b'{"id": "", "ids": [1]}', "bad_request_id"),
    (b'{"id": true, "ids": [1]}', "bad_request_id"),
    (b'{"id": 1.0, "ids": [1]}', "bad_request_id"),
    (b'{"id": "\\ud800", "ids": [1]}', "lone_surrogate"),
    (b'{"id": "\xff", "ids": [1]}', "not_utf8"),
]


def test_lines_of_ids_come_together_with_the_values_that_json_reads(jsonl):
    (piece,) = open_input(str(jsonl(*PLAIN)), FIELDS).pieces()
    values = [json.loads(line) for line in PLAIN]
    assert piece.token_ids.dtype == np.int32 and not piece.token_ids.flags.writeable and (piece.number, piece.line) == (0, 1)
    assert [row.fields["ids"].tolist() for row in piece.rows(FIELDS)] == [value["ids"] for value in values]
    assert piece.request_ids == [str(value["id"]) for value in values]


@pytest.mark.parametrize(("line", "code"), REFUSED)
def test_a_refused_line_stands_alone_between_those_around_it(jsonl, line, code):
    pieces = list(open_input(str(jsonl(*PLAIN, line, *PLAIN)), FIELDS).pieces())
    assert [type(piece) for piece in pieces] == [IdRows, Row, IdRows]
    assert [(piece.number, piece.line) for piece in pieces] == [(0, 1), (6, 7), (7, 8)]
    (refused,) = made(pieces[1:2])
    assert refused.refusal.code == code and refused.line == 7


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
