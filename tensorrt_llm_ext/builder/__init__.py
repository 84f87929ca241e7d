"""From a recipe to a published engine directory: graph, canaries, contract."""

from tensorrt_llm_ext.builder.build import build_engine
from tensorrt_llm_ext.builder.layerwise import layer_states

__all__ = ["build_engine", "layer_states"]
