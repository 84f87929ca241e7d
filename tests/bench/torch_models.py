"""Models of random weights, made on their device, for measurements of speed. Their numbers mean nothing.

The device is the first CUDA card; without one the CPU, where the plain operations run tiny shapes, for tests.
"""

from __future__ import annotations

import torch

from tensorrt_llm_ext.backends.torch.decoder import Decoder, Layer
from tensorrt_llm_ext.backends.torch.engine import TorchEngine
from tensorrt_llm_ext.backends.torch.loading import _linear, with_attended_scale
from tensorrt_llm_ext.backends.torch.tensors import engine_tensors
from tensorrt_llm_ext.backends.torch.values import HeadNorms, Heads, Linear, Norm, Rope
from tensorrt_llm_ext.backends.torch.workspace import make_workspace
from tensorrt_llm_ext.checkpoint.architecture import Architecture
from tensorrt_llm_ext.checkpoint.rope import Rope as RopeSettings
from tensorrt_llm_ext.checkpoint.rope import rope_tables
from tensorrt_llm_ext.recipes.contract import Contract, Fingerprints, Limits, MemoryEstimate
from tensorrt_llm_ext.taps import parse_taps


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def architecture(family: str, **sizes) -> Architecture:
    plain = dict(
        max_positions=32768,
        norm_eps=1e-5,
        rope=RopeSettings("default", 10000.0, 32768),
        has_qkv_bias=False,
        has_o_bias=False,
        has_mlp_bias=False,
        has_qk_norm=family == "qwen3",
        is_tied=False,
        sliding_window=None,
    )
    return Architecture(family=family, **{**plain, **sizes})


LLAMA_2_7B = architecture(
    "llama",
    num_layers=32,
    hidden_size=4096,
    intermediate_size=11008,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    vocab_size=32000,
)
QWEN3_8B = architecture(
    "qwen3",
    num_layers=36,
    hidden_size=4096,
    intermediate_size=12288,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=151936,
)


def random_decoder(a: Architecture, *, is_fp8: bool, max_seq_len: int, seed: int = 0) -> Decoder:
    """A decoder whose stream keeps its size through the layers."""
    device = DEVICE
    generator = torch.Generator(device).manual_seed(seed)

    def weight(rows: int, columns: int, size: float = 1.0) -> torch.Tensor:
        values = torch.randn(rows, columns, generator=generator, device=device, dtype=torch.bfloat16)
        return values.mul_(size * columns**-0.5)

    def linear(rows: int, columns: int, size: float = 1.0, has_bias: bool = False) -> Linear:
        return _linear([weight(rows, columns, size)], weight(1, rows)[0] if has_bias else None, is_fp8)

    heads = Heads(a.num_heads, a.num_kv_heads, a.head_dim)
    ones = torch.ones(max(a.hidden_size, a.head_dim), dtype=torch.bfloat16, device=device)
    norm, head_norm = Norm(ones[: a.hidden_size], a.norm_eps), ones[: a.head_dim]

    def layer() -> Layer:
        qkv = linear(heads.fused_size, a.hidden_size, has_bias=a.has_qkv_bias)
        return Layer(
            attention_norm=norm,
            qkv=qkv,
            head_norms=HeadNorms(head_norm, head_norm, a.norm_eps) if a.has_qk_norm else None,
            o=with_attended_scale(linear(a.hidden_size, heads.q_size, 0.3), norm, qkv, heads),
            mlp_norm=norm,
            gate_up=linear(2 * a.intermediate_size, a.hidden_size),
            down=linear(a.hidden_size, a.intermediate_size, 0.3),
        )

    layers = tuple(layer() for _ in range(a.num_layers))
    rope = Rope(*(torch.from_numpy(table).to(device, torch.float16) for table in rope_tables(a, max_seq_len)))
    embedding = weight(a.vocab_size, a.hidden_size, a.hidden_size**0.5)
    return Decoder(embedding, layers, norm, heads, rope)


def contract_of(a: Architecture, *, taps: str, precision: str, limits: Limits) -> Contract:
    parsed = parse_taps(taps, a.num_layers)
    return Contract(
        model_name="random",
        architecture=a,
        fingerprints=Fingerprints(*["sha256:none"] * 4),
        backend="torch",
        builder="bench",
        builder_version="0",
        accepted_runtime="torch",
        platform="any",
        compute_capabilities=(".".join(map(str, torch.cuda.get_device_capability())),) if DEVICE.type == "cuda" else (),
        weight_dtype="bfloat16",
        activation_dtype=precision,
        taps=parsed,
        tensors=engine_tensors(a, parsed, precision),
        limits=limits,
        memory=MemoryEstimate(0, 0, "none"),
        files=(),
        canaries=(),
        build={},
    )


def random_engine(
    a: Architecture, *, taps: str, precision: str, limits: Limits, is_deterministic: bool = False, decoder: Decoder | None = None
) -> TorchEngine:
    """An engine of random weights, or of those of another engine's ``decoder``, as one that was opened."""
    with torch.inference_mode():
        decoder = decoder or random_decoder(a, is_fp8=precision == "fp8", max_seq_len=limits.max_seq_len)
        space = make_workspace(a, limits, torch.bfloat16, DEVICE, is_deterministic)
        engine = TorchEngine(contract_of(a, taps=taps, precision=precision, limits=limits), decoder, space, DEVICE)
        engine.warm_up()
        return engine
