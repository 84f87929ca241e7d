"""What the tests of the job share: toy engines, inputs of token ids, and a way to run a job over them."""

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "backends")]

from toy_engines import LAST, MEAN, Toy, write_engine  # noqa: E402
from toy_jobs import LIMITS, write_input  # noqa: E402


@pytest.fixture(scope="session")
def engine(tmp_path_factory):
    """An engine directory with a last and a mean tap; one token's embedding is NaN."""
    return write_engine(tmp_path_factory.mktemp("engine"), Toy(taps=(LAST, MEAN), limits=LIMITS))


@pytest.fixture
def prompts(tmp_path):
    """Fifty rows of token ids, three of them not to be served and one that turns NaN inside the model."""
    return write_input(tmp_path / "prompts.jsonl")
