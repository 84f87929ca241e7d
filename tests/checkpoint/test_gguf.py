"""A GGUF file gives the tensors of the same Hugging Face model, bit for bit where it stores them whole."""

import ml_dtypes
import numpy as np
import pytest
import transformers
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, dequantize
from tiny import FAMILIES, smollm2_gguf
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from tensorrt_llm_ext.checkpoint import architecture_from_config, open_checkpoint
from tensorrt_llm_ext.checkpoint.gguf_file import read_gguf
from tensorrt_llm_ext.errors import DamagedCheckpoint, UnsupportedCheckpoint

Q = GGMLQuantizationType
Q_PROJ, UP_PROJ = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.up_proj.weight"


def loaded_by_transformers(path, model):
    """Config and tensors as transformers reads them (its from_pretrained also wants accelerate)."""
    loaded = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)
    return loaded["config"], loaded["tensors"]


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_is_that_of_the_model_it_was_made_from(tmp_path, gguf_model, family, is_tied):
    tiny = gguf_model(family, tie_word_embeddings=is_tied)
    wanted = tiny.model.state_dict()
    if is_tied:
        del wanted["lm_head.weight"]
    checkpoint = open_checkpoint(tiny.write(tmp_path / "model.gguf"))
    assert {info.name for info in checkpoint.tensors()} == set(wanted)
    for info in checkpoint.tensors():
        tensor = checkpoint.tensor(info.name)
        assert tensor.dtype == np.float32 and tensor.flags.c_contiguous and tensor.shape == info.shape
        assert np.array_equal(tensor, wanted[info.name].numpy()), info.name


@pytest.mark.parametrize("fields", [{}, {"attention_bias": True, "mlp_bias": True}], ids=["plain", "biases"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_architecture_is_that_of_the_model_it_was_made_from(tmp_path, gguf_model, family, fields):
    fields = fields if family == "llama" else {}
    tiny = gguf_model(family, **fields)
    config = {
        **tiny.model.config.to_dict(),
        "architectures": [type(tiny.model).__name__],
        "rms_norm_eps": float(np.float32(1e-6)),
    }
    wanted = architecture_from_config(config)
    got = open_checkpoint(tiny.write(tmp_path / "model.gguf")).architecture
    if family == "mistral":  # llama.cpp has one name for both, and the numbers are the same
        assert got.family == "llama"
    assert {**got.to_dict(), "family": family} == wanted.to_dict()


@pytest.mark.parametrize("type_", [Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0, Q.F16, Q.BF16], ids=lambda t: t.name)
def test_quantised_weights_are_those_of_transformers(tmp_path, gguf_model, type_):
    tiny = gguf_model("llama")
    tiny.types = {name: type_ for name, tensor in tiny.tensors.items() if tensor.ndim == 2}
    checkpoint = open_checkpoint(tiny.write(tmp_path / "model.gguf"))
    _, wanted = loaded_by_transformers(tmp_path / "model.gguf", tiny.model)
    names = [info.name for info in checkpoint.tensors()]
    assert sorted(names) == sorted(wanted)
    for name in names:
        assert np.array_equal(checkpoint.tensor(name).astype(np.float32), wanted[name].float().numpy()), name


def served_types():
    for type_ in Q:
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[type_][1]), np.uint8), type_)
        except NotImplementedError:
            continue
        yield type_


@pytest.mark.parametrize("type_", [t for t in served_types() if t not in (Q.F32, Q.F16, Q.BF16)], ids=lambda t: t.name)
def test_every_type_the_gguf_package_knows_is_dequantised_as_it_does(tmp_path, gguf_model, monkeypatch, type_):
    rows, values = 512, 256  # of UP_PROJ
    block_values, block_bytes = GGML_QUANT_SIZES[type_]
    blocks = np.random.default_rng(0).integers(0, 256, (rows, values // block_values * block_bytes), dtype=np.uint8)
    tiny = gguf_model("qwen3")
    monkeypatch.setattr("gguf.quantize", lambda tensor, _: blocks)
    tiny.types = {"blk.1.ffn_up.weight": type_}
    monkeypatch.setattr(
        "tensorrt_llm_ext.checkpoint.gguf._PIECE_VALUES", 100 * values
    )  # 512 rows: the last piece is short
    checkpoint = open_checkpoint(tiny.write(tmp_path / "model.gguf"))
    assert checkpoint.info(UP_PROJ).dtype == "float32" and checkpoint.info(UP_PROJ).file is None
    with np.errstate(all="ignore"):  # random scales overflow
        assert np.array_equal(checkpoint.tensor(UP_PROJ), dequantize(blocks, type_), equal_nan=True)


@pytest.mark.parametrize("type_", [Q.F16, Q.BF16, None], ids=["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_values_that_lie_as_they_are_have_a_place_and_permuted_ones_have_none(tmp_path, gguf_model, family, type_):
    tiny = gguf_model(family)
    tiny.types = {name: type_ for name, tensor in tiny.tensors.items() if type_ and tensor.ndim == 2}
    checkpoint = open_checkpoint(tiny.write(tmp_path / "model.gguf"))
    dtype = {Q.F16: np.float16, Q.BF16: ml_dtypes.bfloat16, None: np.float32}[type_]
    for name in (Q_PROJ, UP_PROJ):
        info, tensor = checkpoint.info(name), checkpoint.tensor(name)
        assert tensor.dtype == dtype and info.dtype == np.dtype(dtype).name
        if family == "llama" and name == Q_PROJ:
            assert (info.file, info.offset, info.length) == (None, None, None)
        else:
            assert info.file.read_bytes()[info.offset : info.offset + info.length] == tensor.tobytes()


def write_part(source, path, num_layers):
    """Copy the first layers of a llama GGUF file, blocks as they are, without its vocabulary."""
    writer = GGUFWriter(path, "llama")
    for key, value in {**source.metadata, "llama.block_count": num_layers}.items():
        add = {int: writer.add_uint32, float: writer.add_float32}.get(type(value))
        if add and key.startswith("llama."):
            add(key, value)
    for name, stored in source.tensors.items():
        if name.startswith("blk.") and int(name.split(".")[1]) >= num_layers:
            continue
        blocks = np.fromfile(source.path, np.uint8, stored.length, offset=stored.offset)
        if stored.type == Q.F32:
            writer.add_tensor(name, blocks.view(np.float32).reshape(stored.shape))
        else:
            writer.add_tensor(name, blocks.reshape(stored.shape[0], -1), raw_dtype=stored.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# transformers takes half a minute for the names of 30 layers and for the vocabulary, which is not what is compared.
@pytest.mark.parametrize("num_layers", [3, pytest.param(30, marks=pytest.mark.slow)])
def test_smollm2_is_bit_for_bit_what_transformers_loads(tmp_path, num_layers):
    write_part(read_gguf(smollm2_gguf()), tmp_path / "part.gguf", num_layers)
    config = transformers.LlamaConfig(num_hidden_layers=num_layers, vocab_size=8, hidden_size=8, num_attention_heads=2)
    config, wanted = loaded_by_transformers(tmp_path / "part.gguf", transformers.LlamaForCausalLM(config))
    checkpoint = open_checkpoint(smollm2_gguf())
    names = [info.name for info in open_checkpoint(tmp_path / "part.gguf").tensors()]
    assert set(wanted) == set(names) and len(names) == 2 + 9 * num_layers
    for name in names:
        assert np.array_equal(checkpoint.tensor(name), wanted[name].numpy()), name
    assert architecture_from_config({**config, "num_hidden_layers": 30}) == checkpoint.architecture


def test_reading_smollm2_takes_the_memory_of_one_tensor(peak_of_reading):
    rise, floor = peak_of_reading(smollm2_gguf())
    largest = 49152 * 576 * 4
    assert 0.9 * largest < rise < largest + 30e6, f"rose by {rise / 1e6:.0f} MB over {floor / 1e6:.0f} MB"
    assert floor < 150e6


def test_the_fingerprint_changes_with_any_byte_and_not_with_the_name(tmp_path, gguf_model):
    path = gguf_model("qwen3").write(tmp_path / "model.gguf")
    before = open_checkpoint(path).fingerprint()
    path = path.rename(tmp_path / "other.gguf")
    assert open_checkpoint(path).fingerprint() == before
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert open_checkpoint(path).fingerprint() != before


def test_the_name_is_the_models_own_or_the_files(tmp_path, gguf_model):
    tiny = gguf_model("qwen3")
    assert open_checkpoint(tiny.write(tmp_path / "some-model.gguf")).name == "some-model"
    tiny.fields["general.name"] = "Some Model"
    assert open_checkpoint(tiny.write(tmp_path / "model.gguf")).name == "Some Model"


def test_a_missing_tensor_is_damage_and_the_nearest_is_named(tmp_path, gguf_model):
    tiny = gguf_model("qwen3")
    del tiny.tensors["blk.1.ffn_up.weight"]
    with pytest.raises(DamagedCheckpoint, match=f"has no tensor '{UP_PROJ}'") as error:
        open_checkpoint(tiny.write(tmp_path / "model.gguf"))
    assert error.value.found == "did you mean 'model.layers.0.mlp.up_proj.weight'?"


def test_a_tensor_that_is_asked_for_by_a_wrong_name_is_an_error(tmp_path, gguf_model):
    with pytest.raises(DamagedCheckpoint, match="has no tensor 'model.norm'"):
        open_checkpoint(gguf_model("qwen3").write(tmp_path / "model.gguf")).tensor("model.norm")


@pytest.mark.parametrize("name", ["blk.0.ffn_up_exps.weight", "blk.0.attn_q_norm.weight", "rope_factors_long.weight"])
def test_a_tensor_that_the_decoder_does_not_use_is_damage(tmp_path, gguf_model, name):
    tiny = gguf_model("llama")
    tiny.tensors[name] = np.zeros(32, np.float32)
    with pytest.raises(DamagedCheckpoint, match="has a tensor that its metadata does not account for"):
        open_checkpoint(tiny.write(tmp_path / "model.gguf"))


def test_a_tensor_of_the_wrong_shape_is_damage(tmp_path, gguf_model):
    tiny = gguf_model("qwen3")
    tiny.tensors["blk.1.ffn_up.weight"] = tiny.tensors["blk.1.ffn_up.weight"][:-1]
    with pytest.raises(DamagedCheckpoint, match=f"the tensor '{UP_PROJ}' in .* has the wrong shape"):
        open_checkpoint(tiny.write(tmp_path / "model.gguf"))


def test_a_type_that_nothing_dequantises_is_refused_by_name(tmp_path, gguf_model):
    tiny = gguf_model("qwen3")
    tiny.tensors["blk.1.ffn_up.weight"] = np.zeros((512, 256), np.int8)
    with pytest.raises(UnsupportedCheckpoint, match="weights of type I8 are not served"):
        open_checkpoint(tiny.write(tmp_path / "model.gguf"))


def test_a_file_that_shrinks_while_it_is_open_is_damage(tmp_path, gguf_model):
    checkpoint = open_checkpoint(gguf_model("qwen3").write(tmp_path / "model.gguf"))
    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(DamagedCheckpoint, match="became shorter while it was open"):
        checkpoint.tensor(UP_PROJ)


def test_a_truncated_file_is_damage(tmp_path, gguf_model):
    path = gguf_model("qwen3").write(tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedCheckpoint, match="is truncated") as error:
        open_checkpoint(path)
    assert "for the tensor" in error.value.expected
