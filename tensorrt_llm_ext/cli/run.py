"""``run``: from a file of prompts to a dataset of hidden states."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tensorrt_llm_ext.cli import EXIT_INTERRUPTED, exit_code, verb
from tensorrt_llm_ext.cli._prompts import loss_mask_options, loss_mask_source, prompt_options
from tensorrt_llm_ext.cli._signals import stop_on_signals
from tensorrt_llm_ext.cli._streams import is_terminal

if TYPE_CHECKING:
    from collections import Counter

    from tensorrt_llm_ext.job import Progress, Report

_EXIT_FAILED = 1
_EXIT_REFUSED = 3
_STOPPING = "Stopping: what is in flight lands, then the last proven window is kept. Ctrl-C again stops at once."


@verb
@click.argument("engine", type=click.Path(path_type=Path))
@click.option(
    "--input",
    "source",
    required=True,
    help="Prompts: .jsonl or .txt (either may be .gz), .parquet, a folder written by save_to_disk, or - for standard input.",
)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder of the dataset: new, or with --resume.")
@prompt_options
@click.option("--taps", metavar="TAPS", help="Of the engine's taps, those to store, or eagle3.  [default: all]")
@loss_mask_options
@click.option("--shard", metavar="I/N", help="Run part I of N, I from 0: the rows whose request id hashes to it.")
@click.option(
    "--shard-mib",
    type=click.IntRange(min=1),
    default=512,
    help="For taps @all: size of a file, MiB; two or three are in memory.",
)
@click.option("--force", is_flag=True, help="Begin even where the disk cannot hold what the input will become.")
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    metavar="N",
    help="Read at most N rows.  [default: all]  A --resume that later reads on forms its batches from there: the last bits may "
    "differ from those of one run.",
)
@click.option("--resume", is_flag=True, help="Go on with the dataset in --out; begin one where there is none.")
@click.option("--fail-on-refused", is_flag=True, help="Exit with 3 when rows were refused.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads of a CPU backend.  [default: the library's choice]")
def command(engine: Path, out: Path, fail_on_refused: bool, as_json: bool, **options: object) -> None:
    """Read the hidden states of every prompt of a file.

    Taps @last and @mean become a Lance dataset, OUT/vectors.lance, one row a request. Taps @all become training data,
    OUT/states: safetensors shards with token ids and a loss mask, a Parquet index, and a manifest that comes last.

    A row that cannot be served is refused with a reason in OUT/refused.jsonl; one that ran without a result that can be
    trusted is in OUT/failed.jsonl. Neither stops the run or renumbers others: stored + already stored + refused + failed
    = read. Ctrl-C keeps every window that a canary has proven and nothing of the one at hand; --resume goes on from there,
    to the same bytes. A window is a few thousand rows at most: an input that is shorter begins again.

    Exit codes: 0 every row is stored or refused; 1 rows failed or are missing, or the run was stopped by an error; 2
    wrong usage or bad input; 3 rows were refused and --fail-on-refused was given; 130 interrupted.
    """
    with _progress_shown() as show, stop_on_signals(_STOPPING) as stop:
        report = _run(engine, out, show, stop, **options)
    if as_json:
        click.echo(json.dumps({"engine": str(engine), **report.to_dict()}))
    else:
        _print_report(report)
        if report.stopped_by is not None:
            click.echo(f"{type(report.stopped_by).__name__}: {report.stopped_by}", err=True)
    sys.exit(_exit_code(report, fail_on_refused))


def _run(
    engine: Path,
    out: Path,
    on_progress: Callable[[Progress], None],
    stop: threading.Event,
    *,
    source: str,
    format: str | None,
    text_field: str | None,
    messages_field: str | None,
    ids_field: str | None,
    id_field: str | None,
    taps: str | None,
    loss_mask: str | None,
    loss_mask_field: str | None,
    shard: str | None,
    shard_mib: int,
    force: bool,
    limit: int | None,
    resume: bool,
    threads: int | None,
    **token_options: object,
) -> Report:
    from tensorrt_llm_ext.checkpoint import Tokenizer
    from tensorrt_llm_ext.inputs import Fields, Sharding, open_input, token_policy
    from tensorrt_llm_ext.job import Job, run_job, window_limits, with_taps
    from tensorrt_llm_ext.recipes import read_contract
    from tensorrt_llm_ext.runtime import Session, check_files
    from tensorrt_llm_ext.store import check_new, columns_of
    from tensorrt_llm_ext.taps import parse_taps

    contract = read_contract(engine)
    check_files(engine, contract)
    chosen = parse_taps(taps, contract.architecture.num_layers) if taps else contract.taps
    columns_of(with_taps(contract, chosen))  # taps, output folder and input are checked before the weights are loaded
    if not resume:
        check_new(out)
    fields = Fields(text_field, messages_field, ids_field, id_field, loss_mask_field)
    opened = open_input(source, fields, format=format)
    tokenizer = Tokenizer.load(engine)
    mask = loss_mask_source(loss_mask, fields, has_states=chosen[0].rows == "all")
    policy = token_policy(fields, tokenizer, contract.limits, loss_mask=mask, **token_options)
    job = Job(
        opened,
        fields,
        policy,
        out,
        window_limits(contract.limits),
        limit=limit,
        resume=resume,
        taps=chosen,
        sharding=Sharding.parse(shard) if shard else None,
        shard_bytes=shard_mib << 20,
        force=force,
    )
    with Session.open(engine, num_threads=threads, tokenisation=policy.tokenisation()) as session:
        return run_job(job, session, tokenizer, on_progress=on_progress, stop=stop)


def _exit_code(report: Report, fail_on_refused: bool) -> int:
    if report.stopped_by is not None:
        return exit_code(report.stopped_by)
    if report.is_interrupted:
        return EXIT_INTERRUPTED
    if report.failed or report.shortfall:
        return _EXIT_FAILED
    return _EXIT_REFUSED if fail_on_refused and report.refused else 0


@contextmanager
def _progress_shown() -> Iterator[Callable[[Progress], None]]:
    """Draw rows, tokens, speed, time left and disk on standard error; nothing where that is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn
    from rich.progress import Progress as Bars

    columns = BarColumn(), TaskProgressColumn(), TextColumn("{task.description}")
    with Bars(*columns, console=Console(stderr=True), disable=not is_terminal(sys.stderr), transient=True) as bars:
        task = bars.add_task("opening the engine", total=None)

        def show(progress: Progress) -> None:
            total = None if progress.fraction is None else 1.0
            bars.update(task, total=total, completed=progress.fraction or 0.0, description=_described(progress))

        yield show


def _described(progress: Progress) -> str:
    parts = [f"{progress.num_rows:,} rows", f"{progress.num_tokens:,} tokens"]
    if progress.num_tokens:
        parts.append(f"{progress.tokens_per_s:,.0f} tokens/s")
    if progress.seconds_left is not None:
        parts.append(f"{_duration(progress.seconds_left)} left")
    if progress.expected_bytes is not None:
        parts.append(f"{_size(progress.dataset_bytes)} of about {_size(progress.expected_bytes)}")
        parts.append(f"{_size(progress.free_bytes)} free")
    return " · ".join(parts)


def _print_report(report: Report) -> None:
    def by_code(counts: Counter[str]) -> str:
        codes = ", ".join(f"{count:,} {code}" for code, count in sorted(counts.items()))
        return f"{counts.total():,}" + (f" ({codes})" if codes else "")

    facts = {
        "stored": f"{report.stored:,}",
        "already stored": f"{report.already_stored:,}",
        "refused": by_code(report.refused),
        "failed": by_code(report.failed),
        "read": f"{report.read:,}",
        "truncated": f"{report.num_truncated:,}",
        "tokens": f"{report.num_tokens:,} in {_duration(report.seconds)}, {report.tokens_per_s:,.0f} tokens/s",
        "dataset": f"{report.dataset} ({_size(report.dataset_bytes)})",
        "refused rows": "not written" if report.refused_path is None else str(report.refused_path),
        "failed rows": str(report.failed_path),
    }
    for name, fact in facts.items():
        click.echo(f"{name:<15} {fact}")
    parts = report.stored, report.already_stored, report.refused.total(), report.failed.total()
    equation = f"{' + '.join(f'{part:,}' for part in parts)} = {sum(parts):,}"
    if report.shortfall:
        click.echo(f"MISSING: {equation}, but {report.read:,} rows were read. Keep the input and report this.", err=True)
    else:
        click.echo(f"stored + already stored + refused + failed = read: {equation}")
    if report.refused and report.refused_path and not report.stored + report.already_stored + report.failed.total():
        click.echo(f"Nothing was stored. The first refusal: {_first_refusal(report.refused_path)}", err=True)
    if report.is_interrupted:
        click.echo("Interrupted: go on with --resume.", err=True)


def _first_refusal(path: Path) -> str:
    with open(path, encoding="utf-8") as file:
        refusal = json.loads(file.readline())
    where = f"line {refusal['line']}" if refusal["line"] else f"row {refusal['row']}"
    return f"{where}: {refusal['what']}\n  expected: {refusal['expected']}\n  found:    {refusal['found']}\n  to do:    {refusal['fix']}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(int(minutes), 60)
    return f"{hours}:{minutes:02}:{seconds:02.0f}" if hours or minutes else f"{seconds:.1f} s"


def _size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.3g} TB"
