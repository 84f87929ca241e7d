"""What verbs draw on a terminal: progress on standard error, tables on standard output. Without a terminal no progress."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tensorrt_llm_ext.cli._streams import is_terminal

_FILE_WIDTH = 160  # columns of a table that goes to a file or a pipe


@contextmanager
def steps_shown() -> Iterator[Callable[[str, int, int], None]]:
    """Give a function ``(step, done, total)`` that draws one bar a step, until the block ends."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), disable=not is_terminal(sys.stderr), transient=True) as progress:
        tasks = {}

        def show(step: str, done: int, total: int) -> None:
            if step not in tasks:
                tasks[step] = progress.add_task(step, total=total)
            progress.update(tasks[step], completed=done, total=total)

        yield show


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Print a table; numbers stand to the right, when every cell of their column is one."""
    table = Table(title=title, title_justify="left")
    for place, name in enumerate(columns):
        is_number = all(_is_number(row[place]) for row in rows)
        table.add_column(name, justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(width=None if is_terminal(sys.stdout) else _FILE_WIDTH, highlight=False, markup=False).print(table)


def _is_number(cell: str) -> bool:
    return cell.replace(",", "").replace(".", "").replace("-", "").replace("e", "").replace("x", "").isdigit()
