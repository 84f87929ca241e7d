"""Errors say what happened, what was expected, what was found and what to do."""

import inspect
import pickle

import pytest

from tensorrt_llm_ext import errors
from tensorrt_llm_ext.errors import ExtractionError, Refusal, nearest_name

CLASSES = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, ExtractionError)]


def test_the_drawn_tree_is_the_real_tree():
    drawn, path = {}, []
    for line in errors.__doc__.splitlines():
        name = line.strip(" │├└─").split(" ")[0]
        if not line.startswith("    ") or not hasattr(errors, name):
            continue
        depth = (len(line) - len(line.lstrip(" │├└─"))) // 4 - 1
        path[depth:] = [name]
        drawn[name] = path[depth - 1] if depth else "Exception"
    assert drawn == {cls.__name__: cls.__base__.__name__ for cls in CLASSES}


def test_an_error_states_expected_found_and_what_to_do():
    error = ExtractionError("the file is short", expected="10 bytes", found="4 bytes", fix="copy it again")
    assert str(error).splitlines() == [
        "the file is short",
        "  expected: 10 bytes",
        "  found:    4 bytes",
        "  to do:    copy it again",
    ]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_error_crosses_a_process_border_whole(cls):
    code = ("too_long",) if cls is Refusal else ()
    error = cls(*code, "what", expected=1, found=2, fix="do")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls and copy.to_dict() == error.to_dict()


def test_the_nearest_name_is_offered_and_all_names_when_none_is_near():
    assert nearest_name("vocab_sise", ["vocab_size", "head_dim"]) == "did you mean 'vocab_size'?"
    assert nearest_name("zzz", ["vocab_size", "head_dim"]) == "known: head_dim, vocab_size"
