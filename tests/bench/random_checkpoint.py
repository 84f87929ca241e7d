"""A Llama checkpoint of random weights, for a peer that loads one.

What a product costs in power, and at a card's limit in time, depends on its values: the peers get weights drawn like ours, not
those that they make up.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch_models import DEVICE
from transformers_peer import llama_config

from tensorrt_llm_ext.checkpoint.architecture import Architecture
from tensorrt_llm_ext.checkpoint.layout import decoder_shapes


def write_checkpoint(folder: Path, a: Architecture) -> Path:
    """Write config.json, any tokenizer, and bfloat16 weights, a file a layer."""
    folder.mkdir(parents=True, exist_ok=True)
    model = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "hidden_act": "silu"}
    special = {"bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(llama_config(a) | model | special))
    vocab = {"type": "WordLevel", "vocab": {"<s>": 0, "a": 1}, "unk_token": "<s>"}
    tokenizer = {"version": "1.0", "model": vocab, "pre_tokenizer": {"type": "Whitespace"}, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    names = {"bos_token": "<s>", "eos_token": "<s>", "unk_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | names))
    shapes, files = decoder_shapes(a), {}
    for part, of_part in itertools.groupby(shapes, lambda name: ".".join(name.split(".")[:3])):
        tensors = {name: _random(shapes[name]) for name in of_part}
        save_file(tensors, folder / f"{part}.safetensors", metadata={"format": "pt"})
        files |= dict.fromkeys(tensors, f"{part}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


def _random(shape: tuple[int, ...]) -> torch.Tensor:
    """A matrix that keeps the size of its rows, or a norm of ones."""
    tensor = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
    return (tensor.normal_(0, shape[1] ** -0.5) if len(shape) == 2 else tensor.fill_(1)).cpu()
