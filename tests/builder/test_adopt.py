"""Adopting upstream's engines: what the contract promises, and every kind of engine that is refused."""

import json
import os

import numpy as np
import pytest
import tensorrt_rtx_bindings as trt
import tiny
import torch
from upstream_engines import INPUTS, OUTPUTS, write_upstream_engine

from model_patches import edit
from tensorrt_llm_ext.builder import adopt, canaries
from tensorrt_llm_ext.builder.adopt import adopt_engine
from tensorrt_llm_ext.checkpoint import open_checkpoint
from tensorrt_llm_ext.errors import ContractError, DamagedCheckpoint, EngineError, IncompatibleEngine, TapError
from tensorrt_llm_ext.fingerprint import file_fingerprint
from tensorrt_llm_ext.recipes import Limits, TensorSpec, read_contract
from tensorrt_llm_ext.taps import Tap

ALL, LAST = Tap(8, "post", "all"), Tap(8, "post", "last")
MODEL, BUILD, PLUGINS = "pretrained_config__", "build_config__", "build_config__plugin_config__"


@pytest.fixture
def llama(checkpoints):
    return checkpoints["llama"]


@pytest.fixture
def engine(tmp_path):
    return lambda *args, **changes: write_upstream_engine(tmp_path / "engine", *args, **changes)


def adopted(folder, checkpoint, **options):
    return adopt_engine(folder, checkpoint, **{"compute_capability": "9.0", **options})


# What the contract says


def test_the_ten_inputs_are_named_with_type_shape_and_place(engine, llama):
    contract = adopted(engine(), llama).contract
    inputs = [(t.name, t.dtype, t.shape, t.location) for t in contract.tensors if t.role == "input"]
    assert inputs == [
        ("input_ids", "int32", ("T",), "device"),
        ("position_ids", "int32", ("T",), "device"),
        ("last_token_ids", "int32", ("B",), "device"),
        ("context_lengths", "int32", ("B",), "device"),
        ("host_context_lengths", "int32", ("B",), "host"),
        ("host_request_types", "int32", ("B",), "host"),
        ("host_max_attention_window_sizes", "int32", (8,), "host"),
        ("host_sink_token_length", "int32", (1,), "host"),
        ("host_runtime_perf_knobs", "int64", (16,), "host"),
        ("host_context_progress", "int64", (1,), "host"),
    ]


@pytest.mark.parametrize(
    "version, count", [("0.13.0", 9), ("0.14.0", 9), ("0.15.0", 10), ("0.17.0.dev2024121700", 10), ("1.2.1", 10)]
)
def test_host_context_progress_came_with_0_15(engine, llama, version, count):
    contract = adopted(engine(version=version), llama).contract
    names = [tensor.name for tensor in contract.tensors if tensor.role == "input"]
    assert len(names) == count and ("host_context_progress" in names) == (count == 10)


def test_the_outputs_are_the_patchs_and_carry_taps(engine, llama):
    contract = adopted(engine(), llama, taps="final@all,final@last").contract
    outputs = [(t.name, t.dtype, t.shape, t.tap) for t in contract.tensors if t.role == "output"]
    assert outputs == [
        ("logits", "float16", ("B", 263), None),
        (edit.ALL_ROWS, "float16", ("T", 48), ALL),
        (edit.LAST_ROWS, "float16", ("B", 48), LAST),
    ]
    assert contract.taps == (ALL, LAST)


def test_the_contract_is_whole_and_lies_beside_the_engine(engine, llama):
    folder = engine(version="0.17.0")
    contract = adopted(folder, llama).contract
    assert read_contract(folder).to_dict() == contract.to_dict()
    with open_checkpoint(llama) as checkpoint:
        assert contract.architecture == checkpoint.architecture and contract.model_name == "llama"
        assert contract.fingerprints.checkpoint == checkpoint.fingerprint()
    assert contract.fingerprints.plan == file_fingerprint(folder / "rank0.engine")
    assert contract.limits == Limits(2048, 64, 256, 64 * 256, opt_num_tokens=2048)
    assert (contract.backend, contract.builder, contract.builder_version) == ("trt", "tensorrt_llm", "0.17.0")
    assert contract.accepted_runtime == "tensorrt_llm==0.17.0" and contract.compute_capabilities == ("9.0",)
    assert {file.name for file in contract.files} == {
        "config.json",
        "rank0.engine",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert all((folder / file.name).stat().st_size == file.size for file in contract.files)
    assert not list(folder.glob(".*"))


def test_it_has_canaries_of_the_checkpoint_for_every_tap(engine, llama):
    contract = adopted(engine(), llama, taps="final@last,final@all").contract
    model = tiny.tiny_model("llama")
    canary = contract.canaries[0]
    states = {state.tap: state.rows for state in canary.states}
    expected = model.model(input_ids=torch.tensor([canary.token_ids])).last_hidden_state[0].detach().numpy()
    np.testing.assert_allclose(states[ALL], expected, atol=1e-3)
    np.testing.assert_allclose(states[LAST], expected[-1:], atol=1e-3)


@pytest.mark.parametrize(
    "quantisation, dtype", [("FP8", "bfloat16"), ("FP8_PER_CHANNEL_PER_TOKEN", "float16"), (None, "bfloat16")]
)
def test_states_keep_the_models_type_when_matrices_are_quantised(engine, llama, quantisation, dtype, monkeypatch):
    monkeypatch.setitem(canaries.TOLERANCES, "fp8", 0.02)  # a tiny random model's states lie too near for the real one
    folder = engine(**{MODEL + "quantization__quant_algo": quantisation, MODEL + "dtype": dtype})
    contract = adopted(folder, llama).contract
    assert (contract.weight_dtype, contract.activation_dtype) == (
        ("float8_e4m3fn", "fp8") if quantisation else (dtype, dtype)
    )
    assert contract.output_of(LAST).dtype == dtype


@pytest.mark.parametrize("spelling", ["DISABLED", "disabled", "KVCacheType.DISABLED"])
def test_the_cache_type_is_read_in_any_case(engine, llama, spelling):
    assert adopted(engine(**{BUILD + "kv_cache_type": spelling}), llama).contract.backend == "trt"


def test_shorter_sequences_can_be_served_than_the_engine_takes(engine, llama):
    limits = adopted(engine(), llama, max_seq_len=100).contract.limits
    assert limits.max_seq_len == 100 and limits.max_padded_tokens == 6400


def test_no_canary_is_longer_than_the_sequences_that_are_served(engine, llama):
    contract = adopted(engine(), llama, max_seq_len=6).contract
    assert max(len(canary.token_ids) for canary in contract.canaries) == 6


def test_limits_are_the_engines_each_its_own(engine, llama):
    built = {"max_batch_size": 40, "max_seq_len": 200, "max_num_tokens": 1000, "opt_num_tokens": 900}
    contract = adopted(engine(**{BUILD + name: value for name, value in built.items()}), llama).contract
    assert contract.limits == Limits(1000, 40, 200, 40 * 200, opt_num_tokens=900)


def test_the_memory_estimate_is_the_plan_and_what_goes_in_and_out(engine, llama):
    folder = engine()
    with open(folder / "rank0.engine", "ab") as plan:
        plan.write(bytes(100_000))
    memory = adopted(folder, llama).contract.memory
    tokens, sequences = 2048, 64
    on_device = tokens * (4 + 4 + 48 * 2) + sequences * (4 + 4 + 263 * 2 + 48 * 2)
    on_host = sequences * (4 + 4) + 8 * 4 + 4 + 16 * 8 + 8
    plan = (folder / "rank0.engine").stat().st_size
    assert 0 <= memory.device_bytes - plan - on_device < 4096  # alignment
    assert 0 <= memory.host_bytes - on_device - on_host < 4096


def test_another_build_configuration_is_another_recipe(engine, llama):
    first = engine()
    contract = adopted(first, llama).contract
    first.rename(first.with_name("first"))
    other = adopted(engine(**{BUILD + "opt_num_tokens": 1024}), llama).contract
    assert other.fingerprints.recipe != contract.fingerprints.recipe
    assert other.engine_fingerprint() != contract.engine_fingerprint()


@pytest.mark.parametrize(
    "family, architecture",
    [
        ("mistral", "MistralForCausalLM"),
        ("mistral", "LlamaForCausalLM"),  # which upstream maps it to
        ("qwen2", "Qwen2ForCausalLM"),
        ("qwen2", "QWenForCausalLM"),  # as ModelOpt wrote it into checkpoints for 0.13
        ("qwen3", "Qwen3ForCausalLM"),
    ],
)
def test_every_family_is_known_by_upstreams_name_of_it(engine, checkpoints, family, architecture):
    with open_checkpoint(checkpoints[family]) as checkpoint:
        sizes = {MODEL + theirs: getattr(checkpoint.architecture, ours) for theirs, ours in adopt._SIZES.items()}
    folder = engine(**{MODEL + "architecture": architecture, **sizes, BUILD + "max_seq_len": 64, BUILD + "max_num_tokens": 512})
    assert adopted(folder, checkpoints[family]).contract.architecture.family == family


def test_a_version_before_context_parallelism_has_no_word_of_it(engine, llama):
    assert adopted(engine(version="0.14.0", **{MODEL + "mapping__cp_size": ...}), llama).contract


def test_it_says_what_is_checked_and_what_only_opening_the_engine_can_check(engine, llama):
    adoption = adopted(engine(), llama)
    assert any("final_post_all" in line for line in adoption.checked)
    assert any("gather convention" in line for line in adoption.at_load) and adoption.warnings == ()


def test_an_optimum_made_for_generation_is_told(engine, llama):
    (warning,) = adopted(engine(**{BUILD + "opt_num_tokens": 64}), llama).warnings
    assert "fastest at 64 tokens" in warning and "--opt_num_tokens" in warning


# The outputs


def test_a_plan_that_names_its_inputs_but_not_our_outputs_is_refused_with_the_way_to_get_them(engine, llama):
    ours = {edit.ALL_ROWS, edit.LAST_ROWS}
    for number, marked in enumerate(((), (edit.ALL_ROWS,), (edit.LAST_ROWS,))):
        folder = engine((*INPUTS, "logits", "gather_last_token_logits", *marked))
        with pytest.raises(IncompatibleEngine, match="without the patch") as error:
            adopted(folder, llama)
        assert {name for name in ours if f"no {name}" in error.value.found} == ours - set(marked)
        assert "trtllm-extract patch apply" in error.value.fix and not (folder / "contract.json").exists()
        folder.rename(folder.with_name(f"engine-{number}"))


def test_a_plan_that_shows_no_names_is_left_to_the_load(engine, llama):
    adoption = adopted(engine(("sealed",)), llama)
    assert any("whether the engine was built with the patch" in line for line in adoption.at_load)
    assert not any("final_post_all" in line for line in adoption.checked)


def test_a_plan_of_tensorrt_rtx_shows_the_names_of_its_tensors(tmp_path):
    """The ground the check stands on, as far as it can be seen here: TensorRT's own builder is not at hand."""
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    tensor = network.add_input("input_ids", trt.float16, (4, 4))
    for name in OUTPUTS:
        tensor = network.add_softmax(tensor).get_output(0)
        tensor.name = name
        network.mark_output(tensor)
    (tmp_path / "plan").write_bytes(builder.build_serialized_network(network, builder.create_builder_config()))
    there, absent = (TensorSpec(name, "input", "int32", ("T",)) for name in ("input_ids", "context_lengths"))
    assert adopt.check_outputs(tmp_path / "plan", (there,))
    assert not adopt.check_outputs(tmp_path / "plan", (there, absent))


# What is refused

REFUSED = {
    "a paged cache": ({BUILD + "kv_cache_type": "PAGED"}, "key-value cache", "--kv_cache_type disabled"),
    "no word about a cache": ({BUILD + "kv_cache_type": ...}, "key-value cache", "--kv_cache_type disabled"),
    "draft tokens": ({BUILD + "max_draft_len": 5}, "speculative inputs", "max_draft_len"),
    "medusa": ({BUILD + "speculative_decoding_mode": "MEDUSA"}, "speculative inputs", "speculative_decoding_mode"),
    "external drafts": ({BUILD + "speculative_decoding_mode": 2}, "speculative inputs", "speculative_decoding_mode"),
    "all logits": ({BUILD + "gather_context_logits": True}, "one tensor", "no --gather_context_logits"),
    "prompt table": ({BUILD + "max_prompt_embedding_table_size": 8}, "prompt embeddings", "max_prompt_embedding"),
    "beams": ({BUILD + "max_beam_width": 4}, "beams", "--max_beam_width 1"),
    "padding": ({PLUGINS + "remove_input_padding": False}, "padded", "--remove_input_padding enable"),
    "no attention plugin": ({PLUGINS + "gpt_attention_plugin": None}, "pack", "--gpt_attention_plugin auto"),
    "unfused attention": ({PLUGINS + "context_fmha": False}, "max_input_len", "--context_fmha enable"),
    "six profiles": ({PLUGINS + "multiple_profiles": True}, "profiles", "--multiple_profiles disable"),
    "lora": ({PLUGINS + "lora_plugin": "float16"}, "LoRA", "lora_plugin"),
    "managed weights": ({PLUGINS + "manage_weights": True}, "lacks its weights", "fast_build"),
    "no plugin config": ({BUILD + "plugin_config": None}, "padded", "--remove_input_padding enable"),
    "two GPUs": ({MODEL + "mapping__world_size": 2}, "run together", "one GPU"),
    "tensor parallel": ({MODEL + "mapping__tp_size": 2}, "run together", "--tp_size 1"),
    "pipeline parallel": ({MODEL + "mapping__pp_size": 2}, "run together", "--pp_size 1"),
    "context parallel": ({MODEL + "mapping__cp_size": 2}, "run together", "--cp_size 1"),
    "float32 states": ({MODEL + "dtype": "float32"}, "hidden states have a type", "--dtype"),
    "logits of another type": ({MODEL + "logits_dtype": "int8"}, "logits have a type", "--logits_dtype"),
    "four bits": ({MODEL + "quantization__quant_algo": "W4A16_AWQ"}, "quantisation", "FP8"),
    "FP8 attention": (
        {PLUGINS + "use_fp8_context_fmha": True},
        "FP8 context attention without a cache reads a scale through a null pointer",
        "--use_fp8_context_fmha disable",
    ),
    "0.12": ({"version": "0.12.0"}, "0.12.0 is not served", "trtllm-extract upstream"),
    "1.3": ({"version": "1.3.0rc1"}, "1.3.0rc1 is not served", "trtllm-extract upstream"),
    "another class": ({MODEL + "architecture": "DeciLMForCausalLM"}, "a DeciLMForCausalLM", "forward of their own"),
    **{
        f"another {name}": ({MODEL + name: 1024}, "made from another checkpoint", "checkpoint")
        for name in (
            "hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_size",
            "intermediate_size",
        )
    },
    "longer than the model": ({BUILD + "max_seq_len": 1024}, "longer", "--max-seq-len 512"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_engine_of_a_kind_that_is_not_served_is_refused(engine, llama, case):
    changes, what, fix = REFUSED[case]
    folder = engine(**changes)
    with pytest.raises(IncompatibleEngine) as error:
        adopted(folder, llama)
    assert what in error.value.what and fix in error.value.fix
    assert not (folder / "contract.json").exists()


def test_fp8_attention_is_left_on_from_1_0(engine, llama):
    assert adopted(engine(version="1.0.0", **{PLUGINS + "use_fp8_context_fmha": True}), llama).contract


@pytest.mark.parametrize("max_seq_len", [0, 257])
def test_a_length_that_the_engine_does_not_take_is_refused(engine, llama, max_seq_len):
    with pytest.raises(IncompatibleEngine, match="longer than the engine takes"):
        adopted(engine(), llama, max_seq_len=max_seq_len)


def test_an_active_sliding_window_bounds_the_length(engine, tmp_path):
    mistral = tiny.tiny_checkpoint(tmp_path / "mistral", "mistral", sliding_window=128)
    with pytest.raises(IncompatibleEngine) as error:
        adopted(engine(**{MODEL + "architecture": "MistralForCausalLM"}), mistral)
    assert "128 tokens: the model's sliding window" in error.value.expected


def test_mean_is_refused_on_upstreams_engines(engine, llama):
    with pytest.raises(TapError, match="does not give 'final@mean'"):
        adopted(engine(), llama, taps="final@mean")


DAMAGED = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "not an engine directory of TensorRT-LLM"),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), "not what trtllm-build writes"),
    "a list": (lambda folder: (folder / "config.json").write_text("[]"), "not what trtllm-build writes"),
    "no parts": (
        lambda folder: (folder / "config.json").write_text('{"version": "0.16.0"}'),
        "not what trtllm-build writes",
    ),
    "no engine": (lambda folder: (folder / "rank0.engine").unlink(), "does not hold one engine"),
    "an empty engine": (lambda folder: (folder / "rank0.engine").write_bytes(b""), "does not hold one engine"),
    "a page, not an engine": (
        lambda folder: (folder / "rank0.engine").write_bytes(b"<!DOCTYPE html>"),
        "rank0.engine' is not what trtllm-build writes",
    ),
    "two ranks": (lambda folder: (folder / "rank1.engine").write_bytes(b"x"), "does not hold one engine"),
    "weights apart": (lambda folder: (folder / "rank0_managed_weights.safetensors").touch(), "lacks its weights"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_directory_that_is_not_one_whole_engine_is_refused(engine, llama, case):
    damage, words = DAMAGED[case]
    folder = engine()
    damage(folder)
    with pytest.raises(EngineError, match=words):
        adopted(folder, llama)


@pytest.mark.parametrize("value", [..., None, "many", 0, True])
@pytest.mark.parametrize(
    "path",
    [
        *(BUILD + name for name in ("max_batch_size", "max_seq_len", "max_num_tokens", "opt_num_tokens")),
        *(MODEL + name for name in ("hidden_size", "num_hidden_layers", "vocab_size")),
    ],
)
def test_a_limit_or_size_that_is_not_a_number_is_refused(engine, llama, path, value):
    with pytest.raises(EngineError, match="not what trtllm-build writes") as error:
        adopted(engine(**{path: value}), llama)
    assert path.replace("__", ".") in error.value.expected


def test_an_engine_is_adopted_once(engine, llama):
    folder = engine()
    adopted(folder, llama)
    with pytest.raises(ContractError, match="adopted already"):
        adopted(folder, llama)


def test_another_tokenizer_beside_the_engine_is_not_overwritten(engine, llama):
    folder = engine()
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(EngineError, match="holds another tokenizer.json"):
        adopted(folder, llama)
    assert (folder / "tokenizer.json").read_text() == "{}" and not list(folder.glob(".*"))


def test_a_directory_that_cannot_be_written_to_is_named(engine, llama, monkeypatch):
    def full(*names):
        raise OSError(28, "No space left on device")

    folder = engine()
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(EngineError, match="cannot be written to"):
        adopted(folder, llama)


def test_a_damaged_checkpoint_is_refused_before_anything_is_written(engine, tmp_path, llama):
    folder = engine()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text(
        json.dumps({**json.loads((llama / "config.json").read_text()), "vocab_size": 0})
    )
    with pytest.raises(DamagedCheckpoint):
        adopted(folder, tmp_path / "broken")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "rank0.engine"]
