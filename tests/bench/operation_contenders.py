"""Each operation of ``kernels.py`` beside what takes its place without it, as contenders; attention beside the libraries'.

The rival of what a row does on its own, and of the layout, is the plain twin, compiled. Of what goes over sequences it is the eager
twin, which loops over them, and one call of torch. Libraries attend to queries and keys that are rotated already, and write
bfloat16, while ours rotates its own; and the layout's twin neither copies its inputs nor makes tiles. Both favour the rivals.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType

import torch
from contenders import Contender, on_busy_device
from our_contenders import Sizes, _batch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch_models import DEVICE

from tensorrt_llm_ext.backends.torch import plain
from tensorrt_llm_ext.backends.torch.engine import TorchEngine
from tensorrt_llm_ext.backends.torch.values import Heads, Rope, Rows

COMPILED = ("embed", "add_norm", "swiglu", "quantise", "take", "layout")
LIBRARIES = {
    "varlen_attn": "torch.nn.attention.varlen.varlen_attn",
    "FlashAttention-3": "flash_attn_interface.flash_attn_varlen_func",  # as its own build has it
    "fa3-fwd": "fa3_fwd_interface.flash_attn_varlen_func",  # its forward pass alone, a package of the index
}
CAUSAL = {"causal": True, "is_causal": True, "window_size": (-1, 0)}  # how a library is told: by the first that it takes
MAX_DIFFERENCE = 0.02  # from ours, of the norm: bfloat16 rounds by 0.004, and another mask changes most of it

Calls = dict[str, Callable[[], object]]
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int], object]
"""Causal attention of q, k, v ``[tokens, heads, head_dim]``; then where sequences begin and end, int32 ``[B + 1]``, and their length."""


def operations(engine: TorchEngine, sizes: Sizes, notes: list[str]) -> list[Contender]:
    """Ours and their rivals, each of which ran once, of a model without grouped queries. What does not run here is left out, and
    ``notes`` say so."""
    found = _beside_twins(engine, sizes, notes)
    rivals = _attentions(notes)
    for length in (sizes.length, sizes.long, sizes.longest):
        found += _beside_libraries(engine, sizes.even(length), rivals, notes)
    return found


def _beside_twins(engine: TorchEngine, sizes: Sizes, notes: list[str]) -> list[Contender]:
    found, op = [], engine._operations
    ours, theirs = (_given(by, engine, sizes) for by in (op, plain))
    for name, given in ours.items():
        rivals = _twin(name, theirs[name], notes) | _of_torch(name, theirs[name], engine._decoder.heads, sizes.length, notes)
        call = partial(getattr(op, name), *given)
        call()  # compiled before it is timed
        found += _beside(name, call, rivals, sizes.num_tokens)
    return found


def _given(op: ModuleType, engine: TorchEngine, sizes: Sizes) -> dict[str, tuple]:
    """What each operation takes in a pass, FP8 where it quantises: random rows in the engine's buffers."""
    decoder, space, lengths = engine._decoder, engine._space.of(sizes.num_tokens), sizes.even(sizes.length)
    batch = replace(_batch(engine, lengths, len(decoder.embedding)), outputs={})
    where, few, layer = op.layout(batch, len(space.x), space.places), space.last_rows(len(lengths)), decoder.layers[-1]
    for rows in (space.x, space.delta, space.gate_up, few.qkv):
        rows.normal_()
    inner, out = space.rows("inner", layer.down), space.x.new_empty(len(lengths), space.x.shape[1], dtype=torch.float32)
    gated = space.gate_up.view(-1)[: space.gate_up.numel() // 2].view(len(space.x), -1)
    queries, keys_and_values = few.narrow(decoder.heads.q_size), space.narrow(2 * decoder.heads.kv_size)
    return {
        "embed": (where.token_ids, decoder.embedding, space.x),
        "add_norm": (space.x, space.delta, layer.mlp_norm, space.rows("hidden", layer.gate_up)),
        "swiglu": (space.gate_up, inner),
        "quantise": (gated, inner),
        "take": (space.x, space.delta, batch.last_token_ids, decoder.final_norm, out),
        "layout": (batch, len(space.x), space.places),
        "mean": (torch.randn_like(space.x, dtype=torch.float32), where, out),
        "last_attention": (
            queries, keys_and_values, decoder.heads, decoder.rope, layer.head_norms, where, few.rows("attended", layer.o),
        ),
    }  # fmt: skip


def _twin(name: str, given: tuple, notes: list[str]) -> Calls:
    """The plain twin, compiled if it can be, and if that works here."""
    twin = getattr(plain, name)
    if name in COMPILED:
        compiled = partial(torch.compile(twin, fullgraph=True, dynamic=False), *given)
        if _runs(f"{name} compiled", compiled, notes):
            return {"compiled": compiled}
    return {"eager": partial(twin, *given)}


def _of_torch(name: str, given: tuple, heads: Heads, length: int, notes: list[str]) -> Calls:
    """What torch has in one call for what the twin loops over."""
    if name == "mean":
        rows, where, _ = given
        found = {"segment_reduce": lambda: torch.segment_reduce(rows, "mean", lengths=where.lengths, unsafe=True)}
    elif name == "last_attention":
        q, kv = given[0][: len(given[5].last)], given[1]
        q, k, v = (part.unflatten(1, (-1, heads.head_dim)) for part in (q, *kv[: len(q) * length].chunk(2, dim=1)))
        k, v = (part.unflatten(0, (-1, length)).transpose(1, 2) for part in (k, v))
        found = {"sdpa": lambda: functional.scaled_dot_product_attention(q.unsqueeze(2), k, v)}
    else:
        return {}
    return {kind: call for kind, call in found.items() if _runs(f"{name} {kind}", call, notes)}


def _beside_libraries(engine: TorchEngine, lengths: list[int], rivals: dict[str, Attention], notes: list[str]) -> list[Contender]:
    """Attention over sequences of one length in bfloat16, in memory of its own: ours turns the keys there."""
    op, decoder, length, num_tokens = engine._operations, engine._decoder, lengths[0], sum(lengths)
    heads, name = decoder.heads, f"attention {len(lengths)} x {length}"
    batch = replace(_batch(engine, lengths, len(decoder.embedding)), outputs={})
    where = op.layout(batch, num_tokens, torch.zeros_like(engine._space.places))
    qkv = torch.randn(num_tokens, heads.fused_size, dtype=torch.bfloat16, device=DEVICE)
    out = Rows(qkv.new_empty(num_tokens, heads.q_size))
    parts = qkv.split([heads.q_size, heads.kv_size, heads.kv_size], dim=1)
    q, k, v = (part.unflatten(1, (-1, heads.head_dim)).contiguous() for part in parts)
    q, k = (_rotated(part, length, decoder.rope) for part in (q, k))
    starts = torch.arange(0, num_tokens + 1, length, dtype=torch.int32, device=DEVICE)
    ours = partial(op.attention, qkv, heads, decoder.rope, None, where, out)
    ours()
    calls = {kind: partial(attend, q, k, v, starts, length) for kind, attend in rivals.items()}
    calls = {kind: call for kind, call in calls.items() if _runs(f"{name} {kind}", partial(_check, call, out.values), notes)}
    flops = 4 * heads.q_size * sum(n * (n + 1) // 2 for n in lengths)
    return _beside(name, ours, calls, num_tokens, flops)


def _rotated(x: torch.Tensor, length: int, rope: Rope) -> torch.Tensor:
    by_head = x.unflatten(0, (-1, length)).transpose(1, 2)  # [B, heads, length, head_dim]
    turned = plain._turned(by_head.flatten(0, 1), rope, None, None).view(by_head.shape)
    return turned.transpose(1, 2).flatten(0, 1).contiguous()


def _attentions(notes: list[str]) -> dict[str, Attention]:
    found = {"cudnn": partial(_padded, SDPBackend.CUDNN_ATTENTION), "flash": partial(_padded, SDPBackend.FLASH_ATTENTION)}
    for name, path in LIBRARIES.items():
        module, _, function = path.rpartition(".")
        try:
            function = getattr(importlib.import_module(module), function)
            takes = inspect.signature(function).parameters
        except Exception as error:  # whatever a library raises that was built for another torch
            notes.append(_left_out(f"attention by {path}", error))
            continue
        causal = next(({word: value} for word, value in CAUSAL.items() if word in takes), {})
        found[name] = partial(_packed, function, causal)
    return found


def _padded(
    backend: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, length: int
) -> torch.Tensor:
    q, k, v = (part.unflatten(0, (-1, length)).transpose(1, 2) for part in (q, k, v))  # [B, heads, length, head_dim]
    with sdpa_kernel(backend):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def _packed(
    function: Callable, causal: dict, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, length: int
) -> object:
    return function(q, k, v, starts, starts, length, length, **causal)


def _check(call: Callable[[], object], ours: torch.Tensor) -> None:
    """Raise ValueError where a rival computes something else than ours."""
    found = call()
    found = (found[0] if isinstance(found, tuple) else found).reshape(ours.shape).float()
    difference = ((found - ours.float()).norm() / ours.float().norm()).item()
    if not difference < MAX_DIFFERENCE:
        raise ValueError(f"it differs from ours by {difference:.3f} of the norm, expected less than {MAX_DIFFERENCE}")


def _runs(name: str, call: Callable[[], object], notes: list[str]) -> bool:
    """Run ``call`` once; say whether it did, and note why not."""
    try:
        call()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
    except Exception as error:  # compilers and libraries share no base class
        notes.append(_left_out(name, error))
        return False
    return True


def _left_out(name: str, error: Exception) -> str:
    words = str(error).strip().partition("\n")[0].rstrip(".")
    return f"{name} is left out: {words or type(error).__name__}"


def _beside(name: str, ours: Callable[[], object], rivals: Calls, num_tokens: int, flops: float | None = None) -> list[Contender]:
    found = [Contender(f"{name} {kind}", num_tokens, on_busy_device(call), flops) for kind, call in rivals.items()]
    return [Contender(name, num_tokens, on_busy_device(ours), flops, tuple(rival.name for rival in found)), *found]
