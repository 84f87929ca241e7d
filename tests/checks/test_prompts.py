"""Prompts for checks are read like any input: refused rows are kept with their reasons, and no prompt at all is an error."""

import json

import pytest

from tensorrt_llm_ext.checkpoint import Tokenizer
from tensorrt_llm_ext.checks import prompts, read_prompts
from tensorrt_llm_ext.errors import InputError
from tensorrt_llm_ext.inputs import Fields
from tensorrt_llm_ext.recipes import read_contract


@pytest.fixture
def read(published_engine):
    contract, tokenizer = read_contract(published_engine), Tokenizer.load(published_engine)
    return lambda path, fields=Fields(), **options: read_prompts(path, fields, contract, tokenizer, **options)


@pytest.fixture
def write(tmp_path):
    def written(*rows):
        (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(tmp_path / "prompts.jsonl")

    return written


def test_rows_become_work_items_and_refusals(read, write):
    found = read(write({"text": "one"}, {"text": 5}, {"text": "x" * 300}, {"text": "four"}))
    assert [item.request_id for item in found.items] == ["0", "3"] and found.num_tokens == 2 + 3 + 4
    assert [row.refusal.code for row in found.refused] == ["not_text", "too_long"]


def test_a_limit_counts_rows(read, write):
    assert len(read(write({"text": "one"}, {"text": "two"}, {"text": "three"}), limit=2).items) == 2


def test_without_a_path_the_demo_prompts_are_read_under_their_own_ids(read):
    found = read(None, limit=4)
    assert [item.request_id for item in found.items] == ["p001", "p002", "p003", "p004"]


@pytest.mark.parametrize(("rows", "found"), [([], "no rows"), ([{"text": 5}], "1 rows, all refused; the first")])
def test_no_prompt_that_can_run_is_an_error(read, write, rows, found):
    with pytest.raises(InputError, match="holds no prompt that this engine can run") as error:
        read(write(*rows))
    assert error.value.found.startswith(found)


def test_without_a_path_and_without_a_checkout_the_input_is_asked_for(read, tmp_path, monkeypatch):
    monkeypatch.setattr(prompts, "DEMO_PROMPTS", tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="no prompts were named") as error:
        read(None)
    assert "--input" in error.value.fix
