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

    def __init__(self, device: torch.device) -> None:
        self._graphs: dict[tuple[Stretch, int, int, int], torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # of captures: the engine's own is asked by others how far it is, which ends one

    def run(self, op: ModuleType, decoder: Decoder, space: Workspace, where: Layout, stretch: Stretch) -> None:
        """Run the stretch on torch's current stream. Its graph is captured when it is first wanted, which takes the host as long as
        its launches one by one; every kernel of it must have run before."""
        key = stretch, len(space.x), len(where.lengths), len(where.tiles)
        if key not in self._graphs:
            self._graphs[key] = self._captured(op, decoder, space, where, stretch)
        self._graphs[key].replay()

    def _captured(
        self, op: ModuleType, decoder: Decoder, space: Workspace, where: Layout, stretch: Stretch
    ) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                run_stretch(op, decoder, space, where, stretch)
            finally:
                graph.capture_end()
        return graph
