"""Which reader serves which input, and what refuses a whole run before its first row."""

import os
import socket
import threading

import pytest

from tensorrt_llm_ext.errors import InputError
from tensorrt_llm_ext.inputs import Fields, open_input


def test_the_text_field_is_named_text_unless_another_prompt_is_named():
    assert Fields().prompt == "text"
    assert Fields(messages="chat").prompt == "chat" and Fields(messages="chat").text is None
    assert Fields(ids="input_ids", request_id="key").names() == ["input_ids", "key"]


def test_two_fields_cannot_both_be_the_prompt():
    with pytest.raises(InputError, match="more than one field is named as the prompt") as caught:
        Fields(text="text", ids="ids")
    assert caught.value.found == "--text-field text, --ids-field ids"


@pytest.mark.parametrize("name", ["absent.jsonl", "absent.parquet", "absent.txt"])
def test_a_missing_file_is_named(tmp_path, name):
    with pytest.raises(InputError, match="does not exist"):
        open_input(str(tmp_path / name), Fields())


def test_an_unknown_extension_asks_for_the_format(tmp_path):
    path = tmp_path / "prompts.csv"
    path.write_text("a")
    with pytest.raises(InputError, match="says nothing about its format") as caught:
        open_input(str(path), Fields())
    assert "--format {jsonl,text,parquet,arrow}" in caught.value.fix


def test_the_format_can_be_said_instead(tmp_path):
    path = tmp_path / "prompts.csv"
    path.write_text("a\nb")
    assert [row.fields["text"] for row in open_input(str(path), Fields(), format="text").rows()] == ["a", "b"]


def test_standard_input_is_no_table():
    with pytest.raises(InputError, match="standard input cannot be read as parquet"):
        open_input("-", Fields(), format="parquet")


@pytest.mark.parametrize("fields", [Fields(messages="chat"), Fields(ids="ids"), Fields(request_id="id")])
def test_plain_text_has_no_fields(tmp_path, fields):
    path = tmp_path / "prompts.txt"
    path.write_text("a")
    with pytest.raises(InputError, match="plain text, which has no fields"):
        open_input(str(path), fields)


def test_what_cannot_be_opened_is_refused_at_once(tmp_path):
    with socket.socket(socket.AF_UNIX) as unopenable:
        unopenable.bind(str(tmp_path / "socket.jsonl"))
        for path in (tmp_path, tmp_path / "socket.jsonl"):
            with pytest.raises(InputError, match="cannot be opened"):
                open_input(str(path), Fields(), format="jsonl")


def test_a_pipe_with_a_name_is_read_once_and_has_no_size(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    opened = open_input(str(tmp_path / "pipe.txt"), Fields())
    threading.Thread(target=(tmp_path / "pipe.txt").write_text, args=("a\nb\n",)).start()
    assert [(row.fields["text"], row.fraction) for row in opened.rows()] == [("a", None), ("b", None)]
