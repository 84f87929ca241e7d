"""The decoder graph gives transformers' hidden states, for every family, tap and mix of lengths."""

import numpy as np
import onnx
import pytest
import tiny
import torch

from tensorrt_llm_ext.checkpoint.architecture import architecture_from_config
from tensorrt_llm_ext.graph import write_decoder
from tensorrt_llm_ext.taps import parse_taps

LENGTHS = (5, 1, 17, 9, 1)
NUM_LAYERS = 8
EVERY_KIND = (
    "final@last,final@mean,final@all,final:pre@last,final:pre@mean,final:pre@all,"
    "layer:0@last,layer:0@mean,layer:0@all,layer:5@last,layer:5@mean,layer:5@all"
)
LAST_ON_TOP = "layer:0@all,layer:5@mean,final@last,final:pre@last"  # the highest layer computes the last rows only
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}

MODELS = {
    **{family: (family, {}) for family in tiny.FAMILIES},
    "tied": ("llama", {"tie_word_embeddings": True}),
    "biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "one kv head": ("mistral", {"num_key_value_heads": 1}),
    "no grouping": ("qwen3", {"num_key_value_heads": 6}),
    "llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "yarn rope": ("qwen2", {"rope_parameters": YARN}),
}

# float32 against float32: the same sums in another order. 2e-5 of the row's largest value covers massive activations.
ATOL, RTOL_OF_ROW_MAX, MIN_COSINE = 1e-3, 2e-5, 0.999999


def random_sequences(lengths=LENGTHS, seed=1) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 263, length).astype(np.int32) for length in lengths]


def rows_of(states: dict, tap) -> np.ndarray:
    state = states[tap.layer, tap.norm]
    return {"last": state[-1:], "all": state, "mean": state.mean(0, dtype=np.float64, keepdims=True)}[tap.rows]


def check_close(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.shape == expected.shape and found.size
    difference, largest = np.abs(found - expected).max(1), np.abs(expected).max(1)
    cosine = (found * expected).sum(1, dtype=np.float64) / np.linalg.norm(found, axis=1) / np.linalg.norm(expected, axis=1)
    assert (difference <= np.maximum(ATOL, RTOL_OF_ROW_MAX * largest)).all(), difference.max()
    assert cosine.min() >= MIN_COSINE


@pytest.fixture
def decoder(tmp_path, array_checkpoint, open_decoder):
    """Write and open a decoder of a torch model."""

    def opened(model, taps: str, dtype="float32", max_seq_len=64):
        checkpoint = array_checkpoint(model, architecture_from_config(model.config.to_dict()))
        write_decoder(checkpoint, tmp_path, taps=parse_taps(taps, NUM_LAYERS), dtype=dtype, max_seq_len=max_seq_len)
        onnx.checker.check_model(str(tmp_path / "model.onnx"), full_check=True)
        return open_decoder(tmp_path / "model.onnx")

    return opened


@pytest.mark.parametrize("taps", [EVERY_KIND, LAST_ON_TOP], ids=["every kind", "last on top"])
@pytest.mark.parametrize("name", MODELS)
def test_every_tap_equals_transformers(name, taps, decoder, reference_states):
    family, config = MODELS[name]
    model = tiny.tiny_model(family, **config)
    sequences = random_sequences()
    states = [reference_states(model, sequence) for sequence in sequences]

    found = decoder(model, taps).run(sequences, extra_padding=3)

    for tap in parse_taps(taps, NUM_LAYERS):
        check_close(found[tap.column(NUM_LAYERS)], np.concatenate([rows_of(state, tap) for state in states]))


def test_eagle3_gives_four_states_of_every_token(decoder, reference_states):
    model = tiny.tiny_model("llama")
    sequences = random_sequences()
    found = decoder(model, "eagle3").run(sequences)
    assert list(found) == ["layer_002_pre_all", "layer_004_pre_all", "layer_005_pre_all", "final_pre_all"]
    for tap in parse_taps("eagle3", NUM_LAYERS):
        expected = np.concatenate([rows_of(reference_states(model, sequence), tap) for sequence in sequences])
        check_close(found[tap.column(NUM_LAYERS)], expected)


@pytest.mark.parametrize(
    ("taps", "extra"),
    [
        ("layer:3@all", set()),
        ("final@last", {"last_token_ids"}),
        ("layer:2@mean", {"sequence_lengths"}),
        ("final@last,layer:0@mean", {"last_token_ids", "sequence_lengths"}),
    ],
)
def test_inputs_are_those_that_the_taps_need(taps, extra, decoder):
    always = {"input_ids", "position_ids", "attention_rows", "packed_slots"}
    assert {tensor.name for tensor in decoder(tiny.tiny_model("llama"), taps).session.get_inputs()} == always | extra


@pytest.mark.parametrize(("taps", "highest", "has_norm"), [("layer:3@last", 3, False), ("final:pre@all", 8, False), ("final@all,layer:1@all", 8, True)])
def test_only_what_the_taps_need_is_written(taps, highest, has_norm, decoder, tmp_path):
    decoder(tiny.tiny_model("llama"), taps)
    graph = onnx.load(tmp_path / "model.onnx", load_external_data=False).graph
    written = {tensor.name for tensor in graph.initializer}
    layers = {int(name.split(".")[2]) for name in written if ".layers." in name}
    assert layers == set(range(highest))
    assert ("model.norm.weight" in written) == has_norm and "lm_head.weight" not in written
    assert written <= {name for node in graph.node for name in node.input}


def test_the_highest_layer_computes_only_the_rows_that_are_taken(decoder, tmp_path):
    def rows_of_last_mlp(taps):
        decoder(tiny.tiny_model("llama"), taps)
        model = onnx.shape_inference.infer_shapes(onnx.load(tmp_path / "model.onnx", load_external_data=False))
        (gemm,) = (node for node in model.graph.node if "model.layers.7.mlp.down_proj.weight" in node.input)
        (shape,) = (value.type.tensor_type.shape for value in model.graph.value_info if value.name == gemm.output[0])
        return shape.dim[0].dim_param

    assert rows_of_last_mlp("final@last,layer:3@all") == "B"
    assert rows_of_last_mlp("final@last,final:pre@all") != "B"


@pytest.mark.parametrize("taps", [EVERY_KIND, LAST_ON_TOP], ids=["every kind", "last on top"])
def test_a_nan_in_one_sequence_leaves_the_others_bit_unchanged(taps, decoder):
    model = tiny.tiny_model("qwen3")
    poison = 7
    with torch.no_grad():
        model.model.embed_tokens.weight[poison] = float("nan")
    sequences = [np.where(sequence == poison, 8, sequence) for sequence in random_sequences((6, 3, 11, 1, 4))]
    opened = decoder(model, taps)
    clean = opened.run(sequences, extra_padding=2)
    for place in (0, 5, 10):  # first, middle and last token of the third sequence
        poisoned = [sequence.copy() for sequence in sequences]
        poisoned[2][place] = poison
        found = opened.run(poisoned, extra_padding=2)
        for tap in parse_taps(taps, NUM_LAYERS):
            column = tap.column(NUM_LAYERS)
            theirs = (np.repeat(np.arange(5), list(map(len, sequences))) if tap.rows == "all" else np.arange(5)) == 2
            reaches = tap.layer > 0 or tap.rows != "last" or place == 10  # an embedding does not see earlier tokens
            assert np.isnan(found[column][theirs]).any() == reaches
            assert np.array_equal(found[column][~theirs], clean[column][~theirs]), column


def test_a_mean_takes_nothing_from_padded_slots_wherever_they_point(decoder):
    model = tiny.tiny_model("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = float("nan")
    opened = decoder(model, "layer:0@mean")
    arrays = opened.arrays([np.int32([7]), np.int32([8, 9])], extra_padding=2)
    arrays["attention_rows"] = np.int32([[0, 1, 2, 1], [1, 2, 0, 0]])  # the second sequence is padded with the NaN
    found = opened.session.run(None, arrays)[0]
    expected = model.model.embed_tokens.weight[[8, 9]].mean(0).detach().numpy()
    assert np.isnan(found[0]).all() and np.allclose(found[1], expected, atol=1e-6)


def test_a_sequence_does_not_see_its_batch(decoder):
    opened = decoder(tiny.tiny_model("llama"), "final@last,final@mean")
    sequences = random_sequences((12, 1, 30, 7))
    together = opened.run(sequences)
    for row, sequence in enumerate(sequences):
        alone = opened.run([sequence])
        for column, rows in alone.items():
            assert np.abs(rows[0] - together[column][row]).max() < 1e-5
            assert np.abs(rows[0] - together[column][row - 1]).max() > 1e-2


def test_the_same_batch_twice_gives_the_same_bytes(decoder):
    opened = decoder(tiny.tiny_model("llama"), EVERY_KIND)
    first, second = opened.run(random_sequences()), opened.run(random_sequences())
    assert all(first[column].tobytes() == second[column].tobytes() for column in first)


def test_float16_stays_near_float32(decoder, reference_states):
    model = tiny.tiny_model("llama")
    sequences = random_sequences()
    found = decoder(model, EVERY_KIND, dtype="float16").run(sequences)
    for tap in parse_taps(EVERY_KIND, NUM_LAYERS):
        rows = found[tap.column(NUM_LAYERS)]
        expected = np.concatenate([rows_of(reference_states(model, sequence), tap) for sequence in sequences])
        assert rows.dtype == (np.float32 if tap.rows == "mean" else np.float16)
        assert np.abs(rows - expected).max() < 2e-2 * np.abs(expected).max()


def test_a_bfloat16_build_gives_float32_outputs(tmp_path, array_checkpoint):
    model = tiny.tiny_model("llama")
    checkpoint = array_checkpoint(model, architecture_from_config(model.config.to_dict()))
    taps = parse_taps("final@last,final@mean,layer:2@all", NUM_LAYERS)
    files = write_decoder(checkpoint, tmp_path, taps=taps, dtype="bfloat16", max_seq_len=64)
    assert {tensor.dtype for tensor in files.outputs} == {"float32"}
    onnx.checker.check_model(str(tmp_path / "model.onnx"), full_check=True)


def test_the_same_checkpoint_twice_gives_the_same_bytes(tmp_path, array_checkpoint):
    model = tiny.tiny_model("qwen2")
    checkpoint = array_checkpoint(model, architecture_from_config(model.config.to_dict()))
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        write_decoder(checkpoint, folder, taps=parse_taps("final@last", NUM_LAYERS), dtype="float32", max_seq_len=64)
    for name in ("model.onnx", "weights.bin"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
