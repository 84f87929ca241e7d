"""Backend ``trt``: plans of TensorRT, TensorRT-RTX and TensorRT-LLM, through the runtime half of their one API."""
