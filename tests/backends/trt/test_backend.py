"""A plan is opened, or the reason why not is an error of ours with the library's words."""

import ctypes
import sys
from dataclasses import replace
from importlib import metadata

import pytest
from toy_engines import ALL, LAST, LIMITS, Toy, tensors, toy_model
from toy_plans import PROFILES, TEN, facts_of, trt_contract, upstream_tensors, write_ours, write_plan, write_upstream
from upstream_site import write_plugins

from tensorrt_llm_ext.backends import open_engine
from tensorrt_llm_ext.backends.trt.library import make_log
from tensorrt_llm_ext.errors import (
    BackendError,
    ContractError,
    EngineError,
    IncompatibleEngine,
    MissingExtra,
    OutOfMemory,
)
from tensorrt_llm_ext.recipes.contract import EngineFile, Profile, TensorSpec, read_contract

TOY = Toy()


def opened(folder, **changes):
    return open_engine(folder, replace(read_contract(folder), **changes))


def test_every_tensor_is_reported_with_the_contracts_symbols(library, tmp_path):
    assert {replace(t, tap=None) for t in tensors(TOY)} == set(opened(write_ours(tmp_path / "engine")).tensors())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_type_has_the_contracts_name(dtype, library, tmp_path):
    promised = tuple(replace(t, dtype=dtype) if t.tap else t for t in tensors(TOY))
    described = {t.name: (t.role, t.dtype, list(t.shape)) for t in promised}
    engine = opened(write_ours(tmp_path / "engine", facts=dict(tensors=described)), tensors=promised)
    assert {t.dtype for t in engine.tensors() if t.role == "output"} == {dtype}


def test_upstreams_host_inputs_lie_on_the_host_whatever_the_library_says(upstream, tmp_path):
    engine = opened(write_upstream(tmp_path / "engine"))
    on_host = {t.name for t in engine.tensors() if t.location == "host"}
    assert on_host == {name for name, _, _ in TEN if name.startswith("host_")} and len(on_host) == 6


# The library and its version


def test_the_library_of_the_contract_must_be_installed(library, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorrt_rtx_bindings", None)
    with pytest.raises(MissingExtra, match="needs tensorrt_rtx") as error:
        opened(write_ours(tmp_path / "engine"))
    assert "tensorrt_llm_ext[trt-rtx]" in error.value.fix


@pytest.mark.parametrize("library_name", ["tensorrt_rtx", "tensorrt_llm"])
def test_another_version_of_the_library_is_named(library_name, upstream, tmp_path):
    write, here = {"tensorrt_rtx": (write_ours, "1.7.1.116"), "tensorrt_llm": (write_upstream, "0.16.0")}[library_name]
    with pytest.raises(IncompatibleEngine) as error:
        opened(write(tmp_path / "engine"), accepted_runtime=f"{library_name}==1.6.0")
    assert error.value.expected == f"{library_name}==1.6.0" and error.value.found == f"{library_name} {here}"


def test_a_library_that_runs_no_plans_is_refused(library, tmp_path):
    with pytest.raises(ContractError, match="does not know the library 'onnxruntime'"):
        opened(write_ours(tmp_path / "engine"), accepted_runtime="onnxruntime>=1.23")


# TensorRT-LLM's plugins


def test_upstreams_plugins_are_registered_before_its_engine_is_loaded(upstream, tmp_path):
    assert opened(write_upstream(tmp_path / "engine"))
    assert ctypes.CDLL(str(upstream.plugins)).num_registered() == 1
    assert hasattr(ctypes.CDLL(None), "num_registered")  # TensorRT finds their symbols, too: the whole process has them
    assert "tensorrt_llm" not in sys.modules


@pytest.mark.parametrize(("result", "words"), [("false", "initTrtLlmPlugins refused"), (None, "cannot open shared object")])
def test_plugins_that_do_not_load_are_named_with_their_file(result, words, upstream, tmp_path):
    upstream.plugins.unlink()
    if result:
        write_plugins(upstream.plugins, result)
    with pytest.raises(IncompatibleEngine, match="plugins cannot be loaded") as error:
        opened(write_upstream(tmp_path / "engine"))
    assert words in error.value.found and str(upstream.plugins) in error.value.expected
    assert upstream.num_runtimes == 0


def test_an_engine_of_upstreams_without_upstream_is_refused(library, tmp_path):
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version("tensorrt_llm")
    with pytest.raises(MissingExtra, match="needs tensorrt_llm"):
        opened(write_upstream(tmp_path / "engine"))


# The plan's file


def test_a_contract_that_lists_no_plan_is_refused(library, tmp_path):
    with pytest.raises(ContractError, match="does not list one plan"):
        opened(write_ours(tmp_path / "engine"), files=(EngineFile("model.onnx", 1, "sha256:0"),))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda plan: plan.write_bytes(plan.read_bytes()[:-100]), "bytes"),
        (lambda plan: plan.write_bytes(plan.read_bytes() + b"x"), "bytes"),
        (lambda plan: plan.write_bytes(b""), "another type"),
        (lambda plan: plan.write_bytes(b"\x08\x0aonnx" + plan.read_bytes()[6:]), "another type"),
        (lambda plan: plan.unlink(), "No such file"),
    ],
    ids=["truncated", "longer", "empty", "another type", "missing"],
)
def test_a_plan_that_is_not_whole_or_not_a_plan_never_reaches_the_library(damage, words, library, tmp_path):
    folder = write_ours(tmp_path / "engine")
    damage(folder / "engine.plan")
    with pytest.raises(EngineError, match="is not the plan that was published") as error:
        opened(folder)
    assert words in error.value.found and library.num_runtimes == 0


def test_a_plan_that_the_library_refuses_is_hashed_to_tell_damage_from_a_mismatch(library, tmp_path):
    folder = write_ours(tmp_path / "engine")
    plan = folder / "engine.plan"
    plan.write_bytes(plan.read_bytes()[:30] + b"\0" + plan.read_bytes()[31:])  # of the same size
    library.failures["deserialize_cuda_engine"] = "Assertion failed"
    with pytest.raises(EngineError, match="is not the plan that was published") as error:
        opened(folder)
    assert error.value.expected.startswith("sha256:") and error.value.found.startswith("sha256:")


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (dict(version="1.6.0"), "expects library version 1.6.0, got 1.7.1.116"),
        (dict(capability="8.9"), "generated for compute 8.9"),
    ],
)
def test_a_plan_for_another_card_or_version_is_refused_with_the_librarys_words(facts, words, library, tmp_path):
    with pytest.raises(IncompatibleEngine, match="whose bytes are those that were published") as error:
        opened(write_ours(tmp_path / "engine", facts=facts))
    assert words in error.value.found and "never shown" not in error.value.found
    assert "tensorrt_rtx==1.7.1.116" in error.value.expected


def test_a_plan_of_another_tensorrt_is_refused(upstream, tmp_path):
    with pytest.raises(IncompatibleEngine, match="Magic tag does not match"):
        opened(write_upstream(tmp_path / "engine"), accepted_runtime="tensorrt_rtx==1.7.1.116")


@pytest.mark.parametrize("call", ["deserialize_cuda_engine", "create_execution_context"])
def test_too_little_memory_on_the_card_is_out_of_memory_with_the_bytes(call, library, tmp_path):
    library.failures[call] = "Requested amount of GPU memory could not be allocated: out of memory"
    with pytest.raises(OutOfMemory) as error:
        opened(write_ours(tmp_path / "engine"))
    assert "out of memory" in error.value.found and "of device memory" in error.value.expected


def test_what_the_bindings_raise_is_mapped(library, monkeypatch, tmp_path):
    def refuse(self, content):
        raise TypeError("incompatible function arguments")

    monkeypatch.setattr(library.Runtime, "deserialize_cuda_engine", refuse)
    with pytest.raises(IncompatibleEngine, match="incompatible function arguments"):
        opened(write_ours(tmp_path / "engine"))


# Contract and plan


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda ts: [replace(t, dtype="float16") if t.tap else t for t in ts], "float16[B, 24]"),
        (lambda ts: [replace(t, shape=("B", 25)) if t.tap else t for t in ts], "float32[B, 25]"),
        (lambda ts: [replace(t, shape=(9, 24)) if t.tap else t for t in ts], "float32[?, 24]"),
        (lambda ts: [replace(t, name="hidden") if t.tap else t for t in ts], "no tensor hidden"),
        (lambda ts: [*ts, TensorSpec("mask", "output", "int32", ("T",))], "output mask"),
        (lambda ts: [t for t in ts if t.name != "input_ids"], "no tensor input_ids"),
        (lambda ts: [replace(t, role="output") if t.name == "position_ids" else t for t in ts], "output position_ids"),
    ],
    ids=["dtype", "size", "fixed size", "name", "one more", "one less", "role"],
)
def test_a_contract_that_disagrees_with_the_plan_is_refused_with_the_differences(change, words, library, tmp_path):
    with pytest.raises(ContractError, match="disagree about") as error:
        opened(write_ours(tmp_path / "engine"), tensors=tuple(change(tensors(TOY))))
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("name", "reason", "fix"),
    [
        ("q_lora_ranks_0", "LoRA weights", "--lora_plugin"),
        ("spec_decoding_use", "speculative decoding", "--speculative_decoding_mode none"),
        ("prompt_embedding_table", "prompt-table embeddings", "--max_prompt_embedding_table_size 0"),
        ("tasks", "prompt-table embeddings", "--max_prompt_embedding_table_size 0"),
        ("prompt_vocab_size", "prompt-table embeddings", "--max_prompt_embedding_table_size 0"),
        ("sequence_length", "a key-value cache", "--kv_cache_type disabled"),
        ("cache_indirection", "a key-value cache", "--kv_cache_type disabled"),
        ("host_past_key_value_lengths", "a key-value cache", "--kv_cache_type disabled"),
        ("hidden_states_input", "pipeline parallelism", "for one GPU"),
        ("attention_mask", "padded attention", "--remove_input_padding enable"),
        ("host_kv_cache_pool_pointers", "a key-value cache", "--kv_cache_type disabled"),
        ("past_key_value_0", "a key-value cache", "--kv_cache_type disabled"),
        ("mrope_position_deltas", "positions of images", "reads text"),
        ("all_reduce_workspace", "several GPUs", "for one"),
        ("host_of_the_future", "host_of_the_future", "trtllm-extract upstream"),
    ],
)
def test_an_input_that_nobody_here_can_fill_is_refused_by_name_and_reason(name, reason, fix, upstream, tmp_path):
    described = (*upstream_tensors(), TensorSpec(name, "input", "int32", ("B",)))
    facts = facts_of(described, PROFILES, version="10.7.0")
    contract = trt_contract(Toy(taps=(ALL, LAST)), upstream_tensors(), accepted_runtime="tensorrt_llm==0.16.0")
    folder = write_plan(tmp_path / "engine", contract, facts, model_bytes(), name="rank0.engine", magic=b"ftrt")
    with pytest.raises(IncompatibleEngine, match=f"cannot fill: {name}") as error:
        opened(folder)
    assert reason in error.value.found and fix in error.value.fix and "host_context_progress" in error.value.expected


def model_bytes():
    return toy_model(TOY).SerializeToString()


def test_a_tensor_that_the_library_reads_on_the_host_is_refused(library, tmp_path):
    with pytest.raises(ContractError, match="'input_ids' lies elsewhere"):
        opened(write_ours(tmp_path / "engine", facts=dict(on_host=["input_ids"])))


def test_a_contract_that_puts_a_host_input_on_the_device_is_refused(upstream, tmp_path):
    described = tuple(replace(t, location="device") for t in upstream_tensors())
    with pytest.raises(ContractError, match="'host_context_lengths' lies elsewhere"):
        opened(write_upstream(tmp_path / "engine"), tensors=described)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(profiles=PROFILES[1:]), "2 profiles"),
        (dict(profiles=(Profile(64, 32, 9), *PROFILES[1:])), "attention_rows [32, 9]"),
        (dict(profiles=(Profile(64, 32, 7), *PROFILES[1:])), "attention_rows [32, 7]"),
        (dict(limits=replace(LIMITS, max_num_tokens=257)), "max_num_tokens=257"),
        (dict(limits=replace(LIMITS, max_padded_tokens=480)), "max_batch_size=22, max_seq_len=21"),
    ],
)
def test_batches_that_the_contract_admits_and_the_plan_does_not_take_are_refused_at_load(changes, words, library, tmp_path):
    with pytest.raises(ContractError, match="disagree about the batches") as error:
        opened(write_ours(tmp_path / "engine"), **changes)
    assert words in error.value.expected


# Binding, without a session


def bind(engine, shapes, address=1 << 20):
    for name, shape in shapes.items():
        engine.set_shape(name, shape)
    for number, tensor in enumerate(engine.tensors()):
        engine.set_address(tensor.name, address + number)


SHAPES = {"input_ids": (5,), "position_ids": (5,), "attention_rows": (2, 3), "packed_slots": (5,), "last_token_ids": (2,)}


NO_SHAPES = [
    ("input_ids", (257,)),
    ("input_ids", (0,)),
    ("input_ids", (1, 2)),
    ("ids", (3,)),
    ("final_post_last", (3, 24)),
]


@pytest.mark.parametrize(("name", "shape"), NO_SHAPES)
def test_a_shape_beyond_every_profile_is_refused(name, shape, library, tmp_path):
    with pytest.raises(BackendError, match=f"no input '{name}' of this shape"):
        opened(write_ours(tmp_path / "engine")).set_shape(name, shape)


def test_a_batch_that_no_single_profile_holds_is_refused_with_the_profiles(library, tmp_path):
    engine = opened(write_ours(tmp_path / "engine"))
    bind(engine, {**SHAPES, "attention_rows": (32, 8), "last_token_ids": (32,), "input_ids": (256,), "packed_slots": (256,)})
    engine.set_shape("attention_rows", (19, 40))
    with pytest.raises(BackendError, match="no optimization profile") as error:
        engine.enqueue(1)
    assert "attention_rows [19, 40]" in error.value.found and "attention_rows [1, 1] to [19, 40]" in error.value.expected


def test_what_is_not_bound_again_is_never_used(library, tmp_path):
    engine = opened(write_ours(tmp_path / "engine"))
    with pytest.raises(BackendError, match="nothing for attention_rows, final_post_last, input_ids"):
        engine.enqueue(1)
    bind(engine, SHAPES)
    library.failures["execute_async_v3"] = "busy"
    with pytest.raises(BackendError, match="TensorRT refuses the batch"):
        engine.enqueue(1)
    bind(engine, {})  # addresses alone: every shape is still that of the batch before
    with pytest.raises(BackendError, match="nothing for attention_rows, input_ids"):
        engine.enqueue(1)
    bind(engine, SHAPES)
    with pytest.raises(BackendError, match="TensorRT refuses the batch"):
        engine.enqueue(1)
    for name, shape in SHAPES.items():  # shapes alone: every address is still that of the batch before
        engine.set_shape(name, shape)
    with pytest.raises(BackendError, match="nothing for attention_rows, final_post_last, input_ids"):
        engine.enqueue(1)


def test_a_profile_is_selected_again_after_another_was_refused(library, tmp_path):
    """Which one the library then has is not known."""
    engine = opened(write_ours(tmp_path / "engine"))
    library.failures["execute_async_v3"] = "busy"  # what follows the selection is not looked at
    longer = {**SHAPES, "attention_rows": (2, 40)}
    for refused, shapes in (("", SHAPES), ("no", longer), ("", SHAPES)):
        library.failures["set_optimization_profile_async"] = refused
        bind(engine, shapes)
        with pytest.raises(BackendError, match="TensorRT refuses"):
            engine.enqueue(1)
    assert [profile for call, profile in library.calls if call == "set_optimization_profile_async"] == [0, 2, 0]


def test_of_many_errors_the_first_are_told(library):
    log = make_log(library)
    for number in range(9):
        log.log(library.ILogger.ERROR, f"error {number}")
    assert log.take() == "error 0; error 1; error 2; error 3"


@pytest.mark.parametrize("close", [True, False])
def test_a_closed_engine_or_no_stream_is_refused_and_closing_twice_is_nothing(close, library, tmp_path):
    engine = opened(write_ours(tmp_path / "engine"))
    bind(engine, SHAPES)
    if close:
        engine.close()
        engine.close()
    with pytest.raises(BackendError, match="a closed engine" if close else "stream 0"):
        engine.enqueue(1 if close else 0)
    assert not library.calls  # stream 0 is one that the library would take


def test_an_output_that_would_pass_its_place_is_refused_before_it_is_written(library, tmp_path):
    described = {t.name: (t.role, t.dtype, list(t.shape)) for t in tensors(TOY)}
    described["final_post_last"] = ("output", "float32", ["T", 24])
    engine = opened(write_ours(tmp_path / "engine", facts=dict(tensors=described)))
    bind(engine, SHAPES)  # to the library, B and T are both -1: only the batch shows it
    with pytest.raises(BackendError, match="would write 'final_post_last' in another shape") as error:
        engine.enqueue(1)
    assert error.value.expected == "[2, 24]" and error.value.found.startswith("[5, 24]")
    assert "execute_async_v3" not in dict(library.calls)
