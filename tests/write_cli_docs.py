"""Writes docs/cli.md: the help of the command and of every verb, as they are. ``make docs``."""

from pathlib import Path

import click

from tensorrt_llm_ext.cli import main

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"
_WIDTH = 100
_INTRODUCTION = """# The command

Written by `make docs` from the command's own help; a test compares them.
"""


def page() -> str:
    """The whole page."""
    width = {"terminal_width": _WIDTH, "max_content_width": _WIDTH}
    with click.Context(main, info_name="trtllm-extract", **width, **main.context_settings) as context:
        sections = [_section(main, context)]
        for name in main.list_commands(context):
            verb = main.get_command(context, name)
            with click.Context(verb, info_name=name, parent=context) as verb_context:
                sections.append(_section(verb, verb_context))
    return "\n".join([_INTRODUCTION, *sections])


def _section(command: click.Command, context: click.Context) -> str:
    lines = "\n".join(line.rstrip() for line in command.get_help(context).splitlines())
    return f"## {context.command_path}\n\n```\n{lines}\n```\n"


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
