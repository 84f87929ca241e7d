"""Parquet files and Arrow folders: columns are checked once, rows one by one."""

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tensorrt_llm_ext.errors import InputError, Refusal
from tensorrt_llm_ext.inputs import Fields, open_input

CHAT = [{"role": "user", "content": "hello"}]
COLUMNS = {
    "text": ["a", None, "c"],
    "input_ids": [[1, 2], [], None],
    "chat": [CHAT, CHAT, None],
    "key": [7, 8, 9],
    "unused": ["x"] * 3,
}
ALL_FIELDS = [Fields(), Fields(ids="input_ids"), Fields(messages="chat"), Fields(request_id="key")]


@pytest.fixture
def parquet(tmp_path):
    def write(columns=COLUMNS, **options):
        path = tmp_path / "prompts.parquet"
        table = columns if isinstance(columns, pa.Table) else pa.table(columns)
        pq.write_table(table, path, **options)
        return path

    return write


@pytest.fixture
def arrow_folder(tmp_path):
    def save(columns=COLUMNS, **options):
        datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "saved", **options)
        return tmp_path / "saved"

    return save


@pytest.mark.parametrize("fields", ALL_FIELDS, ids=lambda fields: "+".join(fields.names()))
@pytest.mark.parametrize("kind", ["parquet", "arrow_folder"])
def test_every_row_comes_with_only_the_named_columns(request, kind, fields):
    opened = open_input(str(request.getfixturevalue(kind)()), fields)
    rows = list(opened.rows())
    assert [row.fields for row in rows] == [{name: COLUMNS[name][i] for name in fields.names()} for i in range(3)]
    assert [(row.number, row.line) for row in rows] == [(0, None), (1, None), (2, None)]
    assert opened.num_rows == 3 and [row.fraction for row in rows] == [1 / 3, 2 / 3, 1.0]


def test_row_groups_and_shards_keep_the_order(parquet, arrow_folder):
    columns = {"text": [str(i) for i in range(5000)]}
    for path in (parquet(columns, row_group_size=700), arrow_folder(columns, num_shards=13)):
        rows = list(open_input(str(path), Fields()).rows())
        assert [row.number for row in rows] == list(range(5000))
        assert [row.fields["text"] for row in rows] == columns["text"]


def test_a_selection_is_saved_in_its_own_order(tmp_path):
    chosen = datasets.Dataset.from_dict({"text": list("abcdef")}).select([4, 1, 5])
    chosen.save_to_disk(tmp_path / "saved")
    assert [row.fields["text"] for row in open_input(str(tmp_path / "saved"), Fields()).rows()] == ["e", "b", "f"]


def test_a_missing_column_stops_the_run_and_the_nearest_is_offered(parquet, arrow_folder):
    for path in (parquet(), arrow_folder()):
        with pytest.raises(InputError, match="has no column 'tezt'") as caught:
            open_input(str(path), Fields(text="tezt"))
        assert "did you mean 'text'?" in caught.value.fix


@pytest.mark.parametrize(
    "fields, wanted",
    [
        (Fields(text="key"), "strings"),
        (Fields(ids="text"), "lists of integers"),
        (Fields(ids="halves"), "lists of integers"),
        (Fields(messages="input_ids"), "lists of structs"),
        (Fields(request_id="halves"), "strings or integers"),
    ],
)
def test_a_column_of_the_wrong_type_stops_the_run(parquet, fields, wanted):
    with pytest.raises(InputError, match="has a type that cannot be read as this") as caught:
        open_input(str(parquet({**COLUMNS, "halves": [[0.5]] * 3})), fields)
    assert caught.value.expected.startswith(wanted)


def test_dictionary_columns_are_read_as_their_values(parquet):
    table = pa.table({"text": pa.array(["a", "b", "a"]).dictionary_encode()})
    assert [row.fields["text"] for row in open_input(str(parquet(table)), Fields()).rows()] == ["a", "b", "a"]


def test_a_string_that_is_not_utf8_refuses_only_its_row(parquet):
    column = pa.Array.from_buffers(pa.string(), 3, pa.array([b"a", b"\xff", b"c"]).buffers())
    rows = list(open_input(str(parquet(pa.table({"text": column}))), Fields()).rows())
    assert isinstance(rows[1].fields, Refusal) and rows[1].fields.code == "not_utf8"
    assert [rows[0].fields["text"], rows[2].fields["text"]] == ["a", "c"]


@pytest.mark.parametrize("keep", [0, 4, 100, -8])
def test_a_truncated_parquet_file_stops_the_run(parquet, keep):
    path = parquet()
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InputError, match="cannot be read"):
        open_input(str(path), Fields())


def test_damage_within_a_parquet_file_stops_the_run_when_it_is_met(parquet):
    path = parquet({"text": [f"text {i}" for i in range(20_000)]}, row_group_size=5000, compression="zstd")
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2 : len(whole) // 2 + 2000] = bytes(2000)
    path.write_bytes(whole)
    rows = open_input(str(path), Fields()).rows()
    with pytest.raises(InputError, match="cannot be read"):
        for _ in rows:
            pass


@pytest.mark.parametrize("cut", [3000, 8], ids=["within a batch", "between two batches"])
def test_a_truncated_arrow_file_stops_the_run(arrow_folder, cut):
    folder = arrow_folder({"text": [str(i) for i in range(5000)]})
    (file,) = folder.glob("data-*.arrow")
    file.write_bytes(file.read_bytes()[:-cut])
    with pytest.raises(InputError, match="cannot be read"):
        open_input(str(folder), Fields())


def test_an_absent_shard_is_named(arrow_folder):
    folder = arrow_folder(num_shards=2)
    (folder / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(InputError, match="data files of .* are absent") as caught:
        open_input(str(folder), Fields())
    assert "data-00001-of-00002.arrow" in caught.value.found


def test_a_folder_of_splits_asks_for_one_of_them(tmp_path):
    split = datasets.Dataset.from_dict({"text": ["a"]})
    datasets.DatasetDict(train=split, test=split).save_to_disk(tmp_path / "saved")
    with pytest.raises(InputError, match="holds several splits") as caught:
        open_input(str(tmp_path / "saved"), Fields())
    assert "train" in caught.value.found and caught.value.fix.endswith("saved/train")


def test_another_folder_is_not_taken_for_a_dataset(tmp_path):
    with pytest.raises(InputError, match="is not a folder written by save_to_disk"):
        open_input(str(tmp_path), Fields())


@pytest.mark.parametrize(
    "name, content",
    [
        ("dataset_dict.json", "{bad"),
        ("dataset_dict.json", "[]"),
        ("state.json", '{"_data_files": [{"filename": 5}]}'),
        ("state.json", '{"_data_files": 5}'),
    ],
)
def test_a_damaged_list_of_files_is_named(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match="is not a folder written by save_to_disk"):
        open_input(str(tmp_path), Fields())
