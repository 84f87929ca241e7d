"""Plans are compiled for real, by TensorRT-RTX, for cards that are not here; the contract says what the plan has."""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny

from tensorrt_llm_ext.builder import build_engine, trt_builder, trt_engine, trt_library
from tensorrt_llm_ext.builder.trt_library import Library, library_for
from tensorrt_llm_ext.checks import compare_engines, describe
from tensorrt_llm_ext.errors import BuildError, DiskFull, MissingExtra, RecipeError
from tensorrt_llm_ext.recipes import TensorSpec, load_card, read_contract
from tensorrt_llm_ext.recipes.contract import Profile

trt = pytest.importorskip("tensorrt_rtx_bindings")

CARDS = {"a100": "8.0", "a10": "8.6", "rtx3090": "8.6", "l40s": "8.9", "rtx4090": "8.9", "rtx5090": "12.0", "rtx-pro-6000": "12.0", "dgx-spark": "12.1"}
TAPS = "final@last,layer:1@all"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny.tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "qwen3", "qwen3", num_hidden_layers=2)


@pytest.fixture(scope="module")
def engine(checkpoint, tmp_path_factory):
    out = tmp_path_factory.mktemp("built") / "engine"
    build_engine(checkpoint, out, card="rtx5090", taps=TAPS, max_seq_len=256)
    return out


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize("card", ["a100", "a10", "l40s", "rtx5090", "dgx-spark"])
def test_a_plan_is_built_for_each_capability(card, precision, checkpoint, tmp_path):
    contract = build_engine(checkpoint, tmp_path / "engine", card=card, taps=TAPS, precision=precision)
    assert (contract.backend, contract.builder, contract.builder_version) == ("trt", "tensorrt_rtx", trt.__version__)
    assert contract.accepted_runtime == f"tensorrt_rtx=={trt.__version__}"
    assert contract.compute_capabilities == (CARDS[card],)
    assert (contract.activation_dtype, contract.weight_dtype) == (precision, precision)
    assert (tmp_path / "engine" / "engine.plan").stat().st_size == contract.build["plan_bytes"] > 100_000
    assert capabilities_in(tmp_path / "engine") == {CARDS[card]}


def capabilities_in(engine):
    """What a plan itself says that it was compiled for."""
    named = re.findall(rb"\bsm(8|12)(\d)\b", (engine / "engine.plan").read_bytes())
    return {f"{major.decode()}.{minor.decode()}" for major, minor in named}


@pytest.mark.parametrize("cards", [("rtx5090", "a100", "rtx4090", "l40s"), ("rtx-pro-6000", "l40s")])
def test_one_plan_serves_several_cards(cards, checkpoint, tmp_path):
    contract = build_engine(checkpoint, tmp_path / "engine", card=cards, taps=TAPS)
    wanted = {CARDS[card] for card in cards}
    assert set(contract.compute_capabilities) == capabilities_in(tmp_path / "engine") == wanted
    assert describe(tmp_path / "engine").facts["runs_on"].startswith(f"compute capability {', '.join(contract.compute_capabilities)},")
    alone = build_engine(checkpoint, tmp_path / "alone", card=cards[0], taps=TAPS)
    assert alone.engine_fingerprint() != contract.engine_fingerprint()
    assert contract.build["plan_bytes"] < 1.1 * alone.build["plan_bytes"]  # the weights are there once


def test_every_card_of_tensorrt_says_what_it_is():
    for name, capability in CARDS.items():
        card = load_card(name)
        assert (card.backend, card.compute_capability) == ("trt", capability) and card.memory_gb
    assert not any("fp8" in load_card(name).precisions for name in ("a100", "a10", "rtx3090"))


def test_the_directory_holds_the_plan_and_no_graph(engine):
    contract = read_contract(engine)
    assert {path.name for path in engine.iterdir()} == {file.name for file in contract.files} | {"contract.json"}
    assert "engine.plan" in {file.name for file in contract.files}
    assert not any(path.suffix == ".onnx" or path.is_dir() for path in engine.iterdir())


def test_the_contract_has_the_types_of_the_plan(engine):
    """NumPy has no bfloat16: the graph ends in a cast, so a bfloat16 plan gives float32."""
    tensors = {tensor.name: (tensor.role, tensor.dtype, tensor.shape) for tensor in read_contract(engine).tensors}
    assert tensors["final_post_last"] == ("output", "float32", ("B", 48))
    assert tensors["layer_001_pre_all"] == ("output", "float32", ("T", 48))
    assert {dtype for role, dtype, _ in tensors.values() if role == "input"} == {"int32"}


def test_a_longer_engine_has_a_ladder_of_profiles(engine):
    profiles = read_contract(engine).profiles
    assert [(p.max_batch_size, p.max_seq_len) for p in profiles] == [(256, 128), (127, 256)]


def test_a_profile_takes_one_token_up_to_the_most_and_is_best_at_a_full_batch_of_its_length():
    builder, made = trt.Builder(trt.Logger(trt.Logger.ERROR)), []

    class Recording:
        def create_optimization_profile(self):
            made.append(builder.create_optimization_profile())
            return made[-1]

    shapes = {"input_ids": ("T",), "attention_rows": ("B", "S"), "last_token_ids": ("B",)}
    tensors = tuple(TensorSpec(name, "input", "int32", shape) for name, shape in shapes.items())
    for profile, opt_num_tokens in ((Profile(8192, 256, 128), 4096), (Profile(2048, 20, 1024), 8192)):
        trt_builder._add_profile(Recording(), builder.create_builder_config(), profile, tensors, opt_num_tokens)
    found = [{name: [tuple(shape) for shape in profile.get_shape(name)] for name in shapes} for profile in made]
    assert found == [
        {
            "input_ids": [(1,), (4096,), (8192,)],
            "attention_rows": [(1, 1), (32, 128), (256, 128)],
            "last_token_ids": [(1,), (32,), (256,)],
        },
        {
            "input_ids": [(1,), (2048,), (2048,)],
            "attention_rows": [(1, 1), (2, 1024), (20, 1024)],
            "last_token_ids": [(1,), (2,), (20,)],
        },
    ]


def test_the_default_shape_is_128_tokens(checkpoint, tmp_path):
    contract = build_engine(checkpoint, tmp_path / "engine", card="rtx4090")
    assert contract.limits.max_seq_len == 128 and len(contract.profiles) == 1


def test_the_memory_estimate_is_the_plan_and_what_the_builder_says_it_computes_in(engine, checkpoint, tmp_path, monkeypatch):
    """What is counted from the graph bounds it, and stands in where the builder says nothing."""
    reported = read_contract(engine).memory
    assert "as the builder reports" in reported.formula and "Not measured on a card" in reported.formula
    monkeypatch.setattr(trt_builder, "_ACTIVATIONS", re.compile("never told"))
    contract = build_engine(checkpoint, tmp_path / "engine", card="rtx5090", taps=TAPS, max_seq_len=256)
    rows = 8192 * (3 * 48 + 3 * 80)
    slots = 256 * 128  # the first rung is the largest
    counted = 2 * (rows + slots * 2 * (6 + 2 * 2) * 16)
    assert contract.memory.device_bytes == contract.build["plan_bytes"] + counted
    assert "max_num_tokens" in contract.memory.formula and "Not measured on a card" in contract.memory.formula
    assert 0.5 * counted < reported.device_bytes - read_contract(engine).build["plan_bytes"] < counted


def test_the_same_build_twice_is_the_same_engine(engine, checkpoint, tmp_path):
    again = build_engine(checkpoint, tmp_path / "again", card="rtx5090", taps=TAPS, max_seq_len=256)
    assert again.engine_fingerprint() == read_contract(engine).engine_fingerprint()
    found = compare_engines(engine, tmp_path / "again")
    assert found.is_same_engine and {d.field.partition(".")[0] for d in found.differences} <= {"build", "files"}


def test_other_bytes_of_the_plan_are_the_same_engine_and_another_graph_is_not(engine):
    contract = read_contract(engine)
    files = [replace(file, sha256="sha256:0", size=1) if file.name == "engine.plan" else file for file in contract.files]
    assert replace(contract, files=tuple(files)).engine_fingerprint() == contract.engine_fingerprint()
    other = [replace(file, sha256="sha256:0") for file in contract.files]  # the tokenizer's too
    assert replace(contract, files=tuple(other)).engine_fingerprint() != contract.engine_fingerprint()
    compiled_from = replace(contract.fingerprints, plan="sha256:0")
    assert replace(contract, fingerprints=compiled_from).engine_fingerprint() != contract.engine_fingerprint()


def test_another_checkpoint_or_card_is_another_engine(engine, checkpoint, tmp_path):
    known = read_contract(engine).engine_fingerprint()
    other = tiny.tiny_checkpoint(tmp_path / "other", "qwen3", num_hidden_layers=2, seed=1)
    built = build_engine(other, tmp_path / "a", card="rtx5090", taps=TAPS, max_seq_len=256)
    assert built.engine_fingerprint() != known
    built = build_engine(checkpoint, tmp_path / "b", card="l40s", taps=TAPS, max_seq_len=256)
    assert built.engine_fingerprint() != known


def test_show_reads_a_plan_without_a_gpu(engine):
    facts = describe(engine).facts
    assert "compute capability 12.0, host linux-x86_64, tensorrt_rtx==" in facts["runs_on"]
    assert facts["profiles"][0].startswith("256 sequences of at most 128 tokens")
    plan = next(fact for fact in facts["files"] if fact.startswith("engine.plan"))
    assert "bytes may differ from build to build" in plan


def test_a_plan_for_another_host_says_build_there(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(trt_engine, "host_platform", lambda: "linux-x86_64")
    contract = build_engine(checkpoint, tmp_path / "engine", card="dgx-spark")
    assert contract.platform == "linux-aarch64" and contract.build["built_on"] == "linux-x86_64"
    assert "no plan built like this has been loaded yet" in describe(tmp_path / "engine").facts["built_by"]
    assert "build on that host" in contract.build["notes"][0]


def test_progress_names_the_compiler_and_ends(checkpoint, tmp_path):
    heard = []
    build_engine(checkpoint, tmp_path / "engine", card="rtx5090", progress=lambda *step: heard.append(step))
    assert list(dict.fromkeys(name for name, _, _ in heard)) == ["weights", "compile", "canaries", "fingerprint"]
    compiling = [(done, total) for name, done, total in heard if name == "compile"]
    assert len(compiling) > 3 and compiling[-1] == (1, 1) and all(done <= total for done, total in compiling)


def test_an_interrupt_while_compiling_leaves_nothing(checkpoint, tmp_path):
    def interrupt(step, done, total):
        if step == "compile" and done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_engine(checkpoint, tmp_path / "engine", card="rtx5090", progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_space_for_the_plan_is_refused_before_the_compiler_starts(checkpoint, tmp_path, monkeypatch):
    def free_space(path, real=shutil.disk_usage):
        return real(path)._replace(free=10_000_000)

    monkeypatch.setattr(shutil, "disk_usage", free_space)
    monkeypatch.setattr(trt_engine, "compile_plan", lambda *args, **kwargs: pytest.fail("the compiler was started"))
    with pytest.raises(DiskFull, match="no space for the plan") as error:
        build_engine(checkpoint, tmp_path / "engine", card="rtx5090")
    assert error.value.found == "0.01 GB free" and list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_under_the_compiler_is_a_full_disk(checkpoint, tmp_path, monkeypatch):
    compile_plan = trt_engine.compile_plan
    monkeypatch.setattr(
        trt_engine, "compile_plan", lambda library, network, plan, **rest: compile_plan(library, network, Path("/dev/full"), **rest)
    )
    with pytest.raises(DiskFull, match="filled up"):
        build_engine(checkpoint, tmp_path / "engine", card="rtx5090")
    assert list(tmp_path.iterdir()) == []


def test_the_librarys_words_are_in_the_error(checkpoint, tmp_path, monkeypatch):
    """7.5 has no bfloat16: TensorRT-RTX says so, once asked."""
    monkeypatch.setattr(trt_library, "RTX_CAPABILITIES", ("7.5",))
    card = replace(load_card("rtx4090"), compute_capability="7.5")
    with pytest.raises(BuildError, match="could not compile for 7.5") as error:
        build_engine(checkpoint, tmp_path / "engine", card=card, precision="bfloat16")
    assert "HW-specific datatypes" in error.value.found


def test_a_graph_that_the_parser_refuses_is_named(checkpoint, tmp_path, monkeypatch):
    from tensorrt_llm_ext.graph.operators import Graph

    monkeypatch.setattr(Graph, "silu", lambda self, x: self.node("NoSuchOperator", x))
    with pytest.raises(BuildError, match="could not parse the graph") as error:
        build_engine(checkpoint, tmp_path / "engine", card="rtx4090")
    assert "NoSuchOperator" in error.value.found


def test_a_graph_with_other_tensors_than_the_contract_lists_is_refused(checkpoint, tmp_path, monkeypatch):
    listed = trt_engine._tensors
    monkeypatch.setattr(trt_engine, "_tensors", lambda *args: listed(*args)[:-1])
    with pytest.raises(BuildError, match="reads other tensors"):
        build_engine(checkpoint, tmp_path / "engine", card="rtx4090")


def test_a_precision_of_another_backend_is_refused(checkpoint, tmp_path):
    with pytest.raises(RecipeError, match="cannot build float32"):
        build_engine(checkpoint, tmp_path / "engine", card="rtx4090", precision="float32")


@pytest.mark.parametrize("capabilities", [("7.5",), ("12.0", "9.0"), ("9.0", "10.0"), ()])
def test_cards_that_no_library_builds_for_are_refused(capabilities):
    with pytest.raises(BuildError, match="no TensorRT builds one plan"):
        library_for(capabilities)


def test_hopper_needs_the_full_library(monkeypatch):
    monkeypatch.setitem(trt_library.__dict__, "import_module", _no_module)
    with pytest.raises(MissingExtra, match="'tensorrt'") as error:
        library_for(("9.0",))
    assert "backend torch" in error.value.fix


def test_a_missing_tensorrt_rtx_names_the_extra(monkeypatch):
    monkeypatch.setitem(trt_library.__dict__, "import_module", _no_module)
    with pytest.raises(MissingExtra) as error:
        library_for(("12.0",))
    assert "tensorrt_llm_ext[trt-rtx]" in error.value.fix


@pytest.mark.parametrize(("present", "found"), [(None, "no GPU, or no driver"), ("8.9", "compute capability 8.9")])
def test_the_full_library_builds_only_on_a_card_of_its_kind(present, found, monkeypatch):
    monkeypatch.setattr(trt_library, "import_module", lambda name: trt)
    monkeypatch.setattr(trt_library, "present_capability", lambda: present)
    with pytest.raises(BuildError, match="builds for the GPU that is present") as error:
        library_for(("9.0",))
    assert error.value.found == found


def test_a_full_library_that_cannot_stream_a_plan_is_refused_with_its_version(monkeypatch):
    old = SimpleNamespace(Builder=object, __version__="10.12.0.36")
    monkeypatch.setattr(trt_library, "import_module", lambda name: old)
    monkeypatch.setattr(trt_library, "present_capability", lambda: "9.0")
    with pytest.raises(BuildError, match="piece by piece") as error:
        library_for(("9.0",))
    assert (error.value.expected, error.value.found) == ("tensorrt 10.13 or later", "tensorrt 10.12.0.36")


def test_the_full_library_is_not_told_a_target(monkeypatch):
    monkeypatch.setattr(trt_library, "import_module", lambda name: trt)
    monkeypatch.setattr(trt_library, "present_capability", lambda: "10.0")
    assert library_for(("10.0",)) == Library("tensorrt", trt, names_targets=False)


def _no_module(name):
    raise ImportError(f"No module named {name!r}")
