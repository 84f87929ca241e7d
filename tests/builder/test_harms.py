"""What one product in FP8 does to the states at the end is measured by rounding that product alone."""

import numpy as np
import pytest
import tiny
import torch

from tensorrt_llm_ext.builder import layer_states
from tensorrt_llm_ext.builder.calibration import MEASURED_LENGTH, MEASURED_TOKENS, measured_part
from tensorrt_llm_ext.builder.harms import Harm, product_harms, products_to_keep, total
from tensorrt_llm_ext.checkpoint import open_checkpoint
from tensorrt_llm_ext.checkpoint.layout import product_linears
from tensorrt_llm_ext.graph.fp8 import scale_of
from tensorrt_llm_ext.graph.quantisation import LinearScales
from tensorrt_llm_ext.recipes.contract import row_cosines


def silent(done, total):
    pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "qwen3", "qwen3", num_hidden_layers=3)


@pytest.fixture(scope="module")
def sequences():
    rng = np.random.default_rng(0)
    return [rng.integers(3, 263, length).astype(np.int32) for length in (9, 1, 30, 4)]


def scales_of(checkpoint, sequences):
    largest = {}

    def observe(name, size):
        largest[name] = max(largest.get(name, 0), size)

    list(layer_states(checkpoint, sequences, observe=observe))
    weights = {name: checkpoint.tensor(f"{name}.weight") for name in largest}
    return {name: LinearScales(float(scale_of(largest[name])), scale_of(np.abs(weights[name]).max(1))) for name in largest}


def states_with(model, scales, product, sequences):
    """The final states of transformers' model, the linears of one product computed as a card computes FP8."""
    hooks = []

    def rounded(values, scale):
        return (values / scale).to(torch.float8_e4m3fn).float() * scale

    for name in product_linears(product) if product else ():
        linear, scale = model.get_submodule(name), scales[name]
        weight = rounded(linear.weight.detach(), torch.from_numpy(scale.weight)[:, None])
        hook = lambda module, args, _, w=weight, s=scale.activation: rounded(args[0], s) @ w.T  # noqa: E731
        hooks.append(linear.register_forward_hook(hook))
    with torch.no_grad():
        found = [model.model(torch.from_numpy(ids.astype(np.int64))[None]).last_hidden_state[0].numpy() for ids in sequences]
    for hook in hooks:
        hook.remove()
    return np.concatenate(found)


def test_a_harm_is_that_of_transformers_with_one_product_rounded(folder, sequences):
    checkpoint = open_checkpoint(folder)
    scales = scales_of(checkpoint, sequences)
    harms = product_harms(checkpoint, sequences, scales, num_layers=3, progress=silent)
    assert set(harms) == {f"{layer}.{part}" for layer in range(3) for part in ("qkv", "o", "gate_up", "down")}
    model = tiny.tiny_model("qwen3", num_hidden_layers=3)
    exact = states_with(model, scales, None, sequences)
    for product in ("0.qkv", "1.o", "1.gate_up", "2.down"):
        expected = np.mean(1 - row_cosines(exact, states_with(model, scales, product, sequences)))
        assert harms[product].mean == pytest.approx(expected, rel=0.05) and expected > 1e-6


def test_harms_end_where_the_highest_tap_is(folder, sequences):
    checkpoint = open_checkpoint(folder)
    harms = product_harms(checkpoint, sequences, scales_of(checkpoint, sequences), num_layers=1, progress=silent)
    assert set(harms) == {"0.qkv", "0.o", "0.gate_up", "0.down"} and min(harm.mean for harm in harms.values()) > 0


def test_the_worst_for_their_size_are_kept():
    harms = {"a": Harm(4.0, 5.0), "b": Harm(3.0, 5.0), "c": Harm(1.0, 9.0), "d": Harm(0.5, 2.0)}
    sizes = {"a": 8, "b": 1, "c": 1, "d": 1}
    assert products_to_keep(harms, sizes, 9) == set()
    assert products_to_keep(harms, sizes, 5.5) == {"b"}
    assert products_to_keep(harms, sizes, 5.4) == {"b", "c"}
    assert products_to_keep(harms, sizes, 0) == set(harms)
    harms["d"] = Harm(0.5, 40.0)  # loses a token
    assert products_to_keep(harms, sizes, 8) == {"d"}
    assert total(harms, {"a", "d"}) == 4.5


def test_the_part_that_is_measured_comes_from_everywhere():
    sequences = [np.full(3 + number, number, np.int32) for number in range(200)]
    part = measured_part(sequences)
    numbers = {int(ids[0]) for ids in part}
    assert len(numbers) == len(part) == MEASURED_TOKENS // MEASURED_LENGTH
    assert min(numbers) < 10 and max(numbers) > 190 and all(len(ids) == min(3 + ids[0], MEASURED_LENGTH) for ids in part)
    assert [len(ids) for ids in measured_part(sequences[:2])] == [3, 4]
