"""The contract names the backend; contract, library and engine must agree before anything runs."""

from dataclasses import replace
from types import SimpleNamespace

import onnxruntime
import pytest
from toy_engines import ALL, LAST, Toy, tensors, toy_contract, write_engine

from tensorrt_llm_ext.backends import known_backends, open_engine, opening
from tensorrt_llm_ext.errors import ContractError, EngineError, IncompatibleEngine
from tensorrt_llm_ext.recipes.contract import TensorSpec

TOY = Toy()


class ThirdParty:
    """A backend of another package; it says what it was asked to open."""

    name = "cloud"
    opened = closed = 0

    def runtime(self, contract):
        return "cloud-runtime", "2.1"

    def open(self, path, contract, *, num_threads):
        ThirdParty.opened += 1
        return SimpleNamespace(tensors=lambda: tensors(TOY), close=self.count_close, asked=(path, num_threads))

    def count_close(self):
        ThirdParty.closed += 1


@pytest.fixture
def third_party(monkeypatch):
    class Found(list):
        names = {"cloud"}

    def entry_points(group, name="cloud"):
        assert group == "tensorrt_llm_ext.backends"
        return Found([SimpleNamespace(load=lambda: ThirdParty)] if name == "cloud" else [])

    monkeypatch.setattr(opening, "entry_points", entry_points)
    monkeypatch.setattr(ThirdParty, "closed", 0)


def test_a_backend_comes_by_entry_point(third_party, tmp_path):
    contract = replace(toy_contract(TOY), backend="cloud", accepted_runtime="cloud-runtime~=2.0")
    engine = open_engine(tmp_path, contract, num_threads=3)
    assert engine.asked == (tmp_path, 3) and known_backends() == ("cloud", "ort", "torch", "trt")


def test_an_unknown_backend_is_refused_with_the_known_names(third_party, tmp_path):
    with pytest.raises(EngineError, match="no backend is called 'orT'") as error:
        open_engine(tmp_path, replace(toy_contract(TOY), backend="orT"))
    assert error.value.expected == "one of cloud, ort, torch, trt"
    assert "did you mean 'ort'?" in error.value.fix


@pytest.mark.parametrize("accepted", ["onnxruntime>=99", "onnxruntime<1", "torch>=2"])
def test_another_version_of_the_library_is_refused(tmp_path, accepted):
    with pytest.raises(IncompatibleEngine, match=f"onnxruntime {onnxruntime.__version__}"):
        open_engine(tmp_path, replace(toy_contract(TOY), accepted_runtime=accepted))


def test_a_version_specifier_that_is_none_is_a_contract_error(tmp_path):
    with pytest.raises(ContractError, match="not a version specifier"):
        open_engine(tmp_path, replace(toy_contract(TOY), accepted_runtime="any!"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda ts: [replace(t, dtype="float16") if t.tap else t for t in ts], "float16[B, 24]"),
        (lambda ts: [replace(t, shape=("T", 24)) if t.tap else t for t in ts], "float32[T, 24]"),
        (lambda ts: [replace(t, name="hidden") if t.tap else t for t in ts], "no tensor hidden"),
        (lambda ts: [*ts, TensorSpec("mask", "input", "int32", ("T",))], "input mask"),
        (lambda ts: ts[1:], "no tensor input_ids"),
    ],
    ids=["dtype", "shape", "name", "one more", "one less"],
)
def test_a_contract_that_disagrees_with_the_engine_is_refused_with_the_differences(tmp_path, change, words):
    folder = write_engine(tmp_path, TOY)
    with pytest.raises(ContractError, match="disagree about") as error:
        open_engine(folder, replace(toy_contract(TOY), tensors=tuple(change(tensors(TOY)))))
    assert words in str(error.value)


def test_an_engine_that_disagrees_is_closed_again(third_party, tmp_path):
    contract = replace(toy_contract(Toy(taps=(ALL,))), backend="cloud", accepted_runtime="cloud-runtime")
    with pytest.raises(ContractError):
        open_engine(tmp_path, contract)
    assert ThirdParty.closed == 1


def test_an_engine_of_other_taps_is_named_by_its_tensors(tmp_path):
    folder = write_engine(tmp_path, Toy(taps=(LAST,)))
    with pytest.raises(ContractError, match="final_post_all, final_post_last, last_token_ids"):
        open_engine(folder, toy_contract(Toy(taps=(ALL,))))
