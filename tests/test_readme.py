"""README's commands, run one after another in one folder, as a reader would."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests" / "worker"))

from nats_server import MISSING, PROGRAM, NatsServer  # noqa: E402

README = (ROOT / "README.md").read_text(encoding="utf-8")
PLACES = {"DIR_OR_GGUF": str(tiny.smollm2_gguf())}
WAITS_FOR_EVER = ("work", "store")


def commands(heading: str) -> list[list[str]]:
    """The words of every trtllm-extract command of a section, without comments."""
    section = re.split(r"^## ", README.partition(f"## {heading}\n")[2], flags=re.MULTILINE)[0]
    lines = [line.partition("#")[0] for block in re.findall(r"```\n(.*?)```", section, re.DOTALL) for line in block.splitlines()]
    return [line.replace('"', "").split()[1:] for line in lines if line.startswith("trtllm-extract ")]


def run(words, folder, **places):
    places |= PLACES
    words = [places.get(word, word) for word in words] + (["--leave-when-idle", "2"] if words[0] in WAITS_FOR_EVER else [])
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tensorrt_llm_ext.cli", *words]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, env=environment)
    assert result.returncode == 0, f"{words}: {result.stdout[-2000:]}{result.stderr[-2000:]}"
    return result.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reader")
    (folder / "prompts.jsonl").write_text("".join(f'{{"text": "Why is the sky {color}?"}}\n' for color in ("blue", "red", "dark")))
    turns = '[{"role": "user", "content": "Is it far?"}, {"role": "assistant", "content": "No, %s."}]'
    (folder / "chats.jsonl").write_text("".join(f'{{"messages": {turns % answer}}}\n' for answer in ("two miles", "a mile")))
    return folder


@pytest.fixture(scope="module")
def own_prompts(folder):
    return [run(words, folder) for words in commands("Your own prompts")]


def test_your_own_prompts(own_prompts, folder):
    assert len(own_prompts) == 2 and "3 + 0 + 0 + 0 = 3" in own_prompts[1]
    assert (folder / "vectors" / "vectors.lance").is_dir()


def test_every_token_for_training(folder):
    printed = [run(words, folder) for words in commands("Every token, for training")]
    assert len(printed) == 5 and "2 + 0 + 0 + 0 = 2" in printed[1]
    assert "The dump is what its format promises." in printed[-1]


@pytest.mark.skipif(PROGRAM is None, reason=MISSING)
def test_many_machines(own_prompts, folder):
    server = NatsServer(folder).start()
    try:
        printed = [run(words, folder, **{"nats://127.0.0.1:4222": server.url}) for words in commands("Many machines")]
    finally:
        server.stop()
    assert len(printed) == 4 and "stored + refused + failed + open = submitted: 3 + 0 + 0 + 0 = 3" in printed[-1]
