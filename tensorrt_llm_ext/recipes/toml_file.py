"""Frozen dataclasses from TOML: every key known, every value of the declared type and range, or a RecipeError.

A field's type says what its TOML value is: ``str``, ``bool``, ``int``, ``float``, a ``Literal``, ``X | None`` (the key
may be absent), ``tuple[X, ...]`` (an array), another dataclass (a table). ``within`` gives a number its range.
"""

from __future__ import annotations

import dataclasses
import tomllib
import types
import typing
from pathlib import Path
from typing import Any, Literal, TypeVar

from tensorrt_llm_ext.errors import RecipeError, nearest_name

DATA = Path(__file__).parents[2] / "build_recipes"  # beside this package, in a checkout and where it is installed

T = TypeVar("T")


def within(minimum: float, maximum: float = float("inf"), default: Any = dataclasses.MISSING) -> Any:
    """A dataclass field for a number from ``minimum`` to ``maximum``."""
    return dataclasses.field(default=default, metadata={"minimum": minimum, "maximum": maximum})


def check_ranges(instance: Any) -> None:
    """Raise RecipeError for a number out of range: what ``read`` checks in a file, for values that come from elsewhere."""
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        if field.metadata and value is not None:
            _require(_is_within(value, field.metadata), value, _range_words(field.metadata), "the recipe", field.name)


def find(name_or_path: str | Path, folder: Path, kind: str) -> Path:
    """Find a file by its path, or by the name it has in ``folder`` without ``.toml``."""
    path = Path(name_or_path)
    if path.suffix == ".toml" or path.parent != Path("."):
        return path
    known = {file.stem: file for file in sorted(folder.glob("*.toml"))}
    if path.name not in known:
        raise RecipeError(
            f"there is no {kind} named '{path.name}'",
            expected=nearest_name(path.name, known),
            found=f"'{path.name}'",
            fix=f"name one of {', '.join(known)}, or the path of a TOML file",
        )
    return known[path.name]


def read(path: Path, cls: type[T]) -> T:
    """Read the TOML file at ``path`` as a ``cls``. Raises RecipeError with the file and the key."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(
            f"'{path}' cannot be read", expected="a TOML file", found=error.strerror, fix="check the path"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"'{path}' is not TOML", expected="TOML", found=error, fix="correct the file there") from error
    return _from_table(cls, table, f"'{path}'", "")


def _from_table(cls: type[T], table: dict, file: str, prefix: str) -> T:
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for key in table:
        if key not in fields:
            raise RecipeError(
                f"{file} has an unknown key '{prefix}{key}'",
                expected=nearest_name(key, fields),
                found=f"'{prefix}{key}'",
                fix="correct or remove the key",
            )
    hints = typing.get_type_hints(cls)
    values = {}
    for name, field in fields.items():
        if name in table:
            values[name] = _value(table[name], hints[name], field.metadata, file, prefix + name)
        elif field.default is dataclasses.MISSING:
            raise RecipeError(
                f"{file} lacks the key '{prefix}{name}'",
                expected=f"{prefix}{name} = …",
                found="no such key",
                fix="add it",
            )
    return cls(**values)


def _value(value: Any, hint: Any, range_: dict, file: str, key: str) -> Any:
    options = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (hint,) = (option for option in options if option is not type(None))
        return _value(value, hint, range_, file, key)
    if typing.get_origin(hint) is Literal:
        _require(value in options, value, f"one of {', '.join(map(repr, options))}", file, key)
    elif typing.get_origin(hint) is tuple:
        _require(isinstance(value, list), value, "an array", file, key)
        return tuple(_value(item, options[0], range_, file, f"{key}[{i}]") for i, item in enumerate(value))
    elif dataclasses.is_dataclass(hint):
        _require(isinstance(value, dict), value, "a table", file, key)
        return _from_table(hint, value, file, key + ".")
    else:
        kinds = (int, float) if hint is float else hint
        _require(isinstance(value, kinds) and (hint is bool or not isinstance(value, bool)), value, _WORDS[hint], file, key)
        if range_:
            _require(_is_within(value, range_), value, _range_words(range_), file, key)
    return value


def _is_within(value: float, range_: Any) -> bool:
    return range_["minimum"] <= value <= range_["maximum"]


def _range_words(range_: Any) -> str:
    minimum, maximum = range_["minimum"], range_["maximum"]
    return f"a number of at least {minimum}" if maximum == float("inf") else f"a number from {minimum} to {maximum}"


_WORDS = {str: "a text", bool: "true or false", int: "a whole number", float: "a number"}


def _require(is_right: bool, value: Any, wanted: str, file: str, key: str) -> None:
    if not is_right:
        raise RecipeError(
            f"'{key}' in {file} has a value that is not served",
            expected=wanted,
            found=repr(value),
            fix="correct the value",
        )
