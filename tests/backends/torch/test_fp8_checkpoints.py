"""FP8 checkpoints of others on backend torch: their values and scales as they are, of inputs too where these are fixed."""

import json

import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file

from tensorrt_llm_ext.backends import open_engine
from tensorrt_llm_ext.backends.torch import plain
from tensorrt_llm_ext.backends.torch.values import FP8, Linear, Rows
from tensorrt_llm_ext.backends.torch.weight_index import read_weight_index
from tensorrt_llm_ext.builder import build as builder
from tensorrt_llm_ext.builder import build_engine, canaries
from tensorrt_llm_ext.checkpoint import open_checkpoint
from tensorrt_llm_ext.checkpoint.layout import PRODUCTS
from tensorrt_llm_ext.errors import EngineError, InputError
from tensorrt_llm_ext.fingerprint import token_hash
from tensorrt_llm_ext.recipes import Recipe, read_contract
from tensorrt_llm_ext.results import WorkItem
from tensorrt_llm_ext.runtime import Session

SCALE = 0.002  # of inputs: they saturate at 0.9, which shows
TAPS = "final@last,final@all"
KINDS = [("modelopt", SCALE), ("compressed-tensors", SCALE), ("compressed-tensors", None)]
IDS = [f"{method}, {'fixed' if scale else 'row by row'}" for method, scale in KINDS]


@pytest.fixture
def foretold(monkeypatch):
    """States of the canaries with the rounding, as a build computes them; whatever they are, the engine is published."""
    found = {}
    monkeypatch.setattr(builder, "check_fp8_canaries", lambda checkpoint, settings, given, states: found.update(states) or 0.0)
    return found


@pytest.fixture
def build(cpu_card, tmp_path, monkeypatch, foretold):
    monkeypatch.setitem(canaries.TOLERANCES, "fp8", 0.02)  # a tiny random model's states lie too near for the real one

    def built(method, input_scale, **options):
        folder = tiny.fp8_checkpoint(tmp_path / "checkpoint", method, input_scale=input_scale)
        build_engine(folder, tmp_path / "engine", card=cpu_card, precision="fp8", taps=TAPS, **options)
        return folder, tmp_path / "engine"

    return built


def products_of(engine):
    opened = open_engine(engine, read_contract(engine))
    layers = opened._decoder.layers
    opened.close()
    return {f"{number}.{part}": getattr(layer, part) for number, layer in enumerate(layers) for part in PRODUCTS}


@pytest.mark.parametrize(("method", "input_scale"), KINDS, ids=IDS)
def test_values_and_scales_are_those_of_the_checkpoint(build, method, input_scale):
    folder, engine = build(method, input_scale)
    stored, products = load_file(folder / "model.safetensors"), products_of(engine)
    for product, linear in products.items():
        names = [f"model.layers.{product.split('.')[0]}.{name}" for name in PRODUCTS[product.split(".")[1]]]
        if product == "1.down":
            assert linear.weight.dtype == torch.bfloat16 and not linear.is_fp8 and linear.input_scale is None
            continue
        values = torch.cat([stored[f"{name}.weight"].view(torch.uint8) for name in names])
        assert torch.equal(linear.weight.view(torch.uint8), values)
        scales = torch.cat([stored[f"{name}.weight_scale"].reshape(-1).expand(len(stored[f"{name}.weight"])) for name in names])
        assert torch.equal(linear.scales, scales[None])
        if input_scale is not None or not product.endswith(".o"):  # which gets one that no row can pass
            assert linear.input_scale == (None if input_scale is None else np.float32(SCALE))
    assert read_contract(engine).build["stored_scales"] == {
        "linears": 13, "fixed_inputs": 13 if input_scale else 0, "kept_products": ["1.down"],
    }  # fmt: skip
    assert (engine / "weights-1.safetensors").samefile(folder / "model.safetensors")  # no byte of a weight is rewritten


def reference(folder, sequences, input_scale):
    """Last states of transformers whose linears multiply rounded inputs with the values that are stored."""
    stored, model = load_file(folder / "model.safetensors"), tiny.tiny_model("llama", num_hidden_layers=2)

    def rounded(module, inputs):
        rows = inputs[0]
        scales = rows.abs().amax(-1, keepdim=True) / 448 if input_scale is None else input_scale
        return ((rows / scales).clamp(-448, 448).to(FP8).float() * scales,)

    with torch.no_grad():
        for name, parameter in model.model.named_parameters(prefix="model"):
            parameter.copy_(stored[name].float())
        for name, module in model.model.named_modules(prefix="model"):
            if f"{name}.weight_scale" in stored:
                module.weight.copy_(stored[f"{name}.weight"].float() * stored[f"{name}.weight_scale"])
                module.register_forward_pre_hook(rounded)
        return [model.model(torch.as_tensor(ids)[None].long()).last_hidden_state[0].numpy() for ids in sequences]


def cosine(a, b):
    return (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)


@pytest.mark.parametrize(("method", "input_scale"), KINDS, ids=IDS)
def test_states_are_those_of_the_rounding_that_the_checkpoint_asks_for(build, method, input_scale):
    folder, engine = build(method, input_scale)
    rng = np.random.default_rng(0)
    sequences = [rng.integers(3, 260, length).astype(np.int32) for length in (9, 1, 30, 17)]
    items = [WorkItem(str(n), str(n), ids, token_hash(ids)) for n, ids in enumerate(sequences)]
    with Session.open(engine, num_threads=1, prove=False) as session:
        found = {record.request_id: record.states[1].rows.astype(np.float32) for record in session.extract(items)}
    found = np.concatenate([found[item.request_id] for item in items])
    right, other = (np.concatenate(reference(folder, sequences, scale)) for scale in ((input_scale, None) if input_scale else (None, SCALE)))
    near, far = cosine(found, right), cosine(found, other)
    assert near.min() > 0.99 and far.mean() < 0.99 < 0.997 < near.mean()


@pytest.mark.parametrize(("method", "input_scale"), KINDS, ids=IDS)
def test_the_build_foretells_the_canaries_of_that_rounding(build, foretold, method, input_scale):
    folder, engine = build(method, input_scale)
    sequences = [np.array(canary.token_ids) for canary in read_contract(engine).canaries]
    right, other = (np.concatenate(reference(folder, sequences, scale)) for scale in ((input_scale, None) if input_scale else (None, SCALE)))
    found = np.concatenate(foretold[2, "post"])
    assert cosine(found, right).min() > 0.9999 > 0.999 > cosine(found, other).mean()


def test_the_build_foretells_what_rounding_row_by_row_gives(cpu_card, foretold, monkeypatch, tmp_path):
    """Of a checkpoint that is not quantised: weights too, each row by its own size; a product that is kept is not rounded."""
    monkeypatch.setitem(canaries.TOLERANCES, "fp8", 0.01)
    folder = tiny.tiny_checkpoint(tmp_path / "checkpoint", "llama", num_hidden_layers=2)
    contract = build_engine(folder, tmp_path / "engine", card=cpu_card, recipe=Recipe(precision="fp8", fp8_kept=("1.down",)), taps=TAPS)
    sequences = [np.array(canary.token_ids) for canary in contract.canaries]
    exact = row_by_row(sequences, kept=tuple(PRODUCTS))
    right, all_rounded = row_by_row(sequences, kept=("1.down",)), row_by_row(sequences, kept=())
    found = np.concatenate(foretold[2, "post"])
    assert cosine(found, right).min() > 0.999_99 > cosine(found, all_rounded).mean() and cosine(found, exact).mean() < 0.9999


def row_by_row(sequences, kept):
    """Last states of transformers whose linears multiply rounded rows with rounded weights, but for the products kept."""
    model = tiny.tiny_model("llama", num_hidden_layers=2)
    in_float32 = {f"{product.split('.')[0]}.{name}" for product in kept if "." in product for name in PRODUCTS[product.split(".")[1]]}
    is_exact = kept == tuple(PRODUCTS)

    def rounded(rows):
        values, scales = plain.quantised(rows.flatten(0, -2))
        return (values.float() * scales).view_as(rows)

    with torch.no_grad():
        for name, module in model.model.layers.named_modules():
            if isinstance(module, torch.nn.Linear) and not is_exact and name not in in_float32:
                module.weight.copy_(rounded(module.weight))
                module.register_forward_pre_hook(lambda module, inputs: (rounded(inputs[0]),))
        return np.concatenate([model.model(torch.as_tensor(ids)[None].long()).last_hidden_state[0].numpy() for ids in sequences])


def test_a_product_that_the_recipe_keeps_is_multiplied_out(build):
    folder, engine = build("compressed-tensors", SCALE, recipe=Recipe(fp8_kept=("0.o",)))
    linear = products_of(engine)["0.o"]
    with open_checkpoint(folder) as checkpoint:
        right = torch.from_numpy(checkpoint.tensor("model.layers.0.self_attn.o_proj.weight")).to(torch.bfloat16)
    assert not linear.is_fp8 and torch.equal(linear.weight, right)
    assert read_weight_index(engine).kept == ("0.o", "1.down")


def test_a_calibration_that_nothing_uses_is_refused(build, tmp_path):
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "a"}) + "\n")
    with pytest.raises(InputError, match="brings its own FP8 scales"):
        build("modelopt", None, calibration=tmp_path / "text.jsonl")


def test_a_scale_that_was_changed_is_refused_by_name(build):
    _, engine = build("modelopt", SCALE)
    path = engine / "scales.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(EngineError, match=r"'model.layers.1.mlp.up_proj.input_scale' .* is not the one that the engine was built with"):
        open_engine(engine, read_contract(engine))


def test_a_fixed_scale_saturates_and_a_row_that_is_not_finite_stays_so():
    rows = torch.tensor([[1.0, -3.0, 100.0, 0.0], [1.0, float("nan"), 2.0, 3.0], [float("-inf"), 1.0, 2.0, 3.0]])
    out = Rows(torch.zeros(3, 4).to(FP8), torch.zeros(3, 1), None, 0.125)
    plain.write_rows(rows, out)
    assert (out.values[0].float() * out.scales[0]).tolist() == [1, -3, 56, 0]  # 448 x 0.125
    assert out.scales[0] == 0.125 and out.scales[1:].isnan().all()
    product = torch.zeros(3, 2)
    plain.multiply(out, Linear(torch.ones(2, 4).to(FP8), torch.ones(1, 2)), product)
    assert product[0].tolist() == [54, 54] and product[1:].isnan().all()
