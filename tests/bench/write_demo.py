"""Writes into README.md what ``make demo`` prints from its summary on: ``.venv/bin/python tests/bench/write_demo.py``, on a quiet machine."""

import subprocess

from write_table import README, ROOT, replaced

FIRST_LINE = "\nstored "


def summary(printed: str) -> str:
    """The end of what the demo printed, as a block of Markdown. Raises ValueError when there is no summary."""
    return "```\n" + printed[printed.index(FIRST_LINE) :].strip() + "\n```"


def main() -> None:
    printed = subprocess.run(["make", "--no-print-directory", "demo"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    README.write_text(replaced(README.read_text(encoding="utf-8"), summary(printed), "demo"), encoding="utf-8")


if __name__ == "__main__":
    main()
