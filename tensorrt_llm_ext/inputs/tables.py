"""Parquet files and the Arrow folders that ``datasets.save_to_disk`` writes: columns instead of lines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tensorrt_llm_ext.errors import InputError, Refusal, nearest_name
from tensorrt_llm_ext.inputs.id_rows import IdRows, columns_of_ids, one_by_one
from tensorrt_llm_ext.inputs.rows import Fields, Row

_BATCH_ROWS = 1024
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


class ParquetInput:
    """A Parquet file, read a piece of a row group at a time, only the columns that are needed."""

    def __init__(self, path: str, fields: Fields) -> None:
        self.name = Path(path).name
        self._path = path
        self._fields = fields
        with _damage_named(path), pq.ParquetFile(path) as file:
            self.num_rows = file.metadata.num_rows
            _check_schema(file.schema_arrow, fields, path)

    def rows(self) -> Iterator[Row]:
        return one_by_one(self.pieces(), self._fields)

    def pieces(self) -> Iterator[Row | IdRows]:
        with _damage_named(self._path), pq.ParquetFile(self._path, pre_buffer=False) as file:
            batches = file.iter_batches(_BATCH_ROWS, columns=self._fields.names())
            yield from _rows(batches, self._fields, self.num_rows)


class ArrowFolderInput:
    """A folder written by ``datasets.save_to_disk``, read without that library, file by file, memory-mapped."""

    def __init__(self, path: str, fields: Fields) -> None:
        self.name = Path(path).name
        self._path = path
        self._fields = fields
        self._files = _files_of_folder(Path(path))
        self.num_rows = 0
        for file in self._files:
            with _damage_named(str(file)), pa.memory_map(str(file)) as mapped, pa.ipc.open_stream(mapped) as stream:
                _check_schema(stream.schema, fields, str(file))
                self.num_rows += sum(batch.num_rows for batch in stream)  # headers only: nothing is copied
                if mapped.read_at(len(_END_OF_STREAM), mapped.size() - len(_END_OF_STREAM)) != _END_OF_STREAM:
                    raise EOFError("the end of the stream is missing")  # Arrow itself takes a cut between batches for an end

    def rows(self) -> Iterator[Row]:
        return one_by_one(self.pieces(), self._fields)

    def pieces(self) -> Iterator[Row | IdRows]:
        yield from _rows(self._batches(), self._fields, self.num_rows)

    def _batches(self) -> Iterator[pa.RecordBatch]:
        for file in self._files:
            with _damage_named(str(file)), pa.memory_map(str(file)) as mapped, pa.ipc.open_stream(mapped) as stream:
                for batch in stream:
                    for start in range(0, batch.num_rows, _BATCH_ROWS):
                        yield batch.select(self._fields.names()).slice(start, _BATCH_ROWS)


def _files_of_folder(folder: Path) -> list[Path]:
    """The data files in the order in which ``state.json`` lists them: the order of the rows."""
    try:
        if (folder / "dataset_dict.json").is_file():
            splits = ", ".join(json.loads((folder / "dataset_dict.json").read_text())["splits"])
            raise InputError(
                f"'{folder}' holds several splits",
                expected="one split",
                found=f"the splits {splits}",
                fix=f"name the folder of a split, for example {folder / splits.split(', ')[0]}",
            )
        names = [str(Path(file["filename"])) for file in json.loads((folder / "state.json").read_text())["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"'{folder}' is not a folder written by save_to_disk",
            expected="a state.json that lists the data files, or a dataset_dict.json that lists splits",
            found=f"{type(error).__name__}: {error}",
            fix="name a file, or save the dataset with save_to_disk",
        ) from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise InputError(
            f"data files of '{folder}' are absent",
            expected=f"{len(names)} files, as state.json lists them",
            found=f"no {', '.join(missing)}",
            fix="copy the whole folder",
        )
    return [folder / name for name in names]


@contextmanager
def _damage_named(path: str) -> Iterator[None]:
    """Map what Arrow says of a damaged file; an error of ours passes."""
    try:
        yield
    except (pa.ArrowException, OSError, EOFError) as error:
        raise InputError(
            f"'{path}' cannot be read",
            expected="a whole file of its format",
            found=f"{type(error).__name__}: {error}",
            fix="copy or write the file again; what is committed stays, and --resume goes on from there",
        ) from error


def _check_schema(schema: pa.Schema, fields: Fields, path: str) -> None:
    for name in fields.names():
        if schema.get_field_index(name) < 0:
            repeated = name in schema.names
            raise InputError(
                f"'{path}' has {'several columns' if repeated else 'no column'} '{name}'",
                expected=f"one column '{name}'",
                found=f"the columns {', '.join(schema.names)}",
                fix="rename the columns" if repeated else f"{nearest_name(name, schema.names)} (--text-field and its like)",
            )
        wanted, is_right = _WANTED[_kind(fields, name)]
        column_type = schema.field(name).type
        if not is_right(column_type.value_type if pa.types.is_dictionary(column_type) else column_type):
            raise InputError(
                f"the column '{name}' of '{path}' has a type that cannot be read as this",
                expected=wanted,
                found=column_type,
                fix="name another column, or write the column with this type",
            )


def _kind(fields: Fields, name: str) -> str:
    kinds = {fields.text: "text", fields.messages: "messages", fields.ids: "ids"}
    return kinds[name] if name == fields.prompt else "request_id"


def _is_text(type: pa.DataType) -> bool:
    return pa.types.is_string(type) or pa.types.is_large_string(type) or pa.types.is_string_view(type)


def _is_list_of(is_item: Callable[[pa.DataType], bool]) -> Callable[[pa.DataType], bool]:
    def is_right(type: pa.DataType) -> bool:
        lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
        return any(is_list(type) for is_list in lists) and is_item(type.value_type)

    return is_right


_WANTED = {
    "text": ("strings", _is_text),
    "messages": ("lists of structs, one for each message", _is_list_of(pa.types.is_struct)),
    "ids": ("lists of integers", _is_list_of(pa.types.is_integer)),
    "request_id": ("strings or integers", lambda type: _is_text(type) or pa.types.is_integer(type)),
}


def _rows(batches: Iterator[pa.RecordBatch], fields: Fields, num_rows: int) -> Iterator[Row | IdRows]:
    number = 0
    for batch in batches:
        fractions = [(place + 1) / num_rows for place in range(number, number + batch.num_rows)]
        if fields.ids is not None and (rows := columns_of_ids(batch, fields, number, None, fractions)) is not None:
            yield rows
        else:
            for place, value in enumerate(_values(batch)):
                yield Row(number + place, None, value, fractions[place])
        number += batch.num_rows


def _values(batch: pa.RecordBatch) -> Iterator[dict | Refusal]:
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:  # rare: find the rows that are to blame
        for row in range(batch.num_rows):
            try:
                yield batch.slice(row, 1).to_pylist()[0]
            except UnicodeDecodeError as error:
                yield Refusal(
                    "not_utf8", "a string of the row is not UTF-8", expected="UTF-8", found=error, fix="correct the row"
                )
