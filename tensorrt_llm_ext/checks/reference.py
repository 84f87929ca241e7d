"""The reference: transformers in float32, one decoder layer in memory at a time, for a model of any size.

Every sequence runs alone and unpadded through transformers' own modules; only the weights come from our readers. A
Hugging Face folder is configured by its own config.json, so a mistake in our reading of it shows; a GGUF file by our
`Architecture`, because transformers ignores the rope scaling that GGUF metadata holds.

torch and transformers are imported when a function is called; they come with the extra ``verify``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import numpy as np

from tensorrt_llm_ext.checkpoint.architecture import Architecture
from tensorrt_llm_ext.checkpoint.protocol import Checkpoint
from tensorrt_llm_ext.errors import MissingExtra
from tensorrt_llm_ext.taps import Norm

_HEAD_ROWS = 16_384  # rows of the output head multiplied at once: 256 MiB of float32 for a hidden size of 4096


def reference_source() -> str:
    """Name the reference as contracts and reports do: ``transformers 5.24.0``."""
    return f"transformers {_transformers().__version__}"


def reference_states(
    checkpoint: Checkpoint, sequences: Sequence[np.ndarray], *, last_layer: int | None = None, dtype: str = "float32"
) -> Iterator[tuple[int, Norm, list[np.ndarray]]]:
    """Yield ``(layer, norm, states)`` from layer 0, the embedding, upwards; ``states`` is float32 ``[tokens, hidden]`` a
    sequence. The same promise as ``builder.layer_states``, by other code.

    Ends with the state after the final norm, ``(n, "post", states)``, or with ``last_layer`` where one is given. In
    memory: one layer, its input and its output. With ``dtype`` float64 all but transformers' norms and rope, which are
    float32 always, is computed and returned in float64.
    """
    config = _config(checkpoint)
    num_layers = checkpoint.architecture.num_layers
    hidden = _embedded(checkpoint, sequences, dtype)
    yield 0, "pre", _arrays(hidden)
    for layer in range(num_layers if last_layer is None else last_layer):
        hidden = _through(_one_layer_model(checkpoint, config, layer, dtype), hidden)
        yield layer + 1, "pre", _arrays(hidden)
    if last_layer is None:
        yield num_layers, "post", _arrays(_through(_norm_model(checkpoint, config, dtype), hidden))


def next_tokens(checkpoint: Checkpoint, rows: np.ndarray) -> np.ndarray | None:
    """The most likely next token of each row of ``final@last``: argmax of the output head, ``[sequences]``.

    None when the checkpoint has no output head (an embedding model that is not tied).
    """
    head = _output_head(checkpoint)
    if head is None:
        return None
    best = np.full(len(rows), -np.inf, dtype=np.float32)
    token = np.zeros(len(rows), dtype=np.int64)
    for start in range(0, len(head), _HEAD_ROWS):
        logits = rows.astype(np.float32) @ head[start : start + _HEAD_ROWS].astype(np.float32).T  # [sequences, piece]
        highest = logits.max(axis=1)
        token = np.where(highest > best, start + logits.argmax(axis=1), token)
        best = np.maximum(highest, best)
    return token


def whole_model(checkpoint: Checkpoint, dtype: str):
    """Make the whole transformers model without its output head, in ``float32`` or ``bfloat16``."""
    model = _empty_model(_config(checkpoint))
    return _load(model, checkpoint, "model.", dtype).eval()


def _transformers() -> ModuleType:
    try:
        import torch  # noqa: F401  transformers imports without it and fails later, elsewhere
        import transformers
    except ImportError as error:
        raise MissingExtra(
            "the reference needs torch and transformers, which are not installed",
            expected="the extra 'verify' of this package",
            found=error,
            fix="pip install 'tensorrt_llm_ext[verify]'",
        ) from error
    return transformers


def _embedded(checkpoint: Checkpoint, sequences: Sequence[np.ndarray], dtype: str) -> list:
    """The embedding of each sequence: torch tensors ``[tokens, hidden]``."""
    import torch

    table = checkpoint.tensor("model.embed_tokens.weight")
    return [torch.from_numpy(table[ids].astype(dtype)) for ids in sequences]


def _one_layer_model(checkpoint: Checkpoint, config, layer: int, dtype: str):
    """A model that is one decoder layer and nothing after it: masks and rope are made by transformers itself."""
    import torch

    config = copy.deepcopy(config)
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[layer : layer + 1]
    model = _empty_model(config)
    model.norm = torch.nn.Identity()
    _load(model.layers[0], checkpoint, f"model.layers.{layer}.", dtype)
    return model.eval()


def _norm_model(checkpoint: Checkpoint, config, dtype: str):
    """A model that is the final norm alone."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = 0
    model = _empty_model(config)
    _load(model.norm, checkpoint, "model.norm.", dtype)
    return model.eval()


def _through(model, hidden: list) -> list:
    """Run each sequence alone, so that no padding and no neighbour can touch it, on a thread of its own.

    Threads that share one sequence wait for each other after every operator, which on a busy machine takes ten times
    as long as the work.
    """
    import torch

    def run(state):
        with torch.inference_mode():
            return model(inputs_embeds=state[None], use_cache=False).last_hidden_state[0]

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(num_threads) as pool:
            return list(pool.map(run, hidden))
    finally:
        torch.set_num_threads(num_threads)


def _arrays(hidden: list) -> list[np.ndarray]:
    return [state.numpy() for state in hidden]


def _output_head(checkpoint: Checkpoint) -> np.ndarray | None:
    if checkpoint.architecture.is_tied:
        return checkpoint.tensor("model.embed_tokens.weight")
    if any(info.name == "lm_head.weight" for info in checkpoint.tensors()):
        return checkpoint.tensor("lm_head.weight")
    return None


def _empty_model(config):
    """The model without its output head, its weights on the meta device: no memory until they are loaded."""
    import torch

    with torch.device("meta"):
        model = _transformers().AutoModel.from_config(config, dtype=torch.float32)
    model.rotary_emb = type(model.rotary_emb)(config=config)  # computed, not loaded: it must not stay on meta
    return model


def _load(module, checkpoint: Checkpoint, prefix: str, dtype: str):
    """Give ``module`` the checkpoint's tensors, converted, by name; every parameter must be there."""
    import torch

    weights = {}
    for name, _ in module.named_parameters():
        values = torch.from_numpy(checkpoint.tensor(prefix + name).astype(np.float32))
        weights[name] = values.to(getattr(torch, dtype))
    module.load_state_dict(weights, assign=True)
    return module


def _config(checkpoint: Checkpoint):
    """transformers' configuration: the checkpoint's own config.json, or our reading of the GGUF metadata."""
    transformers = _transformers()
    if (checkpoint.path / "config.json").exists():
        return transformers.AutoConfig.from_pretrained(checkpoint.path)
    return _config_from_architecture(checkpoint.architecture)


def _config_from_architecture(architecture: Architecture):
    rope = {
        "rope_type": architecture.rope.type,
        "rope_theta": architecture.rope.theta,
        **{name: list(value) if isinstance(value, tuple) else value for name, value in architecture.rope.parameters},
    }
    if architecture.rope.type != "default":
        rope["original_max_position_embeddings"] = architecture.rope.original_max_positions
    return _transformers().AutoConfig.for_model(
        architecture.family,
        vocab_size=architecture.vocab_size,
        hidden_size=architecture.hidden_size,
        intermediate_size=architecture.intermediate_size,
        num_hidden_layers=architecture.num_layers,
        num_attention_heads=architecture.num_heads,
        num_key_value_heads=architecture.num_kv_heads,
        head_dim=architecture.head_dim,
        max_position_embeddings=architecture.max_positions,
        rms_norm_eps=architecture.norm_eps,
        rope_parameters=rope,
        attention_bias=architecture.has_qkv_bias,
        mlp_bias=architecture.has_mlp_bias,
        sliding_window=architecture.sliding_window,
        tie_word_embeddings=architecture.is_tied,
    )
