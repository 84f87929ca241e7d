"""FP8: scales come from text, every linear has one or is kept and named, and the plan multiplies in FP8."""

import json
import re
from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest
import tiny
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tensorrt_llm_ext.backends.torch.weight_index import read_weight_index
from tensorrt_llm_ext.builder import build, build_engine, calibration, canaries, trt_engine
from tensorrt_llm_ext.builder.calibration import calibrate, stored_calibration
from tensorrt_llm_ext.checkpoint import open_checkpoint
from tensorrt_llm_ext.checkpoint.layout import PRODUCTS, product_linears
from tensorrt_llm_ext.errors import BuildError, InputError, RecipeError
from tensorrt_llm_ext.graph import write_decoder
from tensorrt_llm_ext.graph.fp8 import rounded_to_fp8, scale_of
from tensorrt_llm_ext.graph.quantisation import Fp8Linears
from tensorrt_llm_ext.recipes import Recipe, load_card
from tensorrt_llm_ext.runtime import Session
from tensorrt_llm_ext.taps import parse_taps

EVERYTHING = Recipe(precision="fp8", fp8_kept=())
LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Layers that change the states by more than FP8 does, or no canary could tell one from the next."""
    folder = tmp_path_factory.mktemp("checkpoint") / "llama"
    sizes = dict(num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=4)
    model = tiny.tiny_model("llama", **sizes)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.mul_(8.0)
        model.model.norm.weight.normal_()
    model.save_pretrained(folder)
    tiny.byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def may_move_far(monkeypatch):
    """FP8 moves a tiny random model farther than canaries allow: what is built then is not for use."""
    monkeypatch.setattr(build, "check_fp8_canaries", lambda *given: 0.0)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "prompts.jsonl"
    lines = ["A first prompt to calibrate on.", "Another, a little longer, with 12 numbers in it.", "short"]
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("card", ["l40s", "rtx5090", "dgx-spark", ("l40s", "rtx5090")])
def test_a_plan_multiplies_every_linear_in_fp8(card, checkpoint, text, tmp_path, may_move_far):
    pytest.importorskip("tensorrt_rtx_bindings")
    contract = build_engine(checkpoint, tmp_path / "engine", recipe=EVERYTHING, card=card, calibration=text)
    assert (contract.weight_dtype, contract.activation_dtype) == ("float8_e4m3fn", "fp8")
    assert contract.build["calibration"]["fp8_linears"] == 2 * len(LINEARS)
    plan = (tmp_path / "engine" / "engine.plan").read_bytes()
    weights = set(re.findall(rb'fully_connected=\{ name="[^"]*" output=\{[^}]*\} input=\{"[^"]*" "([^"]*_dconst)"', plan))
    assert weights, "the plan names no multiplication by a constant"
    for name in weights:  # one byte a value
        found = re.search(rb'const_payload_size=(\d+) dims=\{ (\d+) (\d+) \} name="' + re.escape(name) + b'"', plan)
        num_bytes, *sizes = map(int, found.groups())
        assert num_bytes == sizes[0] * sizes[1]


def test_the_scales_lie_beside_the_engine_with_the_calibrations_fingerprint(checkpoint, text, tmp_path, may_move_far):
    contract = build_engine(checkpoint, tmp_path / "engine", recipe=EVERYTHING, calibration=text)
    with safe_open(tmp_path / "engine" / "scales.safetensors", "numpy") as file:
        assert json.loads(file.metadata()["calibration"])["fingerprint"] == contract.build["calibration"]["fingerprint"]
        names = set(file.keys())
        weight = open_checkpoint(checkpoint).tensor("model.layers.0.mlp.down_proj.weight")
        assert np.array_equal(file.get_tensor("model.layers.0.mlp.down_proj.weight_scale"), scale_of(np.abs(weight).max(1)))
    linears = {f"model.layers.{layer}.{name}" for layer in range(2) for name in LINEARS}
    assert names == {f"{name}.{kind}_scale" for name in linears for kind in ("activation", "weight")}
    assert "scales.safetensors" in {file.name for file in contract.files}


def test_the_graph_of_float32_rounds_operands_as_the_scales_say(checkpoint, text, tmp_path):
    """Near float32, and not float32: what `verify` measures on the CPU. Every linear has its rounding."""
    with open_checkpoint(checkpoint) as opened:
        linears = calibrate(opened, text, num_layers=2, most=None).linears
        states = {}
        for name, fp8 in (("float32", None), ("fp8", linears)):
            (tmp_path / name).mkdir()
            taps = parse_taps("layer:1@all", 2)
            write_decoder(opened, tmp_path / name, taps=taps, dtype="float32", max_seq_len=16, fp8=fp8)
            states[name] = run(tmp_path / name / "model.onnx", np.arange(40, 56, dtype=np.int32))
    right, found = states["float32"], states["fp8"]
    cosines = (right * found).sum(1) / np.linalg.norm(right, axis=1) / np.linalg.norm(found, axis=1)
    assert cosines.min() > 0.98 and cosines.max() < 0.999_99
    nodes = [node.op_type for node in onnx.load(tmp_path / "fp8" / "model.onnx", load_external_data=False).graph.node]
    assert nodes.count("Gemm") == len(LINEARS)
    assert nodes.count("QuantizeLinear") == 4  # one for q, k and v, one for gate and up
    assert nodes.count("DequantizeLinear") == 4 + len(LINEARS)


def test_a_compiler_gets_linears_of_one_input_as_one_product_with_the_same_numbers(checkpoint, text, tmp_path):
    """A product that is kept in bfloat16 is left apart."""
    with open_checkpoint(checkpoint) as opened:
        linears = calibrate(opened, text, num_layers=2, most=None, kept=("1.gate_up",)).linears
        apart, together = (written(opened, tmp_path / name, linears, name == "together") for name in ("apart", "together"))
    weights = {tensor.name: list(tensor.dims) for tensor in onnx.load(together, load_external_data=False).graph.initializer}
    layer = "model.layers.0."
    assert weights[" and ".join(f"{layer}self_attn.{name}_proj.weight" for name in "qkv")] == [64 + 2 * 2 * 16, 64]
    assert weights[f"{layer}mlp.gate_proj.weight and {layer}mlp.up_proj.weight"] == [2 * 128, 64]
    assert "model.layers.1.mlp.gate_proj.weight" in weights and not any("1.mlp.gate_proj.weight and" in name for name in weights)
    token_ids = np.arange(40, 56, dtype=np.int32)
    assert np.array_equal(run(together, token_ids), run(apart, token_ids))


@pytest.mark.parametrize("method", ["modelopt", "compressed-tensors"])
def test_stored_fp8_weights_are_one_product_where_they_lie_side_by_side(method, tmp_path):
    """Nothing is copied for it: gate and up are neighbours in a file in alphabetical order; q, k and v are not."""
    folder = tiny.fp8_checkpoint(tmp_path / "checkpoint", method)
    with open_checkpoint(folder) as opened:
        linears = stored_calibration(opened, None, num_layers=2).linears
        apart, together = (written(opened, tmp_path / name, linears, name == "together") for name in ("apart", "together"))
    weights = {tensor.name: tensor for tensor in onnx.load(together, load_external_data=False).graph.initializer}
    stacked = weights["model.layers.0.mlp.gate_proj.weight and model.layers.0.mlp.up_proj.weight"]
    assert {entry.key: entry.value for entry in stacked.external_data}["location"] == "checkpoint-1.weights"
    assert "model.layers.0.self_attn.q_proj.weight" in weights
    token_ids = np.arange(40, 56, dtype=np.int32)
    assert np.array_equal(run(together, token_ids), run(apart, token_ids))


def written(opened, folder, linears, is_compiled):
    folder.mkdir()
    taps = parse_taps("final@all", 2)
    write_decoder(opened, folder, taps=taps, dtype="float32", max_seq_len=16, fp8=linears, is_compiled=is_compiled)
    return folder / "model.onnx"


def run(model, token_ids):
    """The only output of a decoder for one sequence."""
    rows = np.arange(len(token_ids), dtype=np.int32)
    session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    inputs = {"input_ids": token_ids, "position_ids": rows, "attention_rows": rows[None], "packed_slots": rows}
    return session.run(None, inputs)[0]


def test_other_text_is_another_engine(checkpoint, text, tmp_path):
    first = build_engine(checkpoint, tmp_path / "first", precision="fp8", calibration=text)
    again = build_engine(checkpoint, tmp_path / "again", precision="fp8", calibration=text)
    assert first.engine_fingerprint() == again.engine_fingerprint()
    (tmp_path / "other.txt").write_text("Entirely other words\n")
    other = build_engine(checkpoint, tmp_path / "other", precision="fp8", calibration=tmp_path / "other.txt")
    assert other.engine_fingerprint() != first.engine_fingerprint()


def test_the_products_that_harm_most_are_kept_until_the_rest_is_within_what_is_allowed(checkpoint, text, tmp_path, may_move_far):
    everything = replace(EVERYTHING, fp8_kept=None, fp8_harm=2.0)
    harms = build_engine(checkpoint, tmp_path / "all", recipe=everything, calibration=text).build["calibration"]
    assert harms["kept_products"] == {} and harms["harm_of_fp8"] == harms["harm_of_all_products"] > 0
    most = harms["harm_of_all_products"] / 2
    contract = build_engine(checkpoint, tmp_path / "half", recipe=replace(everything, fp8_harm=most), calibration=text)
    facts = contract.build["calibration"]
    assert 0 < facts["harm_of_fp8"] <= most == facts["harm_allowed"]
    kept = [name for product in facts["kept_products"] for name in product_linears(product)]
    assert kept and facts["fp8_linears"] == 2 * len(LINEARS) - len(kept)
    opened = open_checkpoint(checkpoint)
    assert facts["bytes_for_kept_products"] == sum(opened.tensor(f"{name}.weight").size for name in kept)
    with safe_open(tmp_path / "half" / "scales.safetensors", "numpy") as file:
        assert json.loads(file.metadata()["calibration"])["kept"] == list(facts["kept_products"])
        assert not {f"{name}.weight_scale" for name in kept} & set(file.keys())


def test_both_backends_keep_the_same_products(checkpoint, text, tmp_path):
    recipe = Recipe(precision="fp8", fp8_harm=1e-3)
    kept = build_engine(checkpoint, tmp_path / "ort", recipe=recipe, calibration=text).build["calibration"]["kept_products"]
    build_engine(checkpoint, tmp_path / "torch", card="h200", recipe=recipe, calibration=text)
    assert kept and list(read_weight_index(tmp_path / "torch").kept) == list(kept)


def test_what_the_recipe_keeps_is_kept_and_nothing_measured(checkpoint, text, monkeypatch):
    monkeypatch.setattr(calibration, "product_harms", lambda *args, **options: pytest.fail("measured"))
    with open_checkpoint(checkpoint) as opened:
        products = ("0.qkv", "1.down", "1.gate_up")
        linears = calibrate(opened, text, num_layers=2, most=None, kept=products).linears
    assert linears.kept == {
        *(f"model.layers.0.self_attn.{name}_proj" for name in "qkv"),
        *(f"model.layers.1.mlp.{name}_proj" for name in ("down", "gate", "up")),
    }
    assert len(linears.scales) == 14 - 6 and not linears.kept & set(linears.scales)


def test_backend_torch_measures_nothing_where_the_recipe_names_the_products(checkpoint, text, tmp_path, may_move_far):
    recipe = Recipe(precision="fp8", fp8_kept=("1.down",))
    contract = build_engine(checkpoint, tmp_path / "engine", card="h200", recipe=recipe)
    assert read_weight_index(tmp_path / "engine").kept == ("1.down",) and "calibration" not in contract.build
    with pytest.raises(RecipeError, match="nothing of this engine is measured"):
        build_engine(checkpoint, tmp_path / "other", card="h200", recipe=recipe, calibration=text)


@pytest.mark.parametrize("method", ["modelopt", "compressed-tensors"])
def test_scales_of_a_quantised_checkpoint_are_read_and_nothing_is_measured(method, text, tmp_path, monkeypatch, may_move_far):
    monkeypatch.setattr(calibration, "layer_states", lambda *args, **options: pytest.fail("measured"))
    monkeypatch.setitem(canaries.TOLERANCES, "fp8", 0.02)  # a tiny random model's states lie too near for the real one
    folder = tiny.fp8_checkpoint(tmp_path / "checkpoint", method)
    contract = build_engine(folder, tmp_path / "engine", precision="fp8")
    assert contract.build["calibration"]["kept_products"] == ["1.down"]
    assert contract.build["calibration"]["fp8_linears"] == 13 and contract.build["calibration"]["tokens"] == 0
    name = "model.layers.1.mlp.gate_proj"
    with safe_open(tmp_path / "engine" / "scales.safetensors", "numpy") as file, open_checkpoint(folder) as opened:
        stored = opened.fp8_scales(name)
        assert file.get_tensor(f"{name}.activation_scale") == scale_of(np.float32(0.05) * 448)
        assert np.allclose(file.get_tensor(f"{name}.weight_scale"), stored.weight, rtol=2**-8)
        codes = load_file(folder / "model.safetensors")[f"{name}.weight"]
        written = rounded_to_fp8(opened.tensor(f"{name}.weight"), file.get_tensor(f"{name}.weight_scale")[:, None])
        assert np.array_equal(written.astype(np.float32), codes.float().numpy())  # the very values that were stored
    with pytest.raises(InputError, match="brings its own FP8 scales"):
        build_engine(folder, tmp_path / "other", precision="fp8", calibration=text)
    contract = build_engine(folder, tmp_path / "torch", card="h200", precision="fp8")
    assert contract.build["stored_scales"] == {"linears": 13, "fixed_inputs": 13, "kept_products": ["1.down"]}


def test_the_oracle_foretells_what_the_engine_gives(checkpoint, text, tmp_path):
    """Backend ort rounds as the oracle does, and neither rounds a product that is kept."""
    kept = tuple(f"{layer}.{part}" for layer in range(2) for part in PRODUCTS if (layer, part) != (1, "qkv"))
    recipe = Recipe(precision="fp8", fp8_kept=kept, taps="final@all,final:pre@last")
    contract = build_engine(checkpoint, tmp_path / "engine", recipe=recipe, calibration=text)
    with Session.open(tmp_path / "engine") as session:
        largest = max(distance.distance for distance in session.check_canaries())
    assert contract.build["canary_distance_of_fp8"] == pytest.approx(largest, rel=0.02) and largest > 1e-3


@pytest.mark.parametrize(
    ("card", "recipe", "fix"),
    [
        ("cpu", Recipe(precision="fp8", fp8_harm=2.0), "lower fp8_harm in the recipe, now 2,"),
        ("l40s", Recipe(precision="fp8", fp8_harm=2.0), "lower fp8_harm in the recipe, now 2,"),
        ("h200", Recipe(precision="fp8", fp8_harm=2.0), "lower fp8_harm in the recipe, now 2,"),
        ("cpu", EVERYTHING, "name more products in the recipe's fp8_kept"),
    ],
)
def test_an_engine_that_would_fail_its_own_canaries_is_not_published(card, recipe, fix, checkpoint, text, tmp_path, monkeypatch):
    if card == "l40s":
        pytest.importorskip("tensorrt_rtx_bindings")
    for precision, tolerance in (("fp8", 5e-3), ("bfloat16", 3e-3)):  # less than FP8 moves this model
        monkeypatch.setitem(canaries.TOLERANCES, precision, tolerance)
    with pytest.raises(BuildError, match="would fail its own canaries") as error:
        build_engine(checkpoint, tmp_path / "engine", recipe=recipe, card=card, calibration=text)
    assert fix in error.value.fix and "--precision bfloat16" in error.value.fix
    assert error.value.expected == f"a distance of at most {0.005 if card == 'cpu' else 0.004:g}"
    assert float(error.value.found) > 0.005 and list(tmp_path.iterdir()) == []


def test_scales_that_came_with_a_checkpoint_are_not_said_to_be_chosen_by_their_harm(tmp_path, monkeypatch):
    monkeypatch.setitem(canaries.TOLERANCES, "fp8", 0.02)
    folder = tiny.fp8_checkpoint(tmp_path / "checkpoint", "modelopt", input_scale=1e-3)  # cuts inputs, which shows
    with pytest.raises(BuildError, match="would fail its own canaries") as error:
        build_engine(folder, tmp_path / "engine", precision="fp8")
    assert error.value.fix.startswith("name more products in the recipe's fp8_kept")


@pytest.mark.parametrize("precision", ["fp8", "bfloat16"])
def test_a_quantised_checkpoint_is_compiled(precision, tmp_path, monkeypatch, may_move_far):
    pytest.importorskip("tensorrt_rtx_bindings")
    for name in ("fp8", "bfloat16"):
        monkeypatch.setitem(canaries.TOLERANCES, name, 0.02)
    folder = tiny.fp8_checkpoint(tmp_path / "checkpoint", "modelopt")
    contract = build_engine(folder, tmp_path / "engine", card="l40s", precision=precision)
    assert contract.activation_dtype == precision and contract.build["plan_bytes"] > 100_000


def test_a_quantised_checkpoint_without_scales_of_inputs_is_an_error(tmp_path):
    folder = tiny.fp8_checkpoint(tmp_path / "checkpoint", "compressed-tensors", input_scale=None)
    with pytest.raises(BuildError, match="no scale for the input of 'model.layers.0.self_attn.q_proj'"):
        build_engine(folder, tmp_path / "engine", precision="fp8")


def test_a_missing_scale_is_an_error(checkpoint, text, tmp_path):
    with open_checkpoint(checkpoint) as opened:
        linears = calibrate(opened, text, num_layers=2, most=None).linears
        missing = "model.layers.1.mlp.up_proj"
        scales = {name: found for name, found in linears.scales.items() if name != missing}
        with pytest.raises(BuildError, match=f"no FP8 scale for '{missing}'"):
            write_decoder(
                opened, tmp_path, taps=parse_taps("final@last", 2), dtype="float32", max_seq_len=8, fp8=Fp8Linears(scales)
            )


@pytest.mark.parametrize("size", [0.0, np.inf, np.nan])
def test_an_input_without_a_scale_is_refused(size, checkpoint):
    with pytest.raises(BuildError, match="'linear' gives no FP8 scale"):
        calibration._scales(open_checkpoint(checkpoint), "linear", size)


def test_scales_are_values_of_bfloat16_that_cut_nothing():
    largest = np.geomspace(1e-6, 1e6, 999).astype(np.float32)
    scales = scale_of(largest)
    assert np.all(scales * 448 >= largest) and np.all(scales * 448 <= largest * 1.01)
    assert not np.any(scales.view(np.uint32) & 0xFFFF)
    assert scale_of(np.zeros(2, np.float32)).tolist() == [1, 1]  # a channel of zeros stays one


def test_a_card_without_fp8_is_refused_before_the_builder_is_asked(checkpoint, text, tmp_path, monkeypatch):
    monkeypatch.setattr(trt_engine, "calibrated", lambda *args: pytest.fail("the builder was asked"))
    with pytest.raises(RecipeError, match="'a100' .NVIDIA A100. cannot build fp8"):
        build_engine(checkpoint, tmp_path / "engine", card="a100", precision="fp8", calibration=text)
    claimed = replace(load_card("a100"), precisions=("fp8",))
    with pytest.raises(BuildError, match="8.0 has no FP8"):
        build_engine(checkpoint, tmp_path / "engine", card=claimed, calibration=text)


def test_a_calibration_that_nothing_uses_is_refused(checkpoint, text, tmp_path):
    with pytest.raises(RecipeError, match="nothing of this engine is measured"):
        build_engine(checkpoint, tmp_path / "engine", calibration=text)


@pytest.mark.parametrize(
    ("content", "found"),
    [("", "no prompt"), ('{"text": ""}\n', "empty"), ("x" * 600 + "\n", "601 tokens")],
)
def test_text_that_cannot_be_calibrated_on_is_refused(content, found, checkpoint, tmp_path):
    path = tmp_path / ("prompts.jsonl" if content.startswith("{") else "prompts.txt")
    path.write_text(content)
    with pytest.raises(InputError, match="cannot be calibrated on") as error:
        build_engine(checkpoint, tmp_path / "engine", precision="fp8", calibration=path)
    assert found in f"{error.value}"


def test_without_the_demo_text_must_be_named(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "DEMO_PROMPTS", tmp_path / "absent.jsonl")
    with pytest.raises(InputError, match="FP8 needs text"):
        build_engine(checkpoint, tmp_path / "engine", precision="fp8")
