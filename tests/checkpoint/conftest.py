"""Fixtures of the checkpoint room: tiny models as GGUF files, and what reading a checkpoint takes in memory."""

import subprocess
import sys

import gguf
import numpy as np
import pytest
from tiny import tiny_model

_ARCH = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
SIZES = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
BYTE_LETTERS = [chr(i) for i in range(33, 127)]


class GgufModel:
    """A tiny model to be written as GGUF: change ``fields`` and ``tensors`` (by llama.cpp's names), then ``write``."""

    def __init__(self, family: str, **config) -> None:
        self.model = tiny_model(family, **{**SIZES, "head_dim": 32, "vocab_size": 288, **config})
        self.arch = _ARCH[family]
        settings = self.model.config
        self.tensors = {
            _gguf_name(name): self._permuted(name, weight.numpy()) for name, weight in self.model.state_dict().items()
        }
        if settings.tie_word_embeddings:
            del self.tensors["output.weight"]
        self.types = {}  # llama.cpp's name -> quantisation type; the others stay float32
        self.fields = {
            f"{self.arch}.{key}": value
            for key, value in {
                "block_count": settings.num_hidden_layers,
                "context_length": settings.max_position_embeddings,
                "embedding_length": settings.hidden_size,
                "feed_forward_length": settings.intermediate_size,
                "attention.head_count": settings.num_attention_heads,
                "attention.head_count_kv": settings.num_key_value_heads,
                "attention.key_length": 32,
                "attention.value_length": 32,
                "attention.layer_norm_rms_epsilon": 1e-6,
                "rope.freq_base": 10_000.0,
                "rope.dimension_count": 32,
            }.items()
        }
        self.fields |= byte_level_fields()

    def write(self, path):
        writer = gguf.GGUFWriter(path, self.arch)
        for key, value in self.fields.items():
            add = {str: writer.add_string, bool: writer.add_bool, float: writer.add_float32, int: writer.add_uint32}
            add.get(type(value), writer.add_array)(key, value)
        for name, tensor in self.tensors.items():
            if name in self.types:
                blocks = gguf.quantize(tensor, self.types[name])
                writer.add_tensor(name, blocks, raw_dtype=self.types[name])
            else:
                writer.add_tensor(name, np.ascontiguousarray(tensor))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def _permuted(self, name: str, weight: np.ndarray) -> np.ndarray:
        """llama.cpp interleaves the halves of each head of q and k in its architecture ``llama``."""
        if self.arch != "llama" or ("q_proj" not in name and "k_proj" not in name):
            return weight
        num_heads = len(weight) // 32
        return weight.reshape(num_heads, 2, 16, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def byte_level_fields(**changes) -> dict:
    """A vocabulary of letters with one merge, in the metadata of a GGUF file."""
    tokens = ["<s>", "</s>", "<user>", *BYTE_LETTERS, "Ġ", "Ċ", "hi", "[PAD]"]
    types = [3, 3, 4] + [1] * (len(tokens) - 4) + [5]
    fields = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": types, "merges": ["h i"]}
    fields |= {"bos_token_id": 0, "eos_token_id": 1, **changes}
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items() if value is not None}


def _gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{_NAMES[rest]}.{kind}"
    return f"{_NAMES[stem]}.{kind}"


@pytest.fixture(scope="session")
def gguf_model():
    return GgufModel


_READ_ALL = """
import sys
from tensorrt_llm_ext.checkpoint import open_checkpoint

def peak():  # of this program alone: ru_maxrss would start from the peak of the one that started it
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

with open_checkpoint(sys.argv[1]) as checkpoint:
    floor = peak()
    for info in checkpoint.tensors():
        checkpoint.tensor(info.name)
    checkpoint.fingerprint()
print(peak() - floor, floor)
"""


@pytest.fixture
def peak_of_reading():
    """Measure in a fresh process how far reading every tensor raises the peak, and from which floor (bytes)."""

    def measure(path):
        command = [sys.executable, "-c", _READ_ALL, str(path)]
        rise, floor = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        return int(rise), int(floor)

    return measure
