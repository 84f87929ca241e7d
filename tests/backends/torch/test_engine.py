"""Backend torch serves the contract that backend ort serves: every family, every kind of rows, through the same Session."""

import dataclasses
import json
import shutil
import weakref
from unittest import mock

import numpy as np
import pytest
import tiny
import torch

from tensorrt_llm_ext.backends import open_engine
from tensorrt_llm_ext.backends.torch import engine as engine_module
from tensorrt_llm_ext.backends.torch import plain
from tensorrt_llm_ext.backends.torch.decoder import forward, with_table
from tensorrt_llm_ext.backends.torch.weight_index import read_weight_index
from tensorrt_llm_ext.builder import build_engine
from tensorrt_llm_ext.checkpoint import open_checkpoint
from tensorrt_llm_ext.checkpoint.layout import PRODUCTS
from tensorrt_llm_ext.checks import bench
from tensorrt_llm_ext.checks.reference import reference_states
from tensorrt_llm_ext.errors import BackendError, EngineError, IncompatibleEngine, OutOfMemory
from tensorrt_llm_ext.fingerprint import token_hash
from tensorrt_llm_ext.recipes import Recipe, read_contract, write_contract
from tensorrt_llm_ext.results import Record, WorkItem
from tensorrt_llm_ext.runtime import Session

LENGTHS = (7, 1, 40, 12, 3)
ATOL = 2e-4  # float32, another order of summation, on values of up to 10


def items(lengths=LENGTHS, seed=0):
    rng = np.random.default_rng(seed)
    sequences = [rng.integers(3, 260, size=length).astype(np.int32) for length in lengths]
    return [WorkItem(str(i), str(i), ids, token_hash(ids)) for i, ids in enumerate(sequences)]


def answers(path, work, **options):
    with Session.open(path, num_threads=1, **options) as session:
        records = list(session.extract(work))
        assert all(isinstance(record, Record) for record in records), records
        return {record.request_id: {state.tap: state.rows for state in record.states} for record in records}


def check_against_transformers(path, checkpoint_path, num_taps):
    work, taps = items(), read_contract(path).taps
    found = answers(path, work)
    with open_checkpoint(checkpoint_path) as checkpoint:
        states = {
            (layer, norm): rows for layer, norm, rows in reference_states(checkpoint, [item.token_ids for item in work])
        }
    assert len(taps) == num_taps
    for index, item in enumerate(work):
        for tap in taps:
            rows = states[tap.layer, tap.norm][index]
            expected = {"all": rows, "last": rows[-1:], "mean": rows.mean(0, keepdims=True)}[tap.rows]
            np.testing.assert_allclose(found[item.request_id][tap], expected, atol=ATOL, rtol=ATOL, err_msg=str(tap))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_tap_of_every_family_is_that_of_transformers(family, engines, checkpoints):
    check_against_transformers(engines(family), checkpoints[family], num_taps=10)


@pytest.mark.parametrize("taps", ["layer:0@last", "layer:1@last", "layer:0@mean,layer:1@last"])
def test_the_lowest_taps_are_those_of_transformers(taps, engines, checkpoints):
    check_against_transformers(engines("qwen2", taps=taps), checkpoints["qwen2"], num_taps=len(taps.split(",")))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_same_records_as_backend_ort(family, engines, checkpoints, tmp_path):
    build_engine(checkpoints[family], tmp_path / "ort", taps="final@last,layer:4@all")
    work = items()
    by_ort, by_torch = answers(tmp_path / "ort", work), answers(engines(family, taps="final@last,layer:4@all"), work)
    for request_id, states in by_ort.items():
        for tap, rows in states.items():
            np.testing.assert_allclose(by_torch[request_id][tap], rows, atol=ATOL, rtol=ATOL)


@pytest.mark.parametrize("precision", ["bfloat16", "fp8"])
def test_lower_precisions_are_near_and_not_the_same(precision, engines):
    taps = "final@last,final@all"
    exact, found = (answers(engines("qwen3", p, taps=taps), items(), prove=False) for p in ("float32", precision))
    cosines = [
        np.sum(a * b, -1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
        for request_id in exact
        for a, b in zip(exact[request_id].values(), (r.astype(np.float32) for r in found[request_id].values()), strict=True)
    ]
    least = min(float(cosine.min()) for cosine in cosines)
    assert {"bfloat16": 0.999, "fp8": 0.9}[precision] < least < {"bfloat16": 0.999_999_9, "fp8": 0.9999}[precision]


def test_a_batch_where_only_last_rows_matter_gives_the_same_last_rows(engines):
    """With `last` taps alone at the top, the rest of the highest layer is computed for those rows only."""
    many, few = engines("llama"), engines("llama", taps="layer:3@all,final@last,final:pre@last")
    everything, last_only = answers(many, items()), answers(few, items())
    for request_id, states in last_only.items():
        for tap, rows in states.items():
            expected = everything[request_id].get(tap)
            if expected is not None:
                np.testing.assert_allclose(rows, expected, atol=ATOL, rtol=ATOL)


def test_a_table_of_every_token_replaces_the_first_layers_product(engines):
    """As cards have it; the vocabulary is larger than the buffers, and what lies in them does not reach the tap of the embedding."""
    path = engines("qwen2", taps="layer:0@mean,layer:1@all,final@last", max_num_tokens=128, opt_num_tokens=128, max_seq_len=100)
    engine = open_engine(path, dataclasses.replace(read_contract(path), files=()))
    batch, found = engine._even_batch(100, 3), []
    with torch.inference_mode():
        made = with_table(plain, engine._decoder, engine._space)
        assert len(made.qkv_of_token) == len(made.embedding) > len(engine._space.x)
        batch.input_ids.copy_(torch.arange(len(made.embedding) - 100, len(made.embedding)))
        for decoder in (engine._decoder, made, dataclasses.replace(made, qkv_of_token=made.qkv_of_token.flip(0))):
            forward(plain, decoder, engine._space, batch)
            found.append({tap: rows.clone() for tap, rows in batch.outputs.items()})
    for tap, expected in found[0].items():
        torch.testing.assert_close(found[1][tap], expected, atol=ATOL, rtol=ATOL)
        assert torch.equal(found[2][tap], expected) if tap.layer == 0 else (found[2][tap] - expected).abs().max() > 0.1


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "fp8"])
def test_the_batch_is_invisible(precision, engines):
    """Alone, in company, at another position: the same rows; different requests differ by far more."""
    path, work = engines("qwen3", precision, taps="final@last"), items()
    together, reversed_order = answers(path, work, prove=False), answers(path, work[::-1], prove=False)
    alone = {item.request_id: answers(path, [item], prove=False)[item.request_id] for item in work}
    rows = np.concatenate([rows for states in together.values() for rows in states.values()])
    apart = min(float(np.abs(a - b).max()) for i, a in enumerate(rows) for b in rows[:i])
    for other in (reversed_order, alone):
        for request_id, states in together.items():
            for tap, rows in states.items():
                assert np.abs(rows - other[request_id][tap]).max() < ATOL < apart / 100


def test_a_mixed_window_runs_in_batches_of_the_engines_limits(engines):
    work = items(lengths=[1 + i * 37 % 90 for i in range(60)])
    path = engines("llama", taps="final@last", max_num_tokens=128, opt_num_tokens=128, max_seq_len=100)
    small, large = answers(path, work), answers(engines("llama", taps="final@last"), work)
    assert len(small) == 60
    for request_id, states in large.items():
        for tap, rows in states.items():
            np.testing.assert_allclose(small[request_id][tap], rows, atol=ATOL, rtol=ATOL)


def test_a_gguf_checkpoint_is_written_as_safetensors(cpu_card, tmp_path):
    from safetensors import safe_open

    build_engine(tiny.smollm2_gguf(), tmp_path / "engine", card=cpu_card, taps="layer:1@last", precision="bfloat16")
    with safe_open(tmp_path / "engine" / "weights.safetensors", "np") as stored:
        names = set(stored.keys())
    assert "model.layers.0.mlp.up_proj.weight" in names and "model.layers.1.mlp.up_proj.weight" not in names
    assert len(answers(tmp_path / "engine", items())) == len(LENGTHS)


def test_products_that_are_kept_stay_out_of_fp8_and_change_the_numbers(engines, tmp_path):
    path = shutil.copytree(engines("qwen3", "fp8", taps="final@last,final@all"), tmp_path / "engine")
    without = answers(path, items(), prove=False)
    index = json.loads((path / "weights.json").read_text())
    index["kept"] = ["3.down", "0.qkv"]
    (path / "weights.json").write_text(json.dumps(index))
    engine = open_engine(path, dataclasses.replace(read_contract(path), files=()))
    layers = engine._decoder.layers
    in_bfloat16 = {f"{i}.{p}" for i, w in enumerate(layers) for p in PRODUCTS if getattr(w, p).weight.dtype == torch.bfloat16}
    engine.close()
    assert in_bfloat16 == {"3.down", "0.qkv"}
    contract = dataclasses.replace(read_contract(path), files=())
    write_contract(path, contract)
    found = answers(path, items(), prove=False)
    assert any(np.abs(found[i][tap] - rows).max() > 1e-3 for i, states in without.items() for tap, rows in states.items())


def test_the_index_says_what_the_recipe_says(checkpoints, cpu_card, tmp_path):
    recipe = Recipe(taps="final@all", precision="bfloat16", is_deterministic=True)
    build_engine(checkpoints["llama"], tmp_path / "engine", recipe=recipe, card=cpu_card)
    index = read_weight_index(tmp_path / "engine")
    assert index.is_deterministic and index.kept == ()
    assert len(answers(tmp_path / "engine", items())) == len(LENGTHS)


@pytest.fixture
def copy(engines, tmp_path):
    """A private copy of an engine, weights included."""
    return shutil.copytree(engines("llama", taps="final@last"), tmp_path / "engine")


def test_a_weight_that_changed_after_the_build_is_refused_by_name(copy):
    path = copy / "weights-1.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(EngineError, match="is not the one that the engine was built with") as error:
        Session.open(copy)
    assert "xxh3-128" in error.value.expected and "xxh3-128" in error.value.found


def test_a_truncated_weights_file_is_an_engine_error(copy):
    path = copy / "weights-1.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(EngineError, match="is not the one"):
        open_engine(copy, read_contract(copy))


@pytest.mark.parametrize("text", ["", "[]", '{"weights": {"a": {}}, "kept": [], "is_deterministic": false}'])
def test_a_damaged_index_is_an_engine_error(copy, text):
    (copy / "weights.json").write_text(text)
    with pytest.raises(EngineError, match="weights.json' is missing or damaged"):
        open_engine(copy, read_contract(copy))


def test_a_missing_weight_is_named(copy):
    index = json.loads((copy / "weights.json").read_text())
    del index["weights"]["model.layers.3.mlp.up_proj.weight"]
    (copy / "weights.json").write_text(json.dumps(index))
    with pytest.raises(EngineError, match="lacks weights") as error:
        open_engine(copy, read_contract(copy))
    assert "model.layers.3.mlp.up_proj.weight" in error.value.expected


def contract_for(path, **changed):
    return dataclasses.replace(read_contract(path), **changed)


def fake_card(monkeypatch, capability, free=10**12):
    cuda = engine_module.torch.cuda
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(cuda, "get_device_name", lambda device=None: "Some Card")
    monkeypatch.setattr(cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cuda, "mem_get_info", lambda device: (free, free))


def test_without_a_card_an_engine_for_one_is_refused(copy):
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA card")
    with pytest.raises(IncompatibleEngine, match="built for another card") as error:
        open_engine(copy, contract_for(copy, compute_capabilities=("9.0",)))
    assert "no CUDA card" in error.value.found


def test_another_card_is_refused_by_name(copy, monkeypatch):
    fake_card(monkeypatch, (12, 0))
    with pytest.raises(IncompatibleEngine, match="built for another card") as error:
        open_engine(copy, contract_for(copy, compute_capabilities=("9.0",)))
    assert "9.0" in error.value.expected and error.value.found == "Some Card of compute capability 12.0"


def test_a_card_too_old_for_fp8_is_refused_by_name(copy, monkeypatch):
    fake_card(monkeypatch, (8, 6))
    with pytest.raises(IncompatibleEngine, match="too old .* cannot compute in fp8") as error:
        open_engine(copy, contract_for(copy, compute_capabilities=("8.6",), activation_dtype="fp8"))
    assert "8.9" in error.value.expected and "Some Card" in error.value.found


def test_too_little_memory_is_told_with_the_numbers_before_anything_is_loaded(copy, monkeypatch):
    fake_card(monkeypatch, (9, 0), free=1000)
    monkeypatch.setattr(engine_module, "load_decoder", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(OutOfMemory, match="does not fit") as error:
        open_engine(copy, contract_for(copy, compute_capabilities=("9.0",)))
    assert "GB of device memory" in error.value.expected and "0.00 GB free on Some Card" in error.value.found
    assert "lower max_num_tokens or in FP8" in error.value.fix


@pytest.mark.parametrize(
    "raised",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        torch.AcceleratorError("CUDA error: out of memory"),  # of a kernel of torch's
        RuntimeError("Triton Error [CUDA]: out of memory"),  # of one of ours
    ],
)
def test_memory_that_runs_out_while_loading_is_the_same_error(copy, monkeypatch, raised):
    def load(*_, **__):
        raise raised

    emptied = []
    monkeypatch.setattr(engine_module, "load_decoder", load)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    with pytest.raises(OutOfMemory, match="does not fit") as error:
        open_engine(copy, read_contract(copy))
    assert str(raised) in error.value.found and emptied == [True]


def test_what_was_loaded_is_freed_before_the_memory_is_given_back(copy, monkeypatch):
    found = {}

    def warm_up(engine):
        found["weights"] = weakref.ref(engine._decoder.embedding)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(engine_module.TorchEngine, "warm_up", warm_up)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: found.update(is_freed=found["weights"]() is None))
    with pytest.raises(OutOfMemory):
        open_engine(copy, read_contract(copy))
    assert found["is_freed"]


def test_another_error_while_loading_is_not_called_one_of_memory(copy, monkeypatch):
    def load(*_, **__):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(engine_module, "load_decoder", load)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        open_engine(copy, read_contract(copy))


def test_shapes_and_addresses_are_checked(copy):
    engine = open_engine(copy, read_contract(copy))
    for name, shape in (("input_ids", (0,)), ("input_ids", (10**6,)), ("input_ids", (1, 2)), ("final_post_last", (1,))):
        with pytest.raises(BackendError, match="no input"):
            engine.set_shape(name, shape)
    with pytest.raises(BackendError, match="nothing for final_post_last, host_context_lengths, input_ids, last_token_ids, sequence_lengths"):
        engine.enqueue(0)
    engine.close()
    engine.close()
    with pytest.raises(BackendError, match="a closed engine"):
        engine.enqueue(0)


def test_bench_times_the_engine_s_products_alone_beside_it(engines, checkpoints):
    with open_checkpoint(checkpoints["llama"]) as checkpoint, Session.open(engines("llama")) as session:
        multiplied = []
        with mock.patch.object(type(session.engine), "run_products", autospec=True, side_effect=lambda engine, n: multiplied.extend(n)):
            result = bench(session, checkpoint, items(), num_threads=2, num_rounds=1)
        with mock.patch.object(plain, "multiply", wraps=plain.multiply) as multiply:
            session.engine.run_products([100, 300])
    num_layers = session.contract.architecture.num_layers
    assert [len(call.args[0].values) for call in multiply.call_args_list] == [size for size in (256, 512) for _ in range(4 * num_layers)]
    limit = result.timings[-1]
    assert (limit.name, limit.dtype, limit.min_cosine) == ("its products alone", "float32", None)
    assert sum(multiplied) == 2 * result.num_tokens  # of the warm-up, too
    assert result.ratios["products_alone"] == pytest.approx(result.timings[0].tokens_per_s / limit.tokens_per_s)
