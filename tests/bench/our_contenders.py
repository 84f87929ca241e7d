"""Ours, as contenders: passes of every kind of lengths, the products alone, and batches end to end through a session."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from unittest import mock

import torch
from contenders import Contender, on_device, on_host
from random_sessions import random_items, random_session
from torch_models import contract_of, random_engine

from tensorrt_llm_ext.backends.torch import gated
from tensorrt_llm_ext.backends.torch.decoder import run_products
from tensorrt_llm_ext.backends.torch.engine import TorchEngine
from tensorrt_llm_ext.backends.torch.tuning import choose_algorithms
from tensorrt_llm_ext.backends.torch.values import Batch
from tensorrt_llm_ext.checkpoint.architecture import Architecture
from tensorrt_llm_ext.recipes.contract import Limits
from tensorrt_llm_ext.results import Record

TAPS = "final@last"
PRECISIONS = ("fp8", "bfloat16")
PRODUCTS, END_TO_END, DETERMINISTIC, APART = "products alone", "ids to host vectors", "deterministic", "SwiGLU apart"


@dataclass(frozen=True)
class Sizes:
    """The batches of a measurement: ``num_tokens`` in sequences of ``length``; ``longest`` is a batch of one sequence."""

    num_tokens: int = 16384
    length: int = 128
    long: int = 2048
    longest: int = 32768
    num_batches: int = 8  # of a round end to end

    @property
    def limits(self) -> Limits:
        return Limits(max(self.num_tokens, self.longest), max(1024, self.num_tokens // self.length), self.longest, 1 << 40)

    def even(self, length: int) -> list[int]:
        return [length] * (max(self.num_tokens, length) // length)

    def mixed(self) -> list[int]:
        """Log-normal, of mean 128, from 1 to ``long``, cut to the batch."""
        torch.manual_seed(0)
        drawn = torch.empty(2000).log_normal_(4.852 - 0.5, 1.0).round().clamp(1, self.long).int().tolist()
        lengths: list[int] = []
        while sum(lengths) + drawn[len(lengths)] <= self.num_tokens:
            lengths.append(drawn[len(lengths)])
        return lengths


def random_engines(a: Architecture, sizes: Sizes) -> dict[str, TorchEngine]:
    """An engine of each precision. Products that its passes do not compute alone have an algorithm chosen, too: they are timed."""
    engines = {precision: random_engine(a, taps=TAPS, precision=precision, limits=sizes.limits) for precision in PRECISIONS}
    with mock.patch.object(gated, "can_multiply", lambda linear: False):
        for engine in engines.values():
            choose_algorithms(engine._decoder, engine._space.of(sizes.num_tokens))
    return engines


def passes_and_products(engines: dict[str, TorchEngine], name: str, a: Architecture, sizes: Sizes) -> list[Contender]:
    """Passes over sequences of one length, the products of such a pass alone, then passes over the other lengths."""
    others = {"mixed": sizes.mixed()} | {str(length): sizes.even(length) for length in (sizes.long, sizes.longest)}
    found = []
    for precision, engine in engines.items():
        ours, limit = f"{name} {precision}", _products_alone(engine, f"{name} {precision}", a, sizes)
        found += [_passes(engine, ours, a, sizes.even(sizes.length), (limit.name,)), limit]
        for kind, lengths in others.items():
            found.append(_passes(engine, f"{ours} {kind}", a, lengths, (ours,) if kind == "mixed" else ()))
    return found


def deterministic(engines: dict[str, TorchEngine], name: str, a: Architecture, sizes: Sizes) -> list[Contender]:
    """Passes with the same weights whose results do not depend on the batch by a bit."""
    found = []
    for precision, engine in engines.items():
        limits, decoder = replace(sizes.limits, max_num_tokens=sizes.num_tokens), engine._decoder
        strict = random_engine(a, taps=TAPS, precision=precision, limits=limits, is_deterministic=True, decoder=decoder)
        ours = f"{name} {precision}"
        found.append(_passes(strict, f"{ours} {DETERMINISTIC}", a, sizes.even(sizes.length), (ours,)))
    return found


def swiglu_apart(engines: dict[str, TorchEngine], name: str, a: Architecture, sizes: Sizes) -> list[Contender]:
    """Passes in which SwiGLU is a pass of its own, where an engine computes it in its product's epilogue."""
    found = []
    for precision, engine in engines.items():
        if gated.can_multiply(engine._decoder.layers[0].gate_up):
            ours = f"{name} {precision}"
            passes = _passes(engine, f"{ours} {APART}", a, sizes.even(sizes.length), (ours,))
            found.append(replace(passes, measure=mock.patch.object(gated, "can_multiply", lambda linear: False)(passes.measure)))
    return found


def end_to_end(
    engines: dict[str, TorchEngine], name: str, a: Architecture, sizes: Sizes, against: tuple[str, ...]
) -> list[Contender]:
    """Batch after batch through the session, token ids in and records on the host out; and the limit."""
    found = []
    for precision, engine in engines.items():
        pass_over(engine, sizes.even(sizes.length), a.vocab_size)()  # what the products read
        limit = _products_alone(engine, f"{name} {precision}", a, sizes)
        call = extraction(engine, a, precision, sizes)
        ours = f"{name} {precision} {END_TO_END}"
        found.append(Contender(ours, sizes.num_tokens, on_host(call, sizes.num_batches), None, (limit.name, *against)))
        found.append(limit)
    return found


def pass_over(engine: TorchEngine, lengths: list[int], vocab_size: int) -> Callable[[], None]:
    """One pass over sequences of these lengths, which has run once."""
    batch = _batch(engine, lengths, vocab_size)
    engine._forward(batch)
    return lambda: engine._forward(batch)


def extraction(engine: TorchEngine, a: Architecture, precision: str, sizes: Sizes) -> Callable[[], None]:
    """Batches through a session of its own, ids in and records on the host out, which have been through it once."""
    limits = replace(sizes.limits, max_num_tokens=sizes.num_tokens, max_seq_len=sizes.long)
    session = random_session(engine, contract_of(a, taps=TAPS, precision=precision, limits=limits))
    items = random_items(sizes.num_batches * sizes.num_tokens // sizes.length, sizes.length, a.vocab_size)

    def call() -> None:
        num_records = sum(isinstance(answer, Record) for answer in session.extract(items))
        if num_records != len(items):
            raise SystemExit(f"{precision}: {num_records} records for {len(items)} sequences")

    call()
    return call


def _passes(engine: TorchEngine, name: str, a: Architecture, lengths: list[int], against: tuple[str, ...]) -> Contender:
    call = pass_over(engine, lengths, a.vocab_size)
    return Contender(name, sum(lengths), on_device(call), _flops(a, lengths), against)


def _batch(engine: TorchEngine, lengths: list[int], vocab_size: int) -> Batch:
    batch = engine._even_batch(sum(lengths), len(lengths))
    sizes = torch.tensor(lengths, dtype=torch.int32)
    batch.sequence_lengths.copy_(sizes)
    if batch.last_token_ids is not None:
        batch.last_token_ids.copy_(sizes.cumsum(0, dtype=torch.int32))
    batch.input_ids.copy_(torch.randint(0, vocab_size, (sum(lengths),), dtype=torch.int32))
    return replace(batch, longest=max(lengths))


def _products_alone(engine: TorchEngine, name: str, a: Architecture, sizes: Sizes) -> Contender:
    """All products of all layers, over all rows, on what the last pass left in the buffers."""
    call = partial(run_products, engine._operations, engine._decoder, engine._space.of(sizes.num_tokens))
    flops = 2 * sizes.num_tokens * a.num_layers * sum(_product_sizes(a))
    return Contender(f"{name} {PRODUCTS}", sizes.num_tokens, on_device(call), flops)


def _product_sizes(a: Architecture) -> tuple[int, int, int]:
    """Weights of a layer's products: of queries; of keys and values; the others."""
    q_size, kv_size = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    return a.hidden_size * q_size, a.hidden_size * 2 * kv_size, a.hidden_size * (q_size + 3 * a.intermediate_size)


def _flops(a: Architecture, lengths: list[int]) -> int:
    """What a pass to ``final@last`` computes: the first layer's queries, keys and values are looked up; in the last layer all except
    keys and values is computed for last rows alone; and causal attention, 4 x q a query and key that it sees."""
    queries, keys_and_values, rest = _product_sizes(a)
    num_tokens, q_size = sum(lengths), a.num_heads * a.head_dim
    first, last = num_tokens * rest, num_tokens * keys_and_values + len(lengths) * (queries + rest)
    between = (a.num_layers - 2) * num_tokens * (queries + keys_and_values + rest)
    pairs = (a.num_layers - 1) * sum(n * (n + 1) // 2 for n in lengths) + num_tokens
    return 2 * (first + between + last) + 4 * q_size * pairs
