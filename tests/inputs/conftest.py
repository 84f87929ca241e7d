"""What the tests of input share."""

from pathlib import Path

import pytest

from fakes import LIMITS, VOCAB_SIZE, byte_tokenizer
from tensorrt_llm_ext.inputs import Fields, open_input, token_policy, work_items


@pytest.fixture(scope="session")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture
def read(tokenizer):
    """Read an input to the end: every row's work item or refusal."""

    def read_input(path, fields=None, *, format=None, tokenizer=tokenizer, **options):
        fields = fields or Fields()
        policy = token_policy(fields, tokenizer, LIMITS, **options)
        opened = open_input(str(path), fields, format=format)
        rows = opened.rows()
        return list(work_items(rows, fields, tokenizer, policy, vocab_size=VOCAB_SIZE, source=opened.name))

    return read_input


@pytest.fixture
def jsonl(tmp_path):
    """Write lines (bytes or text) to a JSONL file."""

    def write(*lines: str | bytes) -> Path:
        path = tmp_path / "prompts.jsonl"
        path.write_bytes(b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines))
        return path

    return write
