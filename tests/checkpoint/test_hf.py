"""A Hugging Face folder gives every tensor of the decoder, exactly, or says by name what is wrong with it."""

import json
import os

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from tiny import FAMILIES, tiny_checkpoint, tiny_model

from tensorrt_llm_ext.checkpoint import open_checkpoint
from tensorrt_llm_ext.errors import DamagedCheckpoint, UnsupportedCheckpoint

NUMPY_DTYPES = {torch.float32: np.float32, torch.float16: np.float16, torch.bfloat16: ml_dtypes.bfloat16}
NORM, EMBEDDING = "model.layers.0.input_layernorm.weight", "model.embed_tokens.weight"


@pytest.fixture
def folder(tmp_path):
    return tiny_checkpoint(tmp_path / "tiny", "llama", num_hidden_layers=2)


@pytest.fixture
def sharded(tmp_path):
    return tiny_checkpoint(tmp_path / "tiny", "llama", num_hidden_layers=2, max_shard_size="100KB")


def change_config(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def change_weights(folder, change):
    """Rewrite model.safetensors with its dictionary changed."""
    weights = load_file(folder / "model.safetensors")
    save_file(change(weights) or weights, folder / "model.safetensors")


@pytest.mark.parametrize("max_shard_size", ["5GB", "200KB"], ids=["single", "sharded"])
@pytest.mark.parametrize("dtype", NUMPY_DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_is_what_transformers_wrote(tmp_path, family, dtype, max_shard_size):
    tiny_checkpoint(tmp_path, family, dtype=dtype, max_shard_size=max_shard_size)
    wanted = tiny_model(family).to(dtype).state_dict()
    with open_checkpoint(tmp_path) as checkpoint:
        names = [info.name for info in checkpoint.tensors()]
        assert sorted(names) == sorted(wanted)
        for name in names:
            tensor = checkpoint.tensor(name)
            assert tensor.dtype == NUMPY_DTYPES[dtype] and tensor.flags.c_contiguous
            assert np.array_equal(tensor.astype(np.float32), wanted[name].float().numpy())


@pytest.mark.parametrize("dtype", NUMPY_DTYPES, ids=str)
def test_the_place_of_a_tensor_holds_its_values(tmp_path, dtype):
    checkpoint = open_checkpoint(tiny_checkpoint(tmp_path, "qwen3", dtype=dtype, max_shard_size="200KB"))
    for info in checkpoint.tensors():
        content = info.file.read_bytes()[info.offset : info.offset + info.length]
        tensor = checkpoint.tensor(info.name)
        assert content == tensor.tobytes() and (info.dtype, info.shape) == (str(tensor.dtype), tensor.shape)


def test_tensors_of_several_types_keep_theirs(folder):
    change_weights(folder, lambda weights: weights | {NORM: weights[NORM].astype(np.float16)})
    checkpoint = open_checkpoint(folder)
    assert checkpoint.info(NORM).dtype == "float16" == str(checkpoint.tensor(NORM).dtype)
    assert checkpoint.info("model.norm.weight").dtype == "float32"


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_head_is_listed_only_where_it_is_one_of_its_own(tmp_path, is_tied):
    checkpoint = open_checkpoint(tiny_checkpoint(tmp_path, "qwen2", tie_word_embeddings=is_tied))
    assert ("lm_head.weight" in [info.name for info in checkpoint.tensors()]) is not is_tied


def test_a_head_beside_tied_embeddings_is_not_listed(folder):
    change_config(folder, tie_word_embeddings=True)
    assert "lm_head.weight" not in [info.name for info in open_checkpoint(folder).tensors()]


def test_a_missing_head_is_no_damage(folder):
    change_weights(folder, lambda weights: weights.pop("lm_head.weight") is None)
    assert "lm_head.weight" not in [info.name for info in open_checkpoint(folder).tensors()]


def test_a_checkpoint_of_the_bare_model_has_the_same_names(tmp_path, folder):
    tiny_model("llama", num_hidden_layers=2).model.save_pretrained(tmp_path / "bare")
    assert "embed_tokens.weight" in load_file(tmp_path / "bare" / "model.safetensors")
    bare, whole = open_checkpoint(tmp_path / "bare"), open_checkpoint(folder)
    assert [info.name for info in bare.tensors()] == [info.name for info in whole.tensors()][:-1]
    assert np.array_equal(bare.tensor(NORM), whole.tensor(NORM))


def test_weights_outside_the_decoder_and_old_rotary_buffers_do_not_matter(folder):
    extra = {
        "v_head.weight": np.zeros((1, 48), np.float32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32),
    }
    names = [info.name for info in open_checkpoint(folder).tensors()]
    change_weights(folder, lambda weights: weights | extra)
    assert [info.name for info in open_checkpoint(folder).tensors()] == names


def test_a_snapshot_of_the_hub_cache_is_opened_through_its_links(tmp_path, sharded):
    blobs, snapshot = (
        tmp_path / "models--owner--some-name" / "blobs",
        tmp_path / "models--owner--some-name/snapshots/abc",
    )
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for i, file in enumerate(sorted(sharded.iterdir())):
        os.rename(file, blobs / str(i))
        (snapshot / file.name).symlink_to(f"../../blobs/{i}")
    checkpoint = open_checkpoint(snapshot)
    assert checkpoint.name == "owner/some-name"
    assert np.array_equal(checkpoint.tensor(NORM), tiny_model("llama", num_hidden_layers=2).state_dict()[NORM])
    assert {info.file.parent for info in checkpoint.tensors()} == {blobs}  # real files, which can be hard-linked
    assert checkpoint.tokenizer().has_chat_template


def test_the_fingerprint_ignores_where_the_folder_is_and_what_it_is_called(tmp_path, sharded):
    before = open_checkpoint(sharded).fingerprint()
    os.rename(sharded, tmp_path / "another name")
    assert open_checkpoint(tmp_path / "another name").fingerprint() == before
    assert before.startswith("sha256:") and len(before) == 71


def test_the_fingerprint_changes_with_any_byte_of_a_weight_and_with_the_architecture(sharded):
    prints = {open_checkpoint(sharded).fingerprint()}
    for file in sorted(sharded.glob("*.safetensors")):
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        prints.add(open_checkpoint(sharded).fingerprint())
    change_config(sharded, rms_norm_eps=1e-3)
    prints.add(open_checkpoint(sharded).fingerprint())
    assert len(prints) == 2 + len(list(sharded.glob("*.safetensors"))) > 3


def test_an_unknown_tensor_is_answered_with_the_nearest_name(folder):
    with pytest.raises(DamagedCheckpoint, match="has no tensor 'model.layers.0.input_layernom.weight'") as error:
        open_checkpoint(folder).tensor("model.layers.0.input_layernom.weight")
    assert error.value.found == f"did you mean '{NORM}'?"


def test_a_missing_tensor_is_damage_and_the_nearest_is_named(folder):
    change_weights(folder, lambda weights: weights.pop(NORM) is None)
    with pytest.raises(DamagedCheckpoint, match=f"has no tensor '{NORM}'") as error:
        open_checkpoint(folder)
    assert error.value.found == "did you mean 'model.layers.1.input_layernorm.weight'?"


@pytest.mark.parametrize("num_layers", [25, 2**40])
def test_fewer_tensors_than_layers_are_damage(folder, num_layers):
    change_config(folder, num_hidden_layers=num_layers)
    with pytest.raises(DamagedCheckpoint, match="cannot hold as many layers as its config says") as error:
        open_checkpoint(folder)
    assert (error.value.expected, error.value.found) == (f"tensors for {num_layers} layers", "21 tensors")


@pytest.mark.parametrize("name", [NORM, EMBEDDING, "lm_head.weight"])
def test_a_tensor_of_the_wrong_shape_is_damage(folder, name):
    change_weights(folder, lambda weights: weights | {name: weights[name][:-1]})
    with pytest.raises(DamagedCheckpoint, match=f"the tensor '{name}' in .* has the wrong shape") as error:
        open_checkpoint(folder)
    assert "from the model's config" in error.value.expected and error.value.found.startswith("[")


def test_more_layers_than_the_config_says_are_damage(folder):
    change_config(folder, num_hidden_layers=1)
    with pytest.raises(DamagedCheckpoint, match=r"does not account for: 'model\.layers\.1\.") as error:
        open_checkpoint(folder)
    assert error.value.expected == "the tensors of 1 llama layers"


@pytest.mark.parametrize(
    ("name", "tensor"),
    [(name, tensor) for name in ("I8", "F64") for tensor in ("model.layers.1.mlp.up_proj.weight", "lm_head.weight")]
    + [("F8_E4M3", "lm_head.weight"), ("F8_E4M3", "model.embed_tokens.weight"), ("F8_E4M3", "model.norm.weight")],
)
def test_weights_of_a_type_that_is_not_served_are_refused_by_name(folder, name, tensor):
    weights = {key: torch.from_numpy(value) for key, value in load_file(folder / "model.safetensors").items()}
    torch_dtype = {"F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8, "F64": torch.float64}[name]
    from safetensors.torch import save_file as save_torch

    save_torch(weights | {tensor: weights[tensor].to(torch_dtype)}, folder / "model.safetensors")
    with pytest.raises(UnsupportedCheckpoint, match=f"weights of type {name} are not served") as error:
        open_checkpoint(folder)
    assert tensor in error.value.found


def test_scales_beside_weights_are_damage_unless_the_config_speaks_of_them(folder):
    scale = "model.layers.0.mlp.up_proj.weight_scale"
    change_weights(folder, lambda weights: weights | {scale: np.ones(1, np.float32)})
    with pytest.raises(DamagedCheckpoint, match=f"does not account for: '{scale}'"):
        open_checkpoint(folder)


def test_modelopts_separate_file_declares_a_quantisation(folder):
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    with pytest.raises(UnsupportedCheckpoint, match="weights quantised with modelopt NVFP4 are not served"):
        open_checkpoint(folder)


def test_an_adapter_that_is_not_merged_is_refused(folder):
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedCheckpoint, match="holds an adapter"):
        open_checkpoint(folder)


def test_pytorch_weights_are_refused_and_the_way_to_convert_them_is_named(folder):
    os.rename(folder / "model.safetensors", folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedCheckpoint, match="no weights in a form that is served") as error:
        open_checkpoint(folder)
    assert error.value.found == "pytorch_model.bin" and "convert it to safetensors" in error.value.fix


def test_a_folder_without_weights_is_refused(folder):
    os.remove(folder / "model.safetensors")
    with pytest.raises(UnsupportedCheckpoint, match="no weights in a form that is served") as error:
        open_checkpoint(folder)
    assert error.value.found == "no weight files"


def test_a_truncated_shard_is_damage(sharded):
    file = sorted(sharded.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(DamagedCheckpoint, match=f"{file.name}' is truncated"):
        open_checkpoint(sharded)


def test_a_file_that_shrinks_while_it_is_open_is_damage(folder):
    checkpoint = open_checkpoint(folder)
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(DamagedCheckpoint, match="became shorter while it was open"):
        checkpoint.tensor(NORM)


def test_a_shard_that_the_index_names_and_that_is_absent_is_damage(sharded):
    file = sorted(sharded.glob("*.safetensors"))[1]
    os.remove(file)
    with pytest.raises(DamagedCheckpoint, match=f"the shard .*{file.name}' is missing"):
        open_checkpoint(sharded)


def change_index(folder, change):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def test_a_tensor_that_is_not_where_the_index_places_it_is_damage(sharded):
    files = sorted(file.name for file in sharded.glob("*.safetensors"))

    def misplace(index):
        first = next(name for name, file in index["weight_map"].items() if file == files[0])
        index["weight_map"][first] = files[1]

    change_index(sharded, misplace)
    with pytest.raises(DamagedCheckpoint, match=f"{files[1]}' lacks a tensor that the index places there"):
        open_checkpoint(sharded)


def test_an_index_without_a_weight_map_is_damage(sharded):
    change_index(sharded, lambda index: index.pop("weight_map"))
    with pytest.raises(DamagedCheckpoint, match="has no weight_map"):
        open_checkpoint(sharded)


def test_a_tensor_in_two_shards_is_damage(sharded):
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    name, tensor = next(iter(load_file(first).items()))
    save_file(load_file(second) | {name: tensor}, second)
    with pytest.raises(DamagedCheckpoint, match=f"the tensor '{name}' is stored twice"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("text", ["{", "[]", "\udcff"], ids=["cut", "a list", "not text"])
def test_a_config_that_is_not_a_json_object_is_damage(folder, text):
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(DamagedCheckpoint, match="config.json' is damaged"):
        open_checkpoint(folder)


def test_a_broken_link_to_the_config_is_damage(tmp_path, folder):
    from tensorrt_llm_ext.checkpoint.hf import read_config

    with pytest.raises(DamagedCheckpoint, match="config.json' is missing"):
        read_config(tmp_path)


def test_reading_takes_the_memory_of_one_tensor(folder, peak_of_reading):
    vocab_size, hidden_size = 600_000, 48  # 115 MB, far above the noise of the measurement
    large = {name: np.zeros((vocab_size, hidden_size), np.float32) for name in (EMBEDDING, "lm_head.weight")}
    change_config(folder, vocab_size=vocab_size)
    change_weights(folder, lambda weights: weights | large)
    rise, floor = peak_of_reading(folder)
    largest = vocab_size * hidden_size * 4
    assert 0.9 * largest < rise < largest + 30e6, f"rose by {rise / 1e6:.0f} MB over {floor / 1e6:.0f} MB"
    assert floor < 150e6
