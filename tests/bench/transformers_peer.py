"""The peer transformers, bfloat16, eager and compiled, on a batch of equal sequences: the last rows, in float32 on the card."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch_models import DEVICE

from tensorrt_llm_ext.checkpoint.architecture import Architecture


def transformers_calls(a: Architecture, num_sequences: int, length: int) -> dict[str, Callable]:
    """Make a model of random weights, and give what runs it once, warmed up, by its name."""
    import transformers

    config = transformers.LlamaConfig(**llama_config(a))
    with torch.device("meta"):
        model = transformers.LlamaModel(config).to(torch.bfloat16)
    model = model.to_empty(device=DEVICE).eval()
    model.rotary_emb = type(model.rotary_emb)(config=config).to(DEVICE)
    for parameter in model.parameters():
        parameter.data.normal_(0, a.hidden_size**-0.5) if parameter.ndim == 2 else parameter.data.fill_(1)
    ids = torch.randint(0, a.vocab_size, (num_sequences, length), device=DEVICE)
    runs = {"eager": model, "compiled": torch.compile(model)}

    def call_of(run) -> Callable:
        return lambda: run(input_ids=ids, use_cache=False).last_hidden_state[:, -1].float()

    calls = {f"transformers {name} bf16": call_of(run) for name, run in runs.items()}
    for call in calls.values():
        call()
        call()
    return calls


def llama_config(a: Architecture) -> dict:
    """What config.json says of a Llama of this shape."""
    return {
        "hidden_size": a.hidden_size, "intermediate_size": a.intermediate_size, "num_hidden_layers": a.num_layers,
        "num_attention_heads": a.num_heads, "num_key_value_heads": a.num_kv_heads, "head_dim": a.head_dim,
        "vocab_size": a.vocab_size, "max_position_embeddings": a.max_positions, "rms_norm_eps": a.norm_eps,
    }  # fmt: skip
