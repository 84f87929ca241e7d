"""Backends: ways to run an engine behind one small protocol."""

from tensorrt_llm_ext.backends.opening import known_backends, open_engine
from tensorrt_llm_ext.backends.protocol import Backend, Engine

__all__ = ["Backend", "Engine", "known_backends", "open_engine"]
