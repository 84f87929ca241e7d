"""A field of a config is there, of its type and finite, or the error names it."""

import math

import pytest

from tensorrt_llm_ext.checkpoint.fields import (
    boolean,
    integer,
    names,
    number,
    positive_number,
    positive_numbers,
    settings,
)
from tensorrt_llm_ext.errors import DamagedCheckpoint


def test_missing_and_null_fields_take_the_default():
    assert integer({}, "n", 3) == integer({"n": None}, "n", 3) == 3
    assert boolean({"b": None}, "b", True) is True
    assert names({"n": None}, "n") == [] and settings({}, "s") == {}


def test_numbers_come_as_float_and_sizes_as_int():
    assert type(number({"x": 8}, "x")) is float and type(integer({"n": 8}, "n")) is int
    assert positive_numbers({"x": [1, 2.5]}, "x", 2) == (1.0, 2.5)


@pytest.mark.parametrize(
    ("read", "value", "expected"),
    [
        (integer, None, "a value"),
        (integer, 0, "a whole number of at least 1"),
        (integer, 2.0, "a whole number"),
        (integer, True, "a whole number"),
        (integer, "8", "a whole number"),
        (number, math.nan, "a finite number"),
        (number, math.inf, "a finite number"),
        (number, -1.0, "at least 0"),
        (number, "1e-6", "a finite number"),
        (number, True, "a finite number"),
        (positive_number, 0, "above 0"),
        (lambda f, k: positive_numbers(f, k, 2), [1.0], "a list of 2 numbers"),
        (lambda f, k: positive_numbers(f, k, 2), 1.0, "a list of 2 numbers"),
        (lambda f, k: positive_numbers(f, k, 2), [1.0, math.nan], "a finite number"),
        (lambda f, k: boolean(f, k, False), "true", "true or false"),
        (names, "a", "a list of names"),
        (names, [1], "a list of names"),
        (settings, [], "an object"),
    ],
)
def test_a_value_that_cannot_be_used_is_refused_by_the_name_of_its_field(read, value, expected):
    with pytest.raises(DamagedCheckpoint, match="the field 'some_key' cannot be used") as error:
        read({"some_key": value}, "some_key")
    assert expected in error.value.expected
