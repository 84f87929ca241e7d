"""Backend trt on a Hopper card, which TensorRT-RTX does not run on: what the real libraries refuse is an error of ours.

Both libraries are loaded for real: TensorRT-RTX, and the runtime half of TensorRT 11, whose API is the full library's. Our
own checks come first and keep a plan from them; to hear the libraries themselves, contracts here promise this card.
"""

import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

for folder in ("backends", "backends/trt", "cpp"):  # tests import toy_engines.py and toy_plans.py by name
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))

from tensorrt_llm_ext.backends.trt.machine import NoCard, present_card

try:
    CARD = present_card()
except NoCard as reason:
    pytest.skip(str(reason), allow_module_level=True)
if CARD.compute_capability != "9.0":
    pytest.skip(f"{CARD.name} is no Hopper card", allow_module_level=True)

from toy_engines import Toy, tensors
from toy_plans import trt_contract

from tensorrt_llm_ext.backends import open_engine
from tensorrt_llm_ext.errors import EngineError, IncompatibleEngine
from tensorrt_llm_ext.fingerprint import file_fingerprint
from tensorrt_llm_ext.recipes import write_contract
from tensorrt_llm_ext.recipes.contract import EngineFile

pytestmark = pytest.mark.gpu

TOY = Toy()
LIBRARIES = {"tensorrt_rtx": "tensorrt_rtx_bindings", "tensorrt": "tensorrt_lean_bindings"}


@pytest.fixture(params=LIBRARIES)
def library(request, monkeypatch):
    """The library's name in a contract. TensorRT 11's runtime half stands where the full library would be imported."""
    module = pytest.importorskip(LIBRARIES[request.param])
    if request.param == "tensorrt":
        monkeypatch.setitem(sys.modules, "tensorrt", module)
    return request.param


@pytest.fixture(scope="session")
def real_plan():
    """A plan of TensorRT-RTX for two cards that are not here; building needs no card."""
    trt = pytest.importorskip("tensorrt_rtx_bindings")
    onnx = pytest.importorskip("onnx")
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Add", ["a", "a"], ["b"])], "twice", [value("a", 1, ["T", 4])], [value("b", 1, ["T", 4])]
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
    log = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    assert parser.parse(model.SerializeToString())
    config = builder.create_builder_config()
    config.num_compute_capabilities = 2
    config.set_compute_capability(trt.ComputeCapability.SM89, 0)
    config.set_compute_capability(trt.ComputeCapability.SM120, 1)
    profile = builder.create_optimization_profile()
    profile.set_shape("a", (1, 4), (2, 4), (8, 4))
    config.add_optimization_profile(profile)
    return bytes(builder.build_serialized_network(network, config))


def write_engine(folder, library, plan, **changes):
    """An engine directory whose contract agrees with its plan's bytes, with this library and with this card."""
    folder.mkdir()
    (folder / "engine.plan").write_bytes(plan)
    file = EngineFile("engine.plan", len(plan), file_fingerprint(folder / "engine.plan"))
    version = import_module(LIBRARIES[library]).__version__
    options = {"compute_capabilities": (CARD.compute_capability,), "accepted_runtime": f"{library}=={version}", **changes}
    contract = trt_contract(TOY, tensors(TOY), (file,), **options)
    write_contract(folder, contract)
    return contract


def test_another_card_is_refused_before_the_library_is_asked(library, real_plan, tmp_path):
    contract = write_engine(tmp_path / "engine", library, real_plan, compute_capabilities=("8.9", "12.0"))
    with pytest.raises(IncompatibleEngine, match="compute capability 8.9, 12.0") as error:
        open_engine(tmp_path / "engine", contract)
    assert f"{CARD.name}, compute capability 9.0" in error.value.found and "--card h" in error.value.fix


DAMAGES = {
    "whole": lambda plan: plan,
    "truncated": lambda plan: plan[: len(plan) // 2],
    "only its header": lambda plan: plan[:64],
    "only its magic": lambda plan: plan[:4],
    "garbage behind its magic": lambda plan: plan[:4] + b"\x5a" * (len(plan) - 4),
    "of TensorRT": lambda plan: b"ftrt" + plan[4:],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_the_library_itself_refuses_comes_with_its_words(damage, library, real_plan, tmp_path):
    contract = write_engine(tmp_path / "engine", library, DAMAGES[damage](real_plan))
    with pytest.raises(IncompatibleEngine, match="TensorRT refuses the plan") as error:
        open_engine(tmp_path / "engine", contract)
    found = error.value.found
    assert "Error Code" in found, found
    if damage == "whole":
        words = {"tensorrt_rtx": "cannot run on this GPU, which has compute capability 9.0", "tensorrt": "magicTag"}
        assert words[library] in found


def test_a_truncated_plan_is_an_engine_error_with_both_sizes(library, real_plan, tmp_path):
    contract = write_engine(tmp_path / "engine", library, real_plan)
    (tmp_path / "engine" / "engine.plan").write_bytes(real_plan[:-1])
    with pytest.raises(EngineError, match="is not the plan that was published") as error:
        open_engine(tmp_path / "engine", contract)
    assert error.value.expected == f"{len(real_plan):,} bytes" and error.value.found == f"{len(real_plan) - 1:,} bytes"


def test_a_version_that_is_not_the_contracts_is_named(library, real_plan, tmp_path):
    contract = write_engine(tmp_path / "engine", library, real_plan)
    with pytest.raises(IncompatibleEngine, match=f"{library}==0.1"):
        open_engine(tmp_path / "engine", replace(contract, accepted_runtime=f"{library}==0.1"))


def test_a_process_that_was_refused_ends_cleanly(library, real_plan, tmp_path):
    write_engine(tmp_path / "engine", library, real_plan)
    script = (
        "import sys, importlib; from pathlib import Path\n"
        f"sys.modules['tensorrt'] = importlib.import_module('{LIBRARIES[library]}')\n"
        "from tensorrt_llm_ext.backends import open_engine\n"
        "from tensorrt_llm_ext.errors import IncompatibleEngine\n"
        "from tensorrt_llm_ext.recipes import read_contract\n"
        "try: open_engine(Path(sys.argv[1]), read_contract(Path(sys.argv[1])))\n"
        "except IncompatibleEngine: print('refused')"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "engine")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr
