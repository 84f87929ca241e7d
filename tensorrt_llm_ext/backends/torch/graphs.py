"""CUDA graphs of a pass's stretches: hundreds of launches become one, where launching them takes the host longer than the
card takes to run them."""

from __future__ import annotations

from types import ModuleType

import torch

from tensorrt_llm_ext.backends.torch.decoder import Decoder, Stretch, run_stretch
from tensorrt_llm_ext.backends.torch.values import Layout
from tensorrt_llm_ext.backends.torch.workspace import Workspace


class Graphs:
    """Graphs of one engine. What a stretch launches depends on nothing but these: the stretch, the rows that are computed, the
    sequences and the tiles that attention is launched for; all else it finds in memory that does not move."""

    def __init__(self) -> None:
        self._graphs: dict[tuple[Stretch, int, int, int], torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, op: ModuleType, decoder: Decoder, space: Workspace, where: Layout, stretch: Stretch) -> None:
        """Run the stretch on torch's current stream: its graph, or its launches one by one if it was never captured."""
        graph = self._graphs.get(_key(space, where, stretch))
        if graph is None:
            run_stretch(op, decoder, space, where, stretch)
        else:
            graph.replay()

    def capture(self, op: ModuleType, decoder: Decoder, space: Workspace, where: Layout, stretch: Stretch) -> None:
        """Capture the stretch, and run nothing. Torch's current stream must be one of its own, on which its kernels have run."""
        key = _key(space, where, stretch)
        if key in self._graphs:
            return
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(self._pool, capture_error_mode="thread_local")
        try:
            run_stretch(op, decoder, space, where, stretch)
        finally:
            graph.capture_end()
        self._graphs[key] = graph


def _key(space: Workspace, where: Layout, stretch: Stretch) -> tuple[Stretch, int, int, int]:
    return stretch, len(space.x), len(where.lengths), len(where.tiles)
