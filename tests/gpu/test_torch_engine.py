"""Backend torch on a card: the same sequence gives the same bytes in any batch, and near the float32 of the plain operations."""

import random
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))  # tests import torch_models.py by name

if not torch.cuda.is_available():
    pytest.skip("no CUDA card", allow_module_level=True)

from torch_models import architecture, contract_of, random_decoder
from triton.runtime.jit import JITFunction

from tensorrt_llm_ext.backends.torch import cublaslt, gated, plain, trials
from tensorrt_llm_ext.backends.torch import decoder as decoder_module
from tensorrt_llm_ext.backends.torch import engine as engine_module
from tensorrt_llm_ext.backends.torch import graphs as graphs_module
from tensorrt_llm_ext.backends.torch.engine import TorchEngine
from tensorrt_llm_ext.backends.torch.workspace import make_workspace
from tensorrt_llm_ext.errors import BackendError
from tensorrt_llm_ext.recipes.contract import Limits

pytestmark = pytest.mark.gpu

SIZES = dict(num_layers=4, hidden_size=512, intermediate_size=1280, num_heads=8, num_kv_heads=2, head_dim=64, vocab_size=999)
LIMITS = Limits(max_num_tokens=4096, max_batch_size=128, max_seq_len=1024, max_padded_tokens=10**9)
LENGTHS = (17, 1, 128, 129, 700, 64)


def engine_of(family="qwen3", precision="fp8", taps="final@last", is_deterministic=False, limits=LIMITS, **sizes):
    a = architecture(family, **{**SIZES, **sizes})
    device = torch.device("cuda", 0)
    with torch.inference_mode():
        decoder = random_decoder(a, is_fp8=precision == "fp8", max_seq_len=limits.max_seq_len)
        space = make_workspace(a, limits, torch.bfloat16, device, is_deterministic)
        engine = TorchEngine(contract_of(a, taps=taps, precision=precision, limits=limits), decoder, space, device)
        engine.warm_up()
    return engine


def run(engine, sequences):
    """Run one batch on a stream of our own, through the protocol; outputs by name."""
    lengths = torch.tensor([len(s) for s in sequences], dtype=torch.int32)
    values = {
        "input_ids": torch.cat([torch.as_tensor(s, dtype=torch.int32) for s in sequences]),
        "sequence_lengths": lengths,
        "host_context_lengths": lengths,
        "last_token_ids": lengths.cumsum(0, dtype=torch.int32),
    }
    sizes = {"T": len(values["input_ids"]), "B": len(sequences)}
    on_card = {}
    for tensor in engine.tensors():
        if tensor.role == "input":
            on_card[tensor.name] = values[tensor.name] if tensor.location == "host" else values[tensor.name].cuda()
            engine.set_shape(tensor.name, tuple(on_card[tensor.name].shape))
        else:
            shape = [sizes.get(size, size) for size in tensor.shape]
            on_card[tensor.name] = torch.full(shape, float("nan"), dtype=getattr(torch, tensor.dtype), device="cuda")
    for name, tensor in on_card.items():
        engine.set_address(name, tensor.data_ptr())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    engine.enqueue(stream.cuda_stream)
    stream.synchronize()
    return {t.name: on_card[t.name].cpu() for t in engine.tensors() if t.role == "output"}


def sequences(seed=0, lengths=LENGTHS):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 999, size=length).astype(np.int32) for length in lengths]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("precision", ["bfloat16", "fp8"])
def test_every_kind_of_rows_is_near_the_plain_operations(family, precision):
    taps = "final@last,final@all,layer:2@mean,layer:1@all,final@mean,final:pre@last"
    engine = engine_of(family, precision, taps)
    found = run(engine, sequences())
    kernels, engine._operations, engine._graphs = engine._operations, plain, None
    engine._decoder = replace(engine._decoder, qkv_of_token=None)
    expected = run(engine, sequences())
    for name, rows in found.items():
        cosines = torch.nn.functional.cosine_similarity(rows.float(), expected[name].float(), dim=-1)
        assert cosines.min() > (0.9995 if precision == "bfloat16" else 0.99), (name, cosines.min())
    assert kernels is not plain


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("precision", ["fp8", "bfloat16"])
def test_the_same_sequence_gives_the_same_bytes_in_any_batch(precision, is_deterministic):
    engine, own = engine_of(precision=precision, is_deterministic=is_deterministic), sequences()
    together = run(engine, own)["final_post_last"]
    company = sequences(seed=1, lengths=[30] * 70)
    for others, place in (([], 0), (company[:3], 1), (company, 40)):
        for index, sequence in enumerate(own):
            batch = [*others[:place], sequence, *others[place:]]
            assert torch.equal(run(engine, batch)["final_post_last"][place], together[index]), (len(batch), index)
    assert torch.pdist(together).min() > 1  # different sequences differ


@pytest.mark.parametrize("taps", ["final@last", "layer:1@all,layer:3@all,final:pre@all", "layer:2@mean,final:pre@last"])
@pytest.mark.parametrize("precision", ["bfloat16", "fp8"])
def test_every_launch_is_in_a_graph_and_gives_the_bytes_of_launches_one_by_one(precision, taps):
    engine = engine_of(precision=precision, taps=taps)
    graphs, generator = engine._graphs, random.Random(0)
    for _ in range(40):
        lengths, budget = [], generator.randint(1, LIMITS.max_num_tokens)
        longest = generator.choice([3, 100, 128, 129, LIMITS.max_seq_len])
        while len(lengths) < LIMITS.max_batch_size and (length := min(generator.randint(1, longest), budget)):
            lengths.append(length)
            budget -= length
        batch = sequences(seed=len(lengths), lengths=lengths)
        engine._graphs = None
        expected = run(engine, batch)
        engine._graphs = graphs
        with mock.patch.object(graphs_module, "run_stretch", side_effect=AssertionError("not captured")):
            found = run(engine, batch)
        for name, rows in expected.items():
            assert torch.isfinite(rows.float()).all() and torch.equal(rows, found[name]), (name, lengths)


@pytest.mark.parametrize("max_seq_len", [129, 1024])
@pytest.mark.parametrize("precision", ["bfloat16", "fp8"])
def test_no_kernel_is_compiled_or_loaded_after_the_engine_has_opened(precision, max_seq_len):
    limits, generator = replace(LIMITS, max_seq_len=max_seq_len), random.Random(1)
    engine = engine_of(precision=precision, taps="final@last,layer:1@all,layer:2@mean", limits=limits)
    with mock.patch.object(JITFunction, "_do_compile", side_effect=AssertionError("compiled or loaded")) as compiled:
        for _ in range(40):
            longest = generator.choice([3, 128, max_seq_len])
            lengths = [generator.randint(1, longest) for _ in range(generator.randint(1, limits.max_batch_size))]
            while sum(lengths) > limits.max_num_tokens:
                lengths.pop()
            run(engine, sequences(lengths=lengths))
    assert not compiled.called


@pytest.mark.parametrize("precision, has_attended_scale", [("bfloat16", True), ("fp8", True), ("fp8", False)])
@pytest.mark.parametrize(
    "family, sizes",
    [("llama", {}), ("llama", {"num_layers": 1}), ("qwen2", {"has_qkv_bias": True}), ("qwen3", {})],
    ids=["llama", "one layer", "bias", "qwen3"],
)
def test_last_rows_alone_are_those_of_the_whole_pass(precision, family, sizes, has_attended_scale):
    found = []
    for taps in ("final@last", "final@last,final@all"):
        engine = engine_of(family, precision, taps, **sizes)
        if not has_attended_scale:
            layers = tuple(replace(layer, o=replace(layer.o, input_scale=None)) for layer in engine._decoder.layers)
            engine._decoder, engine._graphs = replace(engine._decoder, layers=layers), None  # graphs are of the decoder before
        found.append(run(engine, sequences())["final_post_last"])
    assert torch.nn.functional.cosine_similarity(*found, dim=-1).min() > 0.999


@pytest.mark.parametrize("precision, is_deterministic", [("fp8", False), ("bfloat16", False), ("bfloat16", True)])
def test_the_first_layers_table_gives_the_bytes_of_its_product(precision, is_deterministic):
    taps = "layer:0@mean,layer:1@all,final@last"
    engine = engine_of("qwen2", precision, taps, is_deterministic, has_qkv_bias=True, vocab_size=9999)  # more than the buffers hold
    own = [9 * s + 1008 for s in sequences()]
    found = run(engine, own)
    assert len(engine._decoder.qkv_of_token) == 9999
    engine._decoder, engine._graphs = replace(engine._decoder, qkv_of_token=None), None
    assert all(torch.equal(rows, found[name]) for name, rows in run(engine, own).items())


@pytest.mark.parametrize("precision", ["bfloat16", "fp8"])
def test_algorithms_chosen_by_trial_change_no_byte(precision, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cublaslt, "_chosen", {})
    expected = run(engine_of("llama", precision), sequences())["final_post_last"]
    assert not cublaslt._chosen
    monkeypatch.setattr(engine_module, "is_launch_bound", lambda *sizes: False)
    for tried in (True, False):  # the second time they come from the file
        cublaslt._chosen.clear()
        with mock.patch.object(trials, "quickest", side_effect=lambda calls: len(calls) - 1) as quickest:
            engine = engine_of("llama", precision)
        is_fused = gated.can_multiply(engine._decoder.layers[0].gate_up)
        assert len(cublaslt._chosen) == 4 - is_fused and quickest.called == tried
        assert torch.equal(run(engine, sequences())["final_post_last"], expected)


def test_nan_in_one_request_stays_there():
    engine = engine_of(taps="final@last")
    clean = run(engine, sequences())["final_post_last"]
    with torch.inference_mode():
        engine._decoder.embedding[998] = float("nan")
    own = sequences()
    own[2][5] = 998
    dirty = run(engine, own)["final_post_last"]
    others = [0, 1, 3, 4, 5]
    assert torch.isnan(dirty[2]).any() and torch.equal(dirty[others], clean[others])
    assert torch.equal(run(engine, sequences())["final_post_last"], clean)  # nothing is left behind


def test_a_batch_that_the_library_refuses_is_a_backend_error():
    engine = engine_of()
    engine._decoder = decoder_module.Decoder(None, (), None, None, None)
    with pytest.raises(BackendError, match="torch failed to run a batch"):
        run(engine, sequences())


def test_two_engines_in_two_threads_do_not_disturb_each_other():
    """They share the library's plans: addresses set for one must not be those of the other's product."""
    from concurrent.futures import ThreadPoolExecutor

    engines, own = [engine_of(), engine_of(family="llama")], sequences()
    alone = [run(engine, own)["final_post_last"] for engine in engines]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda engine: [run(engine, own)["final_post_last"] for _ in range(20)], engines))
    for right, found in zip(alone, together, strict=True):
        assert all(torch.equal(rows, right) for rows in found)


def test_a_fixed_scale_of_inputs_gives_the_plain_operations_states():
    engine = engine_of("llama", "fp8", "final@all")
    layers = []
    for layer in engine._decoder.layers:
        linears = {name: replace(getattr(layer, name), input_scale=0.01) for name in ("qkv", "o", "gate_up", "down")}
        layers.append(replace(layer, **linears))  # saturates at 4.48, which inputs pass
    dynamic = run(engine, sequences())["final_post_all"]
    engine._decoder = replace(engine._decoder, layers=tuple(layers), qkv_of_token=None)
    engine._graphs = None  # they are of the decoder before
    found = run(engine, sequences())["final_post_all"]
    engine._operations = plain
    expected = run(engine, sequences())["final_post_all"]
    cosines = torch.nn.functional.cosine_similarity(found.float(), expected.float(), dim=-1)
    assert cosines.min() > 0.99 and not torch.equal(found, dynamic)
