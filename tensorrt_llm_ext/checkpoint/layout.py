"""Layout: the tensors a decoder needs, by Hugging Face's canonical names, with their shapes."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from tensorrt_llm_ext.checkpoint.architecture import Architecture
from tensorrt_llm_ext.errors import DamagedCheckpoint, nearest_name

HEAD = "lm_head.weight"  # not a part of the decoder: used only where next tokens are compared

PRODUCTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""The matrix products of a decoder layer, and the linears that each is made of: those that multiply the same rows."""


def product_linears(product: str) -> tuple[str, ...]:
    """Name the linears of a product: ``model.layers.11.mlp.down_proj`` for ``11.down``; layers count from 0."""
    layer, part = product.split(".")
    return tuple(f"model.layers.{layer}.{name}" for name in PRODUCTS[part])


def decoder_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """List every tensor of the decoder in the order of use, with its shape (a weight is ``[out, in]``)."""
    a = architecture
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (a.vocab_size, a.hidden_size)}
    for k in range(a.num_layers):
        shapes |= {f"model.layers.{k}.{name}": shape for name, shape in _layer_shapes(a).items()}
    return shapes | {"model.norm.weight": (a.hidden_size,)}


def check_layers(architecture: Architecture, found: Collection[str], path: Path) -> None:
    """Raise DamagedCheckpoint when there are fewer tensors than layers: a damaged number, not worth a list of names."""
    if architecture.num_layers > len(found):
        raise DamagedCheckpoint(
            f"'{path}' cannot hold as many layers as its config says",
            expected=f"tensors for {architecture.num_layers} layers",
            found=f"{len(found)} tensors",
            fix="check that the config belongs to these weights, and that every file of the checkpoint is there",
        )


def check_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...], file: Path) -> None:
    """Raise DamagedCheckpoint when a stored tensor has another shape than the architecture gives it."""
    if found != expected:
        raise DamagedCheckpoint(
            f"the tensor '{name}' in '{file}' has the wrong shape",
            expected=f"{list(expected)}, from the model's config",
            found=list(found),
            fix="check that the config belongs to these weights",
        )


def missing_tensor(path: Path, name: str, known: Collection[str]) -> DamagedCheckpoint:
    """Make the error for a tensor that the checkpoint lacks, naming the nearest it has."""
    return DamagedCheckpoint(
        f"'{path}' has no tensor '{name}'",
        expected=f"a tensor '{name}'",
        found=nearest_name(name, known),
        fix="check that the config belongs to these weights, and that every file of the checkpoint is there",
    )


def _layer_shapes(a: Architecture) -> dict[str, tuple[int, ...]]:
    q_size, kv_size = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (a.hidden_size,)}

    def linear(name: str, size_in: int, size_out: int, has_bias: bool) -> None:
        shapes[f"{name}.weight"] = (size_out, size_in)
        if has_bias:
            shapes[f"{name}.bias"] = (size_out,)

    linear("self_attn.q_proj", a.hidden_size, q_size, a.has_qkv_bias)
    linear("self_attn.k_proj", a.hidden_size, kv_size, a.has_qkv_bias)
    linear("self_attn.v_proj", a.hidden_size, kv_size, a.has_qkv_bias)
    if a.has_qk_norm:
        shapes |= {"self_attn.q_norm.weight": (a.head_dim,), "self_attn.k_norm.weight": (a.head_dim,)}
    linear("self_attn.o_proj", q_size, a.hidden_size, a.has_o_bias)
    shapes["post_attention_layernorm.weight"] = (a.hidden_size,)
    linear("mlp.gate_proj", a.hidden_size, a.intermediate_size, a.has_mlp_bias)
    linear("mlp.up_proj", a.hidden_size, a.intermediate_size, a.has_mlp_bias)
    linear("mlp.down_proj", a.intermediate_size, a.hidden_size, a.has_mlp_bias)
    return shapes
