"""Two engines are told apart field by field; where only a plan's bytes differ, that is said, and why."""

from dataclasses import replace

import pytest
import tiny

from tensorrt_llm_ext.builder import build_engine
from tensorrt_llm_ext.checks import compare_engines
from tensorrt_llm_ext.errors import ContractError
from tensorrt_llm_ext.recipes import read_contract, write_contract
from tensorrt_llm_ext.recipes.contract import EngineFile

OPTIONS = {"taps": "final@last,layer:1@all", "max_seq_len": 64}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Builds an engine of the one checkpoint, once for each set of options; ``again`` tells equal ones apart."""
    folder = tmp_path_factory.mktemp("compared")
    checkpoint = tiny.tiny_checkpoint(folder / "checkpoint", "qwen3", num_hidden_layers=2)

    def build(again=0, **options):
        out = folder / "-".join([str(again), *map(str, options.values())])
        if not out.exists():
            build_engine(checkpoint, out, **{**OPTIONS, **options})
        return out

    return build


def changed(engine, folder, **fields):
    """The engine's contract with other fields, in a folder of its own."""
    folder.mkdir()
    write_contract(folder, replace(read_contract(engine), **fields))
    return folder


def decisive(comparison):
    return {d.field: (d.here, d.there) for d in comparison.differences if d.is_identity}


def test_the_same_recipe_and_checkpoint_twice_differ_only_in_what_describes_the_build(built, tmp_path):
    again = built(again=1)
    build = read_contract(again).build
    again = changed(again, tmp_path / "again", build={**build, "seconds": build["seconds"] + 1})  # two may take as many milliseconds
    found = compare_engines(built(), again)
    assert found.is_same_engine and not decisive(found)
    assert "build.seconds" in {d.field for d in found.differences}
    assert all(d.field.startswith("build.") for d in found.differences) and found.reasons == ()


def test_another_option_is_named_with_both_values(built):
    found = compare_engines(built(), built(max_seq_len=32))
    assert not found.is_same_engine
    fields = decisive(found)
    assert fields["limits.max_seq_len"] == ("64", "32") and "fingerprints.recipe" in fields and "fingerprints.plan" in fields
    assert "fingerprints.checkpoint" not in fields and "architecture.num_layers" not in fields
    assert found.differences[0].is_identity and not found.differences[-1].is_identity
    assert any("recipe, card or options" in reason for reason in found.reasons)


def test_tensors_and_files_are_told_apart_by_name_not_by_place(built):
    fields = decisive(compare_engines(built(), built(taps="layer:1@all,final@last")))
    assert fields["tensors in order"][1].endswith("layer_001_pre_all, final_post_last")
    assert not any(field.startswith("tensors.") for field in fields)
    fields = decisive(compare_engines(built(), built(taps="layer:1@all")))
    assert fields["tensors.final_post_last"] == ("there, with name, role, dtype, shape, location, tap", None)
    assert not any(field.startswith("tensors.layer_001_pre_all") for field in fields)


@pytest.mark.parametrize(("builder", "why"), [("tensorrt", "timing them on the card"), ("tensorrt_rtx", "times nothing")])
def test_a_plan_of_which_only_the_bytes_differ_is_the_same_engine_and_says_why(builder, why, built, tmp_path):
    plans = [EngineFile("engine.plan", size, f"sha256:{size}", is_reproducible=False) for size in (7, 8)]
    here, there = (changed(built(), tmp_path / f"{plan.size}", files=(plan,), builder=builder) for plan in plans)
    found = compare_engines(here, there)
    assert found.is_same_engine
    assert {d.field: (d.here, d.there) for d in found.differences} == {
        "files.engine.plan.size": ("7", "8"), "files.engine.plan.sha256": ("sha256:7", "sha256:8"),
    }  # fmt: skip
    (reason,) = found.reasons
    assert "the bytes of engine.plan differ, what it was compiled from does not" in reason and why in reason


def test_a_plan_for_another_card_is_not_said_to_differ_for_no_reason(built, tmp_path):
    plan = EngineFile("engine.plan", 7, "sha256:7", is_reproducible=False)
    here = changed(built(), tmp_path / "here", files=(plan,), builder="tensorrt_rtx", compute_capabilities=("8.9",))
    prints = replace(read_contract(here).fingerprints, recipe="sha256:0")
    other = dict(files=(replace(plan, sha256="sha256:8"),), compute_capabilities=("8.0",), fingerprints=prints)
    found = compare_engines(here, changed(here, tmp_path / "there", **other))
    assert [reason.partition(" are")[0] for reason in found.reasons] == ["recipe, card or options"]


def test_a_plan_of_another_version_is_another_engine(built, tmp_path):
    plan = EngineFile("engine.plan", 7, "sha256:7", is_reproducible=False)
    here = changed(built(), tmp_path / "here", files=(plan,), builder="tensorrt_rtx", builder_version="1.6")
    other = replace(plan, sha256="sha256:8")
    found = compare_engines(here, changed(here, tmp_path / "there", files=(other,), builder_version="1.7"))
    assert decisive(found) == {"builder_version": ("1.6", "1.7")}
    assert found.reasons[-1].endswith("tensorrt_rtx 1.6 and 1.7 write other plans")


def test_other_canaries_do_not_make_another_engine(built, tmp_path):
    canaries = read_contract(built()).canaries
    other = (replace(canaries[0], source="transformers 5.0"), *canaries[1:])
    found = compare_engines(built(), changed(built(), tmp_path / "other", canaries=other))
    assert found.is_same_engine and [d.field for d in found.differences] == ["canaries.0"]
    assert "--update-canaries" in found.reasons[0]


def test_what_is_no_engine_cannot_be_compared(built, tmp_path):
    with pytest.raises(ContractError, match="not an engine directory"):
        compare_engines(built(), tmp_path)
