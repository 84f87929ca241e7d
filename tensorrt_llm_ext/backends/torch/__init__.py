"""Backend ``torch``: the decoder on a CUDA card, in bfloat16 or FP8, or on the CPU in plain torch."""
