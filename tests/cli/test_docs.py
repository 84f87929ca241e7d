"""The page of help texts is the command's own help, word for word."""

import write_cli_docs

from tensorrt_llm_ext.cli import main


def test_the_page_is_current():
    assert write_cli_docs.PAGE.read_text(encoding="utf-8") == write_cli_docs.page(), "run: make docs"


def test_the_page_has_every_verb_with_its_options():
    page = write_cli_docs.page()
    for name in main.list_commands(None):
        section = page.split(f"## trtllm-extract {name}\n")[1].split("\n## ")[0]
        assert f"Usage: trtllm-extract {name}" in section and "--json" in section
