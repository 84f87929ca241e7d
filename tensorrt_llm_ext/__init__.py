"""Read a language model's hidden states for millions of sequences, on NVIDIA TensorRT engines and on any CPU."""

__version__ = "0.1.0"
