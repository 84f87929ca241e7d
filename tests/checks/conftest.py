"""One tiny engine with every kind of tap, its checkpoint, and ways to spoil a copy of it."""

import shutil
from functools import partial

import numpy as np
import pytest
import tiny
from fakes import falsify_contract

from tensorrt_llm_ext.builder import build_engine
from tensorrt_llm_ext.fingerprint import token_hash
from tensorrt_llm_ext.results.record import WorkItem

TAPS = "final@last,layer:3@mean,layer:4@all,final:pre@last"


@pytest.fixture(scope="session")
def checkpoint_path(tmp_path_factory):
    return tiny.tiny_checkpoint(tmp_path_factory.mktemp("checks") / "checkpoint", "qwen3")


@pytest.fixture(scope="session")
def published_engine(checkpoint_path):
    """The engine that tests copy; nothing writes to it."""
    engine = checkpoint_path.parent / "engine"
    build_engine(checkpoint_path, engine, taps=TAPS, max_seq_len=256)
    return engine


@pytest.fixture
def engine_path(published_engine, tmp_path):
    """A copy of the engine that a test may spoil."""
    return shutil.copytree(published_engine, tmp_path / "engine")


@pytest.fixture(scope="session")
def items():
    """Five requests of 1 to 40 tokens."""
    return [_work_item(length) for length in (7, 1, 40, 3, 12)]


@pytest.fixture
def edit_contract(engine_path):
    """Change the copy's contract.json: a lie that only numbers can uncover."""

    return partial(falsify_contract, engine_path)


def _work_item(length):
    ids = np.random.default_rng(length).integers(3, 259, length, dtype=np.int32)
    return WorkItem(f"r{length}", f"test#{length}", ids, token_hash(ids))
