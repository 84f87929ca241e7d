"""Checkpoints that others quantised to FP8 are read with their scales; a scale that is missing or odd is an error, never 1."""

import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from tensorrt_llm_ext.checkpoint import open_checkpoint
from tensorrt_llm_ext.errors import DamagedCheckpoint

METHODS = ("modelopt", "compressed-tensors")
LINEAR = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize("method", METHODS)
def test_a_weight_is_multiplied_with_its_scales(method, tmp_path):
    folder = tiny.fp8_checkpoint(tmp_path, method)
    stored = load_file(folder / "model.safetensors")
    with open_checkpoint(folder) as checkpoint:
        expected = stored[f"{LINEAR}.weight"].float() * stored[f"{LINEAR}.weight_scale"]
        assert np.array_equal(checkpoint.tensor(f"{LINEAR}.weight"), expected.numpy())
        scales = checkpoint.fp8_scales(LINEAR)
        assert scales.activation == np.float32(0.05) and scales.weight.shape == (80,)
        assert np.array_equal(scales.weight, np.broadcast_to(stored[f"{LINEAR}.weight_scale"].numpy().reshape(-1), 80))
        assert len(set(scales.weight.tolist())) == (1 if method == "modelopt" else 80)
        info = checkpoint.info(f"{LINEAR}.weight")
        assert (info.dtype, info.file) == ("float32", None)
        original = tiny.tiny_model("llama", num_hidden_layers=2).get_submodule(LINEAR).weight.detach().numpy()
        assert np.abs(checkpoint.tensor(f"{LINEAR}.weight") - original).max() < 0.07 * np.abs(original).max()


@pytest.mark.parametrize("method", METHODS)
def test_what_was_left_out_has_no_scales(method, tmp_path):
    with open_checkpoint(tiny.fp8_checkpoint(tmp_path, method)) as checkpoint:
        assert checkpoint.fp8_scales("model.layers.1.mlp.down_proj") is None
        assert checkpoint.info("model.layers.1.mlp.down_proj.weight").dtype == "bfloat16"


def test_a_dynamic_input_has_no_scale(tmp_path):
    with open_checkpoint(tiny.fp8_checkpoint(tmp_path, "compressed-tensors", input_scale=None)) as checkpoint:
        assert checkpoint.fp8_scales(LINEAR).activation is None


def changed(folder, change):
    stored = load_file(folder / "model.safetensors")
    change(stored)
    save_file(stored, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("method", METHODS)
def test_a_missing_weight_scale_is_an_error(method, tmp_path):
    folder = changed(tiny.fp8_checkpoint(tmp_path, method), lambda stored: stored.pop(f"{LINEAR}.weight_scale"))
    with pytest.raises(DamagedCheckpoint, match=f"no tensor '{LINEAR}.weight_scale'"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("kind", "value", "found"),
    [
        ("weight", torch.ones(3), "F32 [3]"),
        ("weight", torch.ones(80, 3), "F32 [80, 3]"),  # a scale a block
        ("weight", torch.ones(1, dtype=torch.int32), "I32 [1]"),
        ("weight", torch.tensor(0.0), "0 to 0"),
        ("input", torch.tensor(float("nan")), "nan to nan"),
        ("input", torch.ones(80), "80 values"),
    ],
)
def test_an_odd_scale_is_an_error(kind, value, found, tmp_path):
    folder = tiny.fp8_checkpoint(tmp_path, "modelopt")
    changed(folder, lambda stored: stored.update({f"{LINEAR}.{kind}_scale": value}))
    with pytest.raises(DamagedCheckpoint, match=f"'{LINEAR}.{kind}_scale'.*not one that is served") as error:
        with open_checkpoint(folder) as checkpoint:
            checkpoint.fp8_scales(LINEAR)
    assert found in error.value.found


def test_a_scale_of_a_weight_that_is_not_in_fp8_is_an_error(tmp_path):
    folder = tiny.fp8_checkpoint(tmp_path, "modelopt")
    changed(folder, lambda stored: stored.update({"model.layers.1.mlp.down_proj.weight_scale": torch.tensor(0.1)}))
    with pytest.raises(DamagedCheckpoint, match="config does not account for: 'model.layers.1.mlp.down_proj.weight_scale'"):
        open_checkpoint(folder)
