"""``submit``: put the prompts of a file on a stream of work."""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path

import click

from tensorrt_llm_ext.cli import verb
from tensorrt_llm_ext.cli._broker import broker_options, opened_broker, print_facts
from tensorrt_llm_ext.cli._prompts import loss_mask_options, loss_mask_source, prompt_options

_EXIT_FAILED, _EXIT_REFUSED = 1, 3


@verb
@click.argument("source", metavar="FILE")
@click.option(
    "--engine",
    required=True,
    type=click.Path(path_type=Path),
    help="Engine that the stream asks for; of its folder only the contract and the tokenizer are read.",
)
@broker_options
@prompt_options
@loss_mask_options
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Read at most N rows.  [default: all]")
@click.option("--priority", type=click.Choice(["high", "normal", "low"]), default="normal", help="Share of the workers' tokens.")
@click.option("--partitions", type=click.IntRange(1, 1024), metavar="N", help="Datasets the results are spread over.  [default: 1; later, as the stream has it]")
@click.option("--fail-on-refused", is_flag=True, help="Exit with 3 when rows were refused.")
def command(
    source: str,
    engine: Path,
    format: str | None,
    text_field: str | None,
    messages_field: str | None,
    ids_field: str | None,
    id_field: str | None,
    loss_mask: str | None,
    loss_mask_field: str | None,
    limit: int | None,
    priority: str,
    partitions: int | None,
    fail_on_refused: bool,
    as_json: bool,
    **options: object,
) -> None:
    """Put every prompt of FILE on a stream of work, as token ids.

    The first submit makes the stream and says what it asks of its workers: this engine, these taps, these ways to make
    tokens. A request id is on the stream once, in whatever priority: submitting a file again adds what is missing. A row
    that cannot be served is named on standard error with the reason. submitted + already submitted + refused = read.

    Exit codes: 0 every row is on the stream or refused; 1 rows are missing, or the stream asks for something else; 2 wrong
    usage or bad input; 3 rows were refused and --fail-on-refused was given.
    """
    from tensorrt_llm_ext.checkpoint import Tokenizer
    from tensorrt_llm_ext.inputs import Fields, open_input, token_policy, work_items
    from tensorrt_llm_ext.recipes import read_contract
    from tensorrt_llm_ext.worker import StreamSettings, Wanted, make_stream, submit
    from tensorrt_llm_ext.worker.events import Events, log_to_standard_error

    log_to_standard_error()
    access = {name: options.pop(name) for name in ("url", "stream", "creds", "token_file", "tls_ca", "tls_cert", "tls_key")}
    contract, tokenizer = read_contract(engine), Tokenizer.load(engine)
    fields = Fields(text_field, messages_field, ids_field, id_field, loss_mask_field)
    opened = open_input(source, fields, format=format)
    mask = loss_mask_source(loss_mask, fields, has_states=contract.taps[0].rows == "all")
    policy = token_policy(fields, tokenizer, contract.limits, loss_mask=mask, **options)
    event = Events(input=opened.name)
    with opened_broker("submit", **access) as broker:
        settings = StreamSettings() if partitions is None else StreamSettings(num_partitions=partitions)
        defaults = vars(settings).keys() - ({"num_partitions"} if partitions else set())
        wanted = make_stream(broker, Wanted(contract, policy, settings), defaults=defaults)
        vocab_size = contract.architecture.vocab_size
        rows = work_items(islice(opened.rows(), limit), fields, tokenizer, wanted.policy, vocab_size=vocab_size, source=opened.name)
        report = submit(
            rows,
            broker,
            wanted,
            priority=priority,
            on_refused=lambda row, request_id, refusal: event("refused", row=row, request_id=request_id, **refusal.to_dict()),
        )
    print_facts(report.to_dict(), as_json)
    sys.exit(_EXIT_FAILED if report.shortfall else _EXIT_REFUSED if fail_on_refused and report.refused else 0)
