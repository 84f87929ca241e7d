"""The command ``trtllm-extract``: one file a verb.

A verb file is named after its verb and defines ``command``, made by ``@verb``. It imports only what its options need;
what runs is imported inside the function, so that ``--help`` and ``--version`` stay quick.

Exit codes of every verb: 0 done; 1 the answer is no (numbers that are not right, something unknown) or the work failed on
the way; 2 wrong usage or bad input; 130 interrupted. A verb may add codes of its own and says so in its help. An error is printed with
expected, found and what to do, with ``--json`` as one JSON object on standard output; wrong usage too.
"""

from __future__ import annotations

import functools
import importlib
import json
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

from tensorrt_llm_ext import __version__
from tensorrt_llm_ext.cli._streams import open_standard_streams
from tensorrt_llm_ext.errors import (
    CanaryError,
    CheckpointError,
    ConventionError,
    EngineError,
    ExtractionError,
    ForeignDataset,
    InputError,
    MissingExtra,
    RecipeError,
    TapError,
    nearest_name,
)

_BAD_INPUT = (CheckpointError, EngineError, ForeignDataset, InputError, MissingExtra, RecipeError, TapError)
_WRONG_NUMBERS = (CanaryError, ConventionError)  # engine errors that are an answer, not bad input
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it


class Interrupted(ExtractionError):
    """Ctrl-C ended a verb; never raised, only told."""

    def __init__(self) -> None:
        super().__init__(
            "Ctrl-C ended the command at once",
            expected="the end of its work",
            found="an interrupt",
            fix="start it again; run goes on with --resume, from its last proven window",
        )


class _Verbs(click.Group):
    """Finds a verb by the name of its file and imports only that file."""

    def main(self, *args: object, **options: object) -> object:
        open_standard_streams()
        return super().main(*args, **options)

    def make_context(self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: object):
        with _usage_told(words := list(args)):
            return super().make_context(info_name, args, parent, obj=words, **extra)

    def invoke(self, context: click.Context) -> object:
        with _usage_told(context.obj):
            return super().invoke(context)

    def list_commands(self, context: click.Context) -> list[str]:
        modules = [module.name for module in pkgutil.iter_modules(__path__)]
        return sorted(name.replace("_", "-") for name in modules if not name.startswith("_"))

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in self.list_commands(context):
            return None
        return importlib.import_module(f"{__name__}.{name.replace('-', '_')}").command

    def resolve_command(self, context: click.Context, args: list[str]):
        if args and not args[0].startswith("-") and args[0] not in self.list_commands(context):
            context.fail(f"no verb '{args[0]}': {nearest_name(args[0], self.list_commands(context))}")
        return super().resolve_command(context, args)


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__, prog_name="trtllm-extract")
def main() -> None:
    """Read a language model's hidden states for millions of sequences.

    Exit codes: 0 done; 1 the answer is no, or the work failed on the way; 2 wrong usage or bad input;
    130 interrupted.
    """


def verb(function: Callable[..., None]) -> click.Command:
    """Make a command of ``function``: its docstring is the help, ``--json`` arrives as ``as_json``, our errors are printed.

    Write it above the options: ``@verb``, then ``@click.argument(…)`` and ``@click.option(…)``, then the function.
    """

    @functools.wraps(function)
    def run(*args: object, as_json: bool, **options: object) -> None:
        try:
            function(*args, as_json=as_json, **options)
        except ExtractionError as error:
            _tell(error, as_json)
            sys.exit(exit_code(error))
        except KeyboardInterrupt:
            _tell(Interrupted(), as_json)
            sys.exit(EXIT_INTERRUPTED)

    json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output.")
    return click.command(function.__module__.rpartition(".")[2].replace("_", "-"))(json_option(run))


@contextmanager
def _usage_told(words: list[str]) -> Iterator[None]:
    """Tell of wrong usage in JSON where the command line asks for that; click tells of it otherwise."""
    try:
        yield
    except click.UsageError as error:
        if "--json" not in words:
            raise
        described = {
            "error": type(error).__name__,
            "what": error.format_message(),
            "expected": error.ctx.get_usage().removeprefix("Usage: "),
            "found": " ".join(words),
            "fix": f"{error.ctx.command_path} --help",
        }
        click.echo(json.dumps(described))
        sys.exit(error.exit_code)


def _tell(error: ExtractionError, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(error.to_dict()))
    else:
        click.echo(f"{type(error).__name__}: {error}", err=True)


def exit_code(error: ExtractionError) -> int:
    """2 for an error of what was given, 1 for an answer that is no and for work that failed."""
    return 2 if isinstance(error, _BAD_INPUT) and not isinstance(error, _WRONG_NUMBERS) else 1
