"""Parts of an input: by a stable hash, each row in exactly one, numbers unchanged."""

import json

import pytest

from tensorrt_llm_ext.errors import InputError
from tensorrt_llm_ext.inputs import Fields, Sharding, open_input
from tensorrt_llm_ext.inputs.sharding import part_of


def test_every_row_is_in_exactly_one_part_with_its_own_number(jsonl):
    lines = [json.dumps({"id": f"r{n}", "ids": [n]}) for n in range(60)]
    lines[7], lines[9], lines[11] = "not json", "{}", json.dumps({"id": "\ud800"})
    path, fields = jsonl(*lines), Fields(ids="ids", request_id="id")
    parts = [list(Sharding(i, 4).rows(open_input(str(path), fields).rows(), fields)) for i in range(4)]
    assert sorted(row.number for part in parts for row in part) == list(range(60))
    assert all(len(part) > 5 for part in parts)


def test_the_hash_is_the_same_everywhere_and_for_ever():
    assert part_of("r1", 1000) == 459


@pytest.mark.parametrize("text", ["3", "4/4", "a/b", "-1/2", "1/0", "1/2/3"])
def test_other_texts_are_not_parts(text):
    with pytest.raises(InputError, match="not a part of a run"):
        Sharding.parse(text)


def test_a_part_is_read_from_its_text():
    assert Sharding.parse("1/3") == Sharding(1, 3)
