"""The layout names every tensor of a decoder with its shape, as transformers' models have them."""

import pytest
from tiny import FAMILIES, tiny_model

from tensorrt_llm_ext.checkpoint import architecture_from_config
from tensorrt_llm_ext.checkpoint.layout import HEAD, decoder_shapes


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        *((family, {}) for family in FAMILIES),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen3", {"attention_bias": True}),
    ],
)
def test_the_layout_is_that_of_transformers(family, fields):
    model = tiny_model(family, **fields)
    architecture = architecture_from_config({**model.config.to_dict(), "architectures": [type(model).__name__]})
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name != HEAD}
    assert decoder_shapes(architecture) == wanted
