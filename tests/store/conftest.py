"""What the tests of the store share; the records themselves are made in store_answers.py."""

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "backends")]

from store_answers import make_answer, make_header  # noqa: E402


@pytest.fixture
def header():
    return make_header()


@pytest.fixture
def fill():
    """Append rows and commit them."""

    def append_and_commit(store, rows, window_end=None):
        for row in rows:
            store.append(row, *make_answer(store.header, row))
        return store.commit(window_end or max(rows) + 1)

    return append_and_commit
