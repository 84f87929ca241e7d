"""Speed of backend torch on a CUDA card beside the limit and the peers: one run, one table, one JSON file.

    python tests/bench/torch_h200.py [--json FILE] [--peers eager|compiled|none] [--trace]

Weights are random: for speed only. Every contender is timed in every round, one after another, by the card's own events; a
figure is the median of the rounds. The limit is the model's products alone, on the rows that the engine's own pass left.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import machine
import torch
import triton
from torch_models import LLAMA_2_7B, QWEN3_8B, random_engine

from tensorrt_llm_ext.backends.torch import kernels
from tensorrt_llm_ext.backends.torch.decoder import Batch
from tensorrt_llm_ext.backends.torch.engine import TorchEngine
from tensorrt_llm_ext.recipes.contract import Limits

NUM_TOKENS, LENGTH = 16384, 128
ROUNDS, RUNS = 3, 5
LIMITS = Limits(NUM_TOKENS, 1024, 2048, 1 << 40)


@dataclass
class Contender:
    """Something that takes ``num_tokens`` a call. ``times`` are milliseconds, one a round."""

    name: str
    num_tokens: int
    call: Callable[[], object]
    flops: float = 0.0
    times: list[float] = field(default_factory=list)

    @property
    def milliseconds(self) -> float:
        return statistics.median(self.times)

    def row(self) -> dict:
        rate = self.num_tokens / self.milliseconds * 1e3
        row = {"name": self.name, "ms": round(self.milliseconds, 2), "tokens_per_s": round(rate)}
        return {**row, "tflops": round(self.flops / self.milliseconds / 1e9)} if self.flops else row


def main() -> None:
    arguments = _arguments()
    report = {"machine": machine.card(arguments.commit) | {"triton": triton.__version__}, "rows": [], "ratios": {}, "clocks_mhz": []}
    with torch.inference_mode():
        for a, name, peers in ((LLAMA_2_7B, "llama-2-7b", arguments.peers), (QWEN3_8B, "qwen3-8b", "none")):
            _compare(report, a, name, peers, arguments.trace and name == "llama-2-7b")
    print(json.dumps(report["machine"]), f"SM clock {min(report['clocks_mhz'])} to {max(report['clocks_mhz'])} MHz")
    print(f"{'what':48}{'ms':>10}{'tokens/s':>12}{'TFLOP/s':>10}")
    for row in report["rows"]:
        print(f"{row['name']:48}{row['ms']:>10}{row['tokens_per_s']:>12,}{row.get('tflops', ''):>10}")
    for name, ratio in report["ratios"].items():
        print(f"{name:60}{ratio:8.3f}")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(report, file, indent=1)


def _compare(report: dict, a, name: str, peers: str, has_trace: bool) -> None:
    engines = {precision: random_engine(a, taps="final@last", precision=precision, limits=LIMITS) for precision in ("fp8", "bfloat16")}
    lengths = {"": [LENGTH] * (NUM_TOKENS // LENGTH), " mixed": _mixed_lengths(), " 2048": [2048] * (NUM_TOKENS // 2048)}
    contenders = []
    for precision, engine in engines.items():
        for kind, sizes in lengths.items():
            batch = _batch(engine, sizes, a.vocab_size)
            call = lambda engine=engine, batch=batch: engine._forward(batch)  # noqa: E731
            call()
            contenders.append(Contender(f"{name} {precision}{kind}", sum(sizes), call, _flops(a, sizes)))
        rounds = _products(engine)
        contenders.append(Contender(f"{name} {precision} products alone", NUM_TOKENS, rounds, _flops(a, [1] * NUM_TOKENS)))
    if peers != "none":
        contenders += _transformers(a, name, peers)
    for _ in range(ROUNDS):
        for contender in contenders:
            contender.times.append(_milliseconds(contender.call))
        report["clocks_mhz"].append(_clock())
    contenders.append(_end_to_end(engines["fp8"], f"{name} fp8, ids to host vectors", a.vocab_size))
    report["rows"] += [contender.row() for contender in contenders]
    report["ratios"] |= _ratios(name, {c.name.removeprefix(name + " "): c for c in contenders})
    if has_trace:
        report["trace"] = _trace(engines["fp8"], a.vocab_size)
        print(json.dumps(report["trace"], indent=1))
    for engine in engines.values():
        engine.close()


def _ratios(name: str, of: dict[str, Contender]) -> dict[str, float]:
    def rate(key: str) -> float:
        return of[key].num_tokens / of[key].milliseconds

    ratios = {}
    for precision in ("fp8", "bfloat16"):
        ratios[f"{name} {precision} / its products alone"] = rate(precision) / rate(f"{precision} products alone")
        ratios[f"{name} {precision} mixed / uniform"] = rate(f"{precision} mixed") / rate(precision)
        for peer in ("transformers eager bf16", "transformers compiled bf16"):
            if peer in of:
                ratios[f"{name} {precision} / {peer}"] = rate(precision) / rate(peer)
    return {key: round(value, 4) for key, value in ratios.items()}


def _batch(engine: TorchEngine, lengths: list[int], vocab_size: int) -> Batch:
    batch = engine._even_batch(sum(lengths), len(lengths))
    sizes = torch.tensor(lengths, dtype=torch.int32)
    batch.sequence_lengths.copy_(sizes)
    batch.last_token_ids.copy_(sizes.cumsum(0, dtype=torch.int32))
    batch.input_ids.copy_(torch.randint(0, vocab_size, (sum(lengths),), dtype=torch.int32))
    return batch


def _mixed_lengths() -> list[int]:
    """Log-normal, of mean 128, from 1 to 2048, cut to the batch."""
    torch.manual_seed(0)
    drawn = torch.empty(2000).log_normal_(4.852 - 0.5, 1.0).round().clamp(1, 2048).int().tolist()
    lengths: list[int] = []
    while sum(lengths) + drawn[len(lengths)] <= NUM_TOKENS:
        lengths.append(drawn[len(lengths)])
    return lengths


def _products(engine: TorchEngine) -> Callable[[], None]:
    """All products of all layers, over all rows, on what the last pass left in the buffers."""
    space = engine._space.of(NUM_TOKENS)

    def call() -> None:
        for layer in engine._decoder.layers:
            kernels.multiply(space.rows("hidden", layer.qkv), layer.qkv, space.qkv)
            kernels.multiply(space.rows("attended", layer.o), layer.o, space.delta)
            kernels.multiply(space.rows("hidden", layer.gate_up), layer.gate_up, space.gate_up)
            kernels.multiply(space.rows("inner", layer.down), layer.down, space.delta)

    return call


def _transformers(a, name: str, peers: str) -> list[Contender]:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=a.hidden_size, intermediate_size=a.intermediate_size, num_hidden_layers=a.num_layers,
        num_attention_heads=a.num_heads, num_key_value_heads=a.num_kv_heads, vocab_size=a.vocab_size,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaModel(config).to(torch.bfloat16)
    model = model.to_empty(device="cuda").eval()
    model.rotary_emb = type(model.rotary_emb)(config=config).to("cuda")
    for parameter in model.parameters():
        parameter.data.normal_(0, a.hidden_size**-0.5) if parameter.ndim == 2 else parameter.data.fill_(1)
    ids = torch.randint(0, a.vocab_size, (NUM_TOKENS // LENGTH, LENGTH), device="cuda")
    found = []
    for peer, run in (("eager", model), ("compiled", torch.compile(model))):
        if peer == "eager" or peers == "compiled":
            call = lambda run=run: run(input_ids=ids, use_cache=False).last_hidden_state[:, -1].float()  # noqa: E731
            call()
            call()
            found.append(Contender(f"{name} transformers {peer} bf16", NUM_TOKENS, call))
    return found


def _end_to_end(engine: TorchEngine, name: str, vocab_size: int) -> Contender:
    """Batch after batch through the protocol, ids from pinned memory and vectors back to it; nothing waits in between."""
    num_batches = 20
    lengths = torch.full((NUM_TOKENS // LENGTH,), LENGTH, dtype=torch.int32)
    host = {
        "input_ids": torch.randint(0, vocab_size, (NUM_TOKENS,), dtype=torch.int32).pin_memory(),
        "sequence_lengths": lengths.pin_memory(),
        "last_token_ids": lengths.cumsum(0, dtype=torch.int32).pin_memory(),
    }
    card = {key: value.cuda() for key, value in host.items()}
    rows = torch.empty(len(lengths), 4096, device="cuda")
    vectors = torch.empty(num_batches, len(lengths), 4096).pin_memory()
    stream = torch.cuda.Stream()
    started = time.perf_counter()
    for index in range(num_batches):
        with torch.cuda.stream(stream):
            for key, value in host.items():
                card[key].copy_(value, non_blocking=True)
        for key, value in card.items():
            engine.set_shape(key, tuple(value.shape))
            engine.set_address(key, value.data_ptr())
        engine.set_address("final_post_last", rows.data_ptr())
        engine.enqueue(stream.cuda_stream)
        with torch.cuda.stream(stream):
            vectors[index].copy_(rows, non_blocking=True)
    stream.synchronize()
    return Contender(name, NUM_TOKENS, print, times=[(time.perf_counter() - started) / num_batches * 1e3])


def _trace(engine: TorchEngine, vocab_size: int) -> dict:
    """Where the time of two passes went, and every call of the host that waits for the card."""
    from torch.profiler import ProfilerActivity, profile

    batch = _batch(engine, [LENGTH] * (NUM_TOKENS // LENGTH), vocab_size)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
        with torch.profiler.record_function("passes"):
            engine._forward(batch)
            engine._forward(batch)
        torch.cuda.synchronize()
    events = list(profiled.events())
    on_card = [e for e in events if e.device_type.name == "CUDA" and e.name != "passes"]
    passes = next(e for e in events if e.name == "passes" and e.device_type.name == "CPU")
    waits = [e.name for e in events if "ynchronize" in e.name and e.time_range.start < passes.time_range.end]
    shares: dict[str, float] = defaultdict(float)
    for event in on_card:
        shares["products" if "nvjet" in event.name or "gemm" in event.name else event.name[:40]] += event.time_range.elapsed_us() / 2e3
    span = (max(e.time_range.end for e in on_card) - min(e.time_range.start for e in on_card)) / 2e3
    ordered = dict(sorted(((k, round(v, 3)) for k, v in shares.items()), key=lambda item: -item[1])[:10])
    return {"ms_a_pass": round(span, 2), "ms": ordered, "products_share": round(shares["products"] / span, 4), "waits": waits}


def _flops(a, lengths: list[int]) -> float:
    """Products of every layer for every token, and causal attention's: 4 x length x (length + 1) / 2 x q a layer."""
    q_size, kv_size = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    weights = a.hidden_size * (2 * q_size + 2 * kv_size) + 3 * a.hidden_size * a.intermediate_size
    attention = sum(2 * length * (length + 1) * q_size for length in lengths if length > 1)
    return a.num_layers * (2 * weights * sum(lengths) + attention)


def _milliseconds(call: Callable[[], object]) -> float:
    call()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(RUNS)]
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def _clock() -> int:
    query = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0])


def _arguments() -> argparse.Namespace:
    parser = machine.arguments(__doc__)
    parser.add_argument("--peers", choices=("none", "eager", "compiled"), default="eager")
    parser.add_argument("--trace", action="store_true", help="profile two passes and print where their time went")
    return parser.parse_args()


if __name__ == "__main__":
    main()
