"""Checkpoint: weights, architecture and tokenizer, read from a Hugging Face folder or a GGUF file, without torch."""

from tensorrt_llm_ext.checkpoint.architecture import Architecture, Family, architecture_from_config
from tensorrt_llm_ext.checkpoint.gguf import GgufCheckpoint
from tensorrt_llm_ext.checkpoint.hf import HfCheckpoint
from tensorrt_llm_ext.checkpoint.open import open_checkpoint
from tensorrt_llm_ext.checkpoint.protocol import Checkpoint, TensorInfo
from tensorrt_llm_ext.checkpoint.rope import Rope, RopeType, rope_tables
from tensorrt_llm_ext.checkpoint.tokenizer import Tokenizer

__all__ = [
    "Architecture",
    "Checkpoint",
    "Family",
    "GgufCheckpoint",
    "HfCheckpoint",
    "Rope",
    "RopeType",
    "TensorInfo",
    "Tokenizer",
    "architecture_from_config",
    "open_checkpoint",
    "rope_tables",
]
