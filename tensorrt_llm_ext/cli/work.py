"""``work``: join a stream and serve its work items with an engine."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import click

from tensorrt_llm_ext.cli import verb
from tensorrt_llm_ext.cli._broker import broker_options, opened_broker, print_facts
from tensorrt_llm_ext.cli._signals import stop_on_signals


@verb
@click.argument("engine", type=click.Path(path_type=Path))
@broker_options
@click.option("--name", help="Name of this worker, its own.  [default: host, process and a random part]")
@click.option("--threads", type=click.IntRange(min=1), help="Threads of a CPU backend.  [default: the library's choice]")
@click.option(
    "--max-tokens-in-flight",
    type=click.IntRange(min=1),
    metavar="N",
    help="Tokens taken from the stream and not answered yet.  [default: some ten batches]",
)
@click.option("--drain-s", type=click.FloatRange(min=0), default=60.0, help="Seconds to hand over answers once asked to stop.")
@click.option("--leave-when-idle", type=click.FloatRange(min=0), metavar="S", help="End after S seconds without work.  [default: never]")
@click.option("--metrics-port", type=click.IntRange(0, 65535), help="Serve /metrics and /health here.  [default: do not]")
@click.option("--metrics-address", default="127.0.0.1", help="Address to serve them at.")
def command(
    engine: Path,
    name: str | None,
    threads: int | None,
    max_tokens_in_flight: int | None,
    drain_s: float,
    leave_when_idle: float | None,
    metrics_port: int | None,
    metrics_address: str,
    as_json: bool,
    **access: object,
) -> None:
    """Join a stream of work and answer its work items with ENGINE.

    Before it takes any work, the engine's gather convention is measured, its canaries are run, and its contract is held
    against what the stream's owner asked for; any difference is printed field by field, and the worker does not join. A
    work item is acknowledged only after the broker has persisted its answer. SIGTERM drains: what runs is answered, what
    waits is given back. Events go to standard error, one JSON object a line.

    Exit codes: 0 it was asked to stop, or was idle; 1 it was not admitted, or an error ended it; 2 wrong usage or bad
    input.
    """
    from tensorrt_llm_ext.runtime import Session
    from tensorrt_llm_ext.worker import Metrics, MetricsServer, Worker, WorkerSettings
    from tensorrt_llm_ext.worker.door import wanted_by
    from tensorrt_llm_ext.worker.events import log_to_standard_error

    log_to_standard_error()
    with ExitStack() as stack:
        stop = stack.enter_context(stop_on_signals())
        broker = stack.enter_context(opened_broker(name or "worker", **access))
        tokenisation = wanted_by(broker).policy.tokenisation()

        def opened() -> Session:
            return Session.open(engine, num_threads=threads, tokenisation=tokenisation)

        settings = WorkerSettings(name, max_tokens_in_flight, drain_s=drain_s, leave_when_idle_s=leave_when_idle)
        worker = Worker(stack.enter_context(opened()), broker, settings=settings, reopen=opened, metrics=Metrics())
        if metrics_port is not None:
            stack.enter_context(MetricsServer(worker.metrics, worker.facts, metrics_port, metrics_address))
        report = worker.run(stop)
    print_facts(report.to_dict(), as_json)
