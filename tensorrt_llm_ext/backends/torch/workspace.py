"""Workspace: every intermediate buffer of a forward pass, allocated once, when the engine opens."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tensorrt_llm_ext.backends.torch.sizes import DETERMINISTIC_STEP, LAST_STEP, bucket, grid_sequences, num_places
from tensorrt_llm_ext.backends.torch.values import COUNTER_BYTES, FP8, Heads, Linear, Rows
from tensorrt_llm_ext.checkpoint.architecture import Architecture
from tensorrt_llm_ext.recipes.contract import Limits


@dataclass(frozen=True)
class Workspace:
    """Buffers of M rows. ``of`` and ``last_rows`` give views of fewer; all share the memory of the whole."""

    x: torch.Tensor  # [M, hidden], the residual stream
    delta: torch.Tensor  # [M, hidden], what the last product adds to it
    qkv: torch.Tensor  # [M, fused heads]
    attended: torch.Tensor  # [M, q]
    gate_up: torch.Tensor  # [M, 2 intermediate]; shares the memory of qkv, which is over by then
    scales: torch.Tensor  # float32 [M, 1], of the rows that feed the next product
    inputs: dict[str, torch.Tensor]  # of the products: "hidden", "attended", "inner", as bytes [M, width x item]
    places: torch.Tensor  # int32: the batch, laid out
    counter: torch.Tensor  # uint8, of products
    few: Workspace | None  # buffers of their own for last rows
    step: int | None  # rows of one product; None: all

    def of(self, num_tokens: int) -> Workspace:
        """The buffers of a batch of ``num_tokens``: as many rows as its bucket."""
        return self._cut(bucket(num_tokens, self.step is not None))

    def last_rows(self, batch_size: int) -> Workspace:
        """The buffers of a batch's last rows: as many as attention's kernels are launched for."""
        return self.few._cut(grid_sequences(batch_size))

    def narrow(self, size: int) -> torch.Tensor:
        """A buffer ``[M, size]`` in the memory of ``qkv``, for a part of what that holds."""
        return self.qkv.view(-1)[: len(self.qkv) * size].view(-1, size)

    def rows(self, name: str, linear: Linear) -> Rows:
        """The rows that feed ``linear``, in the type it multiplies in."""
        memory = self.inputs[name]
        if linear.is_fp8:
            width = linear.weight.shape[1]
            values = memory.view(-1)[: len(memory) * width].view(FP8).view(-1, width)
            return Rows(values, self.scales, self.step, linear.input_scale, self.counter)
        return Rows(self.attended if name == "attended" else memory.view(self.x.dtype), None, self.step, None, self.counter)

    def float32_rows(self, num_tokens: int) -> torch.Tensor:
        """float32 ``[num_tokens, hidden]`` in the memory of qkv and gate_up, between two layers."""
        memory = self.gate_up.view(-1).view(torch.float32)
        return memory[: num_tokens * self.x.shape[1]].view(num_tokens, -1)

    def _cut(self, num_rows: int) -> Workspace:
        names = ("x", "delta", "qkv", "attended", "gate_up", "scales")
        inputs = {name: memory[:num_rows] for name, memory in self.inputs.items()}
        return replace(self, inputs=inputs, **{name: getattr(self, name)[:num_rows] for name in names})


def make_workspace(
    a: Architecture, limits: Limits, dtype: torch.dtype, device: torch.device, is_deterministic: bool = False
) -> Workspace:
    """Allocate the buffers of the largest batch."""
    step = DETERMINISTIC_STEP if is_deterministic else None
    places = torch.zeros(num_places(limits), dtype=torch.int32, device=device)
    few = _buffers(a, grid_sequences(limits.max_batch_size), dtype, places, None, step and LAST_STEP)
    return _buffers(a, bucket(limits.max_num_tokens, is_deterministic), dtype, places, few, step)


def _buffers(
    a: Architecture, num_rows: int, dtype: torch.dtype, places: torch.Tensor, few: Workspace | None, step: int | None
) -> Workspace:
    heads = Heads(a.num_heads, a.num_kv_heads, a.head_dim)
    new = {"dtype": dtype, "device": places.device}
    widths = {"hidden": a.hidden_size, "attended": heads.q_size, "inner": a.intermediate_size}
    # Also wide enough for float32 rows of the residual stream: ``float32_rows``.
    wide = torch.zeros(num_rows * max(heads.fused_size, 2 * a.intermediate_size, 2 * a.hidden_size), **new)
    return Workspace(
        x=torch.zeros(num_rows, a.hidden_size, **new),
        delta=torch.zeros(num_rows, a.hidden_size, **new),
        qkv=wide[: num_rows * heads.fused_size].view(num_rows, -1),
        attended=torch.zeros(num_rows, heads.q_size, **new),
        gate_up=wide[: num_rows * 2 * a.intermediate_size].view(num_rows, -1),
        scales=torch.zeros(num_rows, 1, dtype=torch.float32, device=places.device),
        inputs={
            name: torch.zeros(num_rows, width * dtype.itemsize, dtype=torch.uint8, device=places.device)
            for name, width in widths.items()
        },
        places=places,
        counter=torch.zeros(COUNTER_BYTES, dtype=torch.uint8, device=places.device) if few is None else few.counter,
        few=few,
        step=step,
    )
