"""Backend ``torch``: the decoder on a CUDA card, in bfloat16 or FP8, or on the CPU in plain torch."""

from tensorrt_llm_ext.backends.torch.engine import TorchBackend, TorchEngine

__all__ = ["TorchBackend", "TorchEngine"]
