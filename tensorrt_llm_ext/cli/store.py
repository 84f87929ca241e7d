"""``store``: write the results of a stream into datasets."""

from __future__ import annotations

import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import click

from tensorrt_llm_ext.cli import verb
from tensorrt_llm_ext.cli._broker import broker_options, opened_broker, print_facts
from tensorrt_llm_ext.cli._signals import stop_on_signals


@verb
@broker_options
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder of the datasets, one a partition: OUT/part-0 …")
@click.option("--partition", type=click.IntRange(min=0), multiple=True, metavar="N", help="Write this one.  [default: all]")
@click.option(
    "--shard-mib",
    type=click.IntRange(min=1),
    metavar="N",
    help="For taps @all: size of a file, MiB; two or three are in memory for each partition.  [default: 512, or as the dataset has it]",
)
@click.option("--leave-when-idle", type=click.FloatRange(min=0), metavar="S", help="End after S seconds without results.  [default: never]")
@click.option("--metrics-port", type=click.IntRange(0, 65535), help="Serve /metrics and /health here.  [default: do not]")
@click.option("--metrics-address", default="127.0.0.1", help="Address to serve them at.")
def command(
    out: Path,
    partition: tuple[int, ...],
    shard_mib: int | None,
    leave_when_idle: float | None,
    metrics_port: int | None,
    metrics_address: str,
    as_json: bool,
    **access: object,
) -> None:
    """Write a stream's results into datasets, OUT/part-N: vectors.lance for taps @last and @mean, states/ for taps @all, as
    `run` writes them. Why a work item has no row is in OUT/part-N.refused.jsonl.

    One writer a partition, held by a lease: others stand by and take over when it ends. Each record is held against its
    work item; one that is stored already is dropped; a result is acknowledged after its commit. A dataset is
    finished, for `check` and `export`, once its writer has ended. Events go to standard error, one JSON object a line.

    Exit codes: 0 it was asked to stop, or was idle; 1 an error ended it; 2 wrong usage or bad input.
    """
    from tensorrt_llm_ext.worker import Metrics, MetricsServer, StoreSettings, StoreWriter
    from tensorrt_llm_ext.worker.door import wanted_by
    from tensorrt_llm_ext.worker.events import log_to_standard_error

    log_to_standard_error()
    with ExitStack() as stack:
        stop = stack.enter_context(stop_on_signals())
        broker = stack.enter_context(opened_broker("store", **access))
        numbers = partition or range(wanted_by(broker).settings.num_partitions)
        shard_bytes = None if shard_mib is None else shard_mib << 20
        settings, metrics = StoreSettings(leave_when_idle_s=leave_when_idle, shard_bytes=shard_bytes), Metrics()
        writers = [StoreWriter(broker, out, number, settings=settings, metrics=metrics) for number in numbers]
        if metrics_port is not None:
            stack.enter_context(MetricsServer(metrics, lambda: _health(writers), metrics_port, metrics_address))
        errors = _run_all(writers, stop)
    if errors:
        raise errors[0]
    totals = {kind: sum(writer.counts[kind] for writer in writers) for kind in ("stored", "refused", "failed")}
    print_facts(totals, as_json)
    sys.exit(0)


def _run_all(writers: list, stop: threading.Event) -> list[BaseException]:
    """Run writers side by side; the first that fails stops the others."""
    errors: list[BaseException] = []

    def run(writer) -> None:
        try:
            writer.run(stop)
        except BaseException as error:  # raised by the caller, whatever it is
            errors.append(error)
            stop.set()

    threads = [threading.Thread(target=run, args=(writer,), name=f"part-{writer.partition}") for writer in writers]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(0.5)  # a signal is heard between
    return errors


def _health(writers: list) -> dict:
    parts = {str(writer.partition): writer.facts() for writer in writers}
    return {"healthy": all(part["healthy"] for part in parts.values()), "partitions": parts}
