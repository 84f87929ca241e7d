"""By the profiler's trace: where the time of two passes went; and of batches in flight, how long the card had nothing to do, and
every call of the host that waits for it or asks for memory."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch

from tensorrt_llm_ext import _runtime

WAITING = ("Synchronize", "EventQuery", "StreamQuery")
BLOCKING = ("cudaMemcpy", "cuMemcpyHtoD_v2", "cuMemcpyDtoH_v2", "cuMemcpyDtoD_v2")  # the names without Async
ALLOCATING = ("Malloc", "MemAlloc", "Free", "HostRegister", "HostAlloc")


def traced(call: Callable[[], object]) -> dict:
    """Profile two calls: milliseconds a call, by kernel, the share of the products, and what waited before the end."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
        with torch.profiler.record_function("passes"):
            call()
            call()
        torch.cuda.synchronize()
    events = list(profiled.events())
    on_card = [e for e in events if e.device_type.name == "CUDA" and e.name != "passes"]
    passes = next(e for e in events if e.name == "passes" and e.device_type.name == "CPU")
    waits = [e.name for e in events if "ynchronize" in e.name and e.time_range.start < passes.time_range.end]
    shares: dict[str, float] = defaultdict(float)
    for event in on_card:
        shares[_called(event.name)] += event.time_range.elapsed_us() / 2e3
    span = (max(e.time_range.end for e in on_card) - min(e.time_range.start for e in on_card)) / 2e3
    products = sum(milliseconds for name, milliseconds in shares.items() if name.startswith("products"))
    ordered = dict(sorted(((k, round(v, 3)) for k, v in shares.items()), key=lambda item: -item[1])[:10])
    return {"ms_a_pass": round(span, 2), "ms": ordered, "products_share": round(products / span, 4), "waits": waits}


def _called(kernel: str) -> str:
    if "quack" in kernel:
        return "products with SwiGLU"
    return "products" if "nvjet" in kernel or "gemm" in kernel else kernel[:40]


def batches_traced(call: Callable[[], object], num_batches: int) -> dict:
    """Profile a call that brings ``num_batches`` through a session, and has done so before."""
    from torch.profiler import ProfilerActivity, profile, record_function

    before = _runtime.stats()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled, record_function("batches"):
        call()
    after = _runtime.stats()
    with tempfile.TemporaryDirectory() as folder:
        profiled.export_chrome_trace(str(Path(folder) / "trace.json"))
        events = json.loads((Path(folder) / "trace.json").read_text())["traceEvents"]
    ours = {name: after[name] - before[name] for name in ("synchronisations", "allocations")}
    return {**read_batches(events, num_batches), **{f"{name} of the runtime": count for name, count in ours.items()}}


def read_batches(events: list[dict], num_batches: int) -> dict:
    """The card's busy and idle time between the first and the last work of the batches, and the host's calls by kind."""
    batches = next(e for e in events if e.get("name") == "batches" and e.get("cat") == "user_annotation")
    start, end = batches["ts"], batches["ts"] + batches["dur"]
    on_card = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"))
    on_card = [span for span in on_card if span[0] >= start]
    busy, reached = 0.0, on_card[0][0]
    for begin, finish in on_card:
        busy += max(0.0, finish - max(begin, reached))
        reached = max(reached, finish)
    span = reached - on_card[0][0]
    calls = [e["name"] for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver") and start <= e["ts"] < end]
    return {
        "ms a batch": round(span / num_batches / 1e3, 3),
        "idle share of the card": round(1 - busy / span, 5),
        "calls that wait": sorted({name for name in calls if name in BLOCKING or any(word in name for word in WAITING)}),
        "calls that allocate": sorted({name for name in calls if any(word in name for word in ALLOCATING)}),
        "calls": len(calls),
    }
