"""A contract says all that an engine promises, survives the disk, and is refused when it is damaged."""

from dataclasses import replace

import numpy as np
import pytest
from fakes import falsify_contract

from tensorrt_llm_ext.checkpoint.architecture import Architecture, Rope
from tensorrt_llm_ext.errors import ContractError
from tensorrt_llm_ext.recipes import Contract, Limits, TensorSpec, read_contract, write_contract
from tensorrt_llm_ext.recipes.contract import (
    Canary,
    CanaryState,
    EngineFile,
    Fingerprints,
    MemoryEstimate,
    row_distances,
)
from tensorrt_llm_ext.taps import Tap

TAP = Tap(2, "post", "last")
CONTRACT = Contract(
    model_name="toy",
    architecture=Architecture(
        "llama", 2, 8, 16, 2, 1, 4, 100, 64, 1e-6, Rope("longrope", 1e4, 64, (("short_factor", (1.0, 2.0)),)),
        False, False, False, False, True, None,
    ),  # fmt: skip
    fingerprints=Fingerprints("sha256:c", "sha256:t", "sha256:r", "sha256:p"),
    backend="ort",
    builder="tensorrt_llm_ext",
    builder_version="0.1.0",
    accepted_runtime="onnxruntime>=1.23,<2",
    platform="any",
    compute_capabilities=("8.9", "12.0"),
    weight_dtype="bfloat16",
    activation_dtype="float32",
    taps=(TAP,),
    tensors=(TensorSpec("input_ids", "input", "int32", ("T",)), TensorSpec("final", "output", "float32", ("B", 8), tap=TAP)),
    limits=Limits(10, 2, 5, 12, opt_num_tokens=8),
    memory=MemoryEstimate(0, 1000, "weights"),
    files=(EngineFile("model.onnx", 5, "sha256:f"),),
    canaries=(Canary((1, 2), "graph-fp32", (CanaryState(TAP, np.float32([[0.1, 1e-30, 3e5]]), 1e-4, 0.5, "row -1"),)),),
    build={"seconds": 1.5},
)


def without_rows(contract: Contract) -> Contract:
    """Arrays do not compare as one truth value."""
    canaries = tuple(replace(c, states=tuple(replace(s, rows=s.rows.tobytes()) for s in c.states)) for c in contract.canaries)
    return replace(contract, canaries=canaries)


def test_a_contract_survives_the_disk_bit_by_bit(tmp_path):
    write_contract(tmp_path, CONTRACT)
    assert without_rows(read_contract(tmp_path)) == without_rows(CONTRACT)
    assert [path.name for path in tmp_path.iterdir()] == ["contract.json"]


def test_a_contract_is_replaced_whole(tmp_path):
    write_contract(tmp_path, CONTRACT)
    write_contract(tmp_path, replace(CONTRACT, model_name="other"))
    assert read_contract(tmp_path).model_name == "other"


def test_a_number_that_json_lacks_is_not_written(tmp_path):
    with pytest.raises(ValueError):
        write_contract(tmp_path, replace(CONTRACT, build={"seconds": float("nan")}))
    assert list(tmp_path.iterdir()) == []


def test_the_identity_is_of_what_decides_the_numbers():
    same = replace(CONTRACT, build={}, canaries=(), memory=MemoryEstimate(1, 2, "x"), accepted_runtime="any")
    assert same.engine_fingerprint() == CONTRACT.engine_fingerprint()
    assert replace(CONTRACT, weight_dtype="float32").engine_fingerprint() != CONTRACT.engine_fingerprint()


def test_the_output_of_a_tap_is_found():
    assert CONTRACT.output_of(TAP).name == "final"
    with pytest.raises(ContractError, match="no output tensor carries the tap"):
        CONTRACT.output_of(Tap(1, "pre", "last"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[:100], "is damaged"),
        (lambda text: text.replace('"format_version": 1', '"format_version": 99'), "another format version"),
        (lambda text: "[]", "another format version"),
        (lambda text: text.replace('"max_seq_len": ', '"max_seq_len": 1'), "was changed since it was written"),
        (lambda text: text.replace('"tolerance": ', '"tolerance": 1'), "was changed since it was written"),
        (lambda text: text.replace('"tolerance": ', '"tolerance": NaN, "was": '), "is damaged"),
        (lambda text: text.replace('"contract_hash"', '"hash"'), "was changed since it was written"),
    ],
)
def test_a_damaged_contract_is_refused(damage, message, tmp_path):
    path = write_contract(tmp_path, CONTRACT)
    path.write_text(damage(path.read_text()))
    with pytest.raises(ContractError, match=message):
        read_contract(tmp_path)


@pytest.mark.parametrize(
    "change", [lambda value: value.pop("limits"), lambda value: value.update(taps=[{"layer": 1}]), lambda value: value.update(a=1)]
)
def test_a_contract_of_other_fields_is_refused(change, tmp_path):
    write_contract(tmp_path, CONTRACT)
    falsify_contract(tmp_path, change)
    with pytest.raises(ContractError, match="does not have the fields"):
        read_contract(tmp_path)


def test_a_folder_without_a_contract_is_not_an_engine(tmp_path):
    with pytest.raises(ContractError, match="is not an engine directory"):
        read_contract(tmp_path)
    with pytest.raises(ContractError, match="is not an engine directory") as error:
        read_contract(tmp_path / "absent")
    assert error.value.found == "no such file"
    (tmp_path / "contract.json").mkdir()
    with pytest.raises(ContractError, match="is not an engine directory") as error:
        read_contract(tmp_path)
    assert "Is a directory" in error.value.found


def test_row_distances_are_relative_to_each_value_s_size():
    right = np.float32([[1000.0, 1.0, -1.0, 2.0], [1, 2, 3, 4]])
    assert row_distances(right, right).tolist() == [0, 0]
    nudged = right + np.float32([[10, 0, 0, 0], [0, 0, 0, 0]])
    assert 0 < row_distances(nudged, right)[0] < 0.01 and row_distances(nudged, right)[1] == 0
    assert row_distances(-right, right).min() > 0.9
    assert np.isnan(row_distances(right * np.float32([[np.nan], [1]]), right)).tolist() == [True, False]
    assert row_distances(np.ones((1, 4)), np.zeros((1, 4))) > 1e30
