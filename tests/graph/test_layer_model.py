"""One layer as a model of its own gives what the whole graph gives, with weights as inputs."""

import numpy as np
import onnx
import onnxruntime
import pytest
import tiny

from tensorrt_llm_ext.checkpoint.architecture import architecture_from_config
from tensorrt_llm_ext.graph import layer_model, norm_model


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_chain_of_single_layers_is_the_whole_model(family, array_checkpoint, reference_states):
    model = tiny.tiny_model(family)
    checkpoint = array_checkpoint(model, architecture_from_config(model.config.to_dict()))
    token_ids = np.arange(10, 23, dtype=np.int32)
    expected = reference_states(model, token_ids)
    count = np.arange(13, dtype=np.int32)
    indices = {"position_ids": count, "attention_rows": count[None], "packed_slots": count}

    def run(proto, prefix, states):
        onnx.checker.check_model(proto, full_check=True)
        session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
        feed = {
            tensor.name: states if tensor.name == "states" else indices.get(tensor.name, checkpoint.arrays.get(prefix + tensor.name))
            for tensor in session.get_inputs()
        }
        return session.run(["next_states"], feed)[0]

    states = expected[0, "pre"]
    for layer in range(8):
        states = run(layer_model(checkpoint, 16), f"model.layers.{layer}.", states)
        assert np.abs(states - expected[layer + 1, "pre"]).max() < 1e-4
    assert np.abs(run(norm_model(checkpoint), "", states) - expected[8, "post"]).max() < 1e-4


def test_no_weight_is_in_the_model(array_checkpoint):
    model = tiny.tiny_model("llama")
    checkpoint = array_checkpoint(model, architecture_from_config(model.config.to_dict()))
    assert layer_model(checkpoint, 16).ByteSize() < 20_000
