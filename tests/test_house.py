"""The house: a room imports only rooms above it, and no file carries a name that says nothing."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "tensorrt_llm_ext"

ROOMS = [
    "errors",
    "fingerprint",
    "taps",
    "_runtime",
    "checkpoint",
    "graph",
    "recipes",
    "results",
    "backends",
    "runtime",
    "inputs",
    "builder",
    "store",
    "job",
    "checks",
    "worker",
    "cli",
]
FILES = sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_rooms(path: Path) -> set[str]:
    """Every room a file imports, wherever in the file the import stands."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "tensorrt_llm_ext":
            rooms |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tensorrt_llm_ext."):
            rooms.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            rooms |= {name.split(".")[1] for name in (a.name for a in node.names) if name.startswith("tensorrt_llm_ext.")}
    return rooms - {"__version__"}


def test_the_walk_finds_the_package():
    assert len(FILES) > 20 and {room_of(path) for path in FILES} - {"__init__", "__main__"} <= set(ROOMS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_room_imports_only_rooms_above_it(path):
    room = room_of(path)
    if room in ("__init__", "__main__"):
        return
    above = set(ROOMS[: ROOMS.index(room) + 1])
    assert imported_rooms(path) <= above


def test_no_file_is_named_after_nothing():
    empty = re.compile(r"(^|_)(manager|handler|utils?|helpers?|common|misc|base|core|data)(_|$)")
    assert [path for path in FILES if empty.search(path.stem)] == []
