"""One tiny engine for the verbs, and a way to run the command."""

import json

import pytest
import tiny
from click.testing import CliRunner

from tensorrt_llm_ext.builder import build_engine
from tensorrt_llm_ext.cli import main


@pytest.fixture(scope="session")
def checkpoint_path(tmp_path_factory):
    return tiny.tiny_checkpoint(tmp_path_factory.mktemp("cli") / "checkpoint", "qwen2")


@pytest.fixture(scope="session")
def engine_path(checkpoint_path):
    engine = checkpoint_path.parent / "engine"
    build_engine(checkpoint_path, engine, taps="final@last,layer:3@all", max_seq_len=128)
    return engine


@pytest.fixture(scope="session")
def prompts_path(checkpoint_path):
    """Four prompts, the third too long for the engine."""
    path = checkpoint_path.parent / "prompts.jsonl"
    texts = ["one", "A second prompt.", "x" * 200, "The fourth, and last."]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def command():
    """Run the command with these words; its result holds exit code, stdout and stderr."""
    return lambda *words: CliRunner().invoke(main, [str(word) for word in words])
