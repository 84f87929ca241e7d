"""Where the time of two passes went, by the profiler's trace, and every call of the host that waits for the card."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch


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
