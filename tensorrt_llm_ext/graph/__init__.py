"""Architecture, weights and taps become one ONNX decoder graph."""

from tensorrt_llm_ext.graph.decoder import DecoderFiles, write_decoder
from tensorrt_llm_ext.graph.layer_model import layer_model, norm_model
from tensorrt_llm_ext.graph.operators import GraphTensor

__all__ = ["DecoderFiles", "GraphTensor", "layer_model", "norm_model", "write_decoder"]
