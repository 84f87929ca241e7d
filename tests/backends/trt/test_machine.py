"""Driver, card and host are asked first; what does not fit is said with card, library and version, and what to build."""

import json
import platform
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from fakes import letter_tokenizer
from stand_in import compile_shared
from toy_engines import Toy, tensors
from toy_plans import trt_contract, write_ours

from tensorrt_llm_ext.backends import open_engine
from tensorrt_llm_ext.backends.trt import machine
from tensorrt_llm_ext.backends.trt.backend import TrtBackend
from tensorrt_llm_ext.cli import main
from tensorrt_llm_ext.errors import IncompatibleEngine
from tensorrt_llm_ext.recipes import read_contract

TOY = Toy()
HOST = f"{sys.platform}-{platform.machine()}"

DRIVER = """
extern "C" {
int cuInit(unsigned) { return INIT; }
int cuDriverGetVersion(int* version) { *version = 12080; return 0; }
int cuDeviceGetCount(int* count) { *count = COUNT; return 0; }
int cuDeviceGet(int* device, int) { *device = 7; return 0; }
int cuDeviceGetName(char* name, int, int device) { name[0] = 'G'; name[1] = '0' + device; name[2] = 0; return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) { *value = device + (attribute == 75 ? 1 : -1); return 0; }
}
"""


def use_driver(monkeypatch, tmp_path, init=0, count=1):
    source = tmp_path / f"driver_{init}_{count}.cpp"
    source.write_text(DRIVER.replace("INIT", str(init)).replace("COUNT", str(count)))
    monkeypatch.setattr(machine, "DRIVER", str(compile_shared(source, tmp_path)))


def test_the_card_is_what_the_driver_says(monkeypatch, tmp_path):
    use_driver(monkeypatch, tmp_path)
    assert machine.present_card() == machine.PresentCard("G7", "8.6", "12.8")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(init=999), "refuses cuInit with CUDA error 999"),
        (dict(count=0), "a driver without a card"),
    ],
)
def test_a_driver_that_has_no_card_says_why(monkeypatch, tmp_path, options, words):
    use_driver(monkeypatch, tmp_path, **options)
    with pytest.raises(machine.NoCard, match=words):
        machine.present_card()


@pytest.fixture
def without_driver(monkeypatch):
    monkeypatch.setattr(machine, "DRIVER", "libno_such_driver.so.1")


def test_without_a_driver_the_error_names_what_is_missing_and_the_library_is_never_created(library, monkeypatch, tmp_path):
    monkeypatch.undo()  # the stand-in machine has a card; this one may have none
    monkeypatch.setattr(machine, "DRIVER", "libno_such_driver.so.1")
    with pytest.raises(IncompatibleEngine) as error:
        open_engine(write_ours(tmp_path / "engine"), trt_contract(TOY, tensors(TOY)))
    assert "no NVIDIA driver (libno_such_driver.so.1" in error.value.found and HOST in error.value.found
    assert "compute capability 12.0 (" in error.value.expected and "RTX 5090" in error.value.expected
    assert "tensorrt_rtx==1.7.1.116" in error.value.expected and "--card cpu" in error.value.fix
    with pytest.raises(IncompatibleEngine, match="it was built for another"):
        TrtBackend().open(tmp_path / "engine", trt_contract(TOY, tensors(TOY)), num_threads=None)
    assert library.num_runtimes == 0  # creating one would end the process


@pytest.mark.parametrize("options", [["probe"], ["run", "--input", "rows.jsonl", "--out", "rows.lance"]], ids=["probe", "run"])
def test_a_verb_that_runs_an_engine_says_why_this_machine_cannot(options, without_driver, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"text": "a"}\n')
    letter_tokenizer().save(write_ours(tmp_path / "engine", platform=HOST))
    result = CliRunner().invoke(main, [options[0], "engine", *options[1:]])
    assert result.exit_code != 0
    assert "this machine cannot run the engine of toy" in result.output, result.output


def test_show_reads_the_contract_without_a_card(without_driver, tmp_path):
    result = CliRunner().invoke(main, ["show", str(write_ours(tmp_path / "engine")), "--json"])
    assert result.exit_code == 0, result.output
    assert "12.0" in json.dumps(json.loads(result.output))


@pytest.mark.parametrize(
    ("capability", "fix"),
    [
        ("9.0", "--card h100` (or h200)"),
        ("8.9", "--card l40s` (or rtx4090)"),
        ("7.5", "no card of this release has compute capability 7.5"),
    ],
)
def test_another_card_is_named_with_what_to_build_for_it(capability, fix, library, monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "present_card", lambda: machine.PresentCard("NVIDIA Other", capability, "12.8"))
    with pytest.raises(IncompatibleEngine) as error:
        open_engine(write_ours(tmp_path / "engine"), trt_contract(TOY, tensors(TOY)))
    assert f"NVIDIA Other, compute capability {capability}, CUDA 12.8" in error.value.found
    assert "tensorrt_rtx 1.7.1.116" in error.value.found and fix in error.value.fix
    assert library.num_runtimes == 0


@pytest.mark.parametrize("capabilities", [("8.9", "12.0"), ("12.0", "12.1")])
def test_a_plan_for_several_cards_runs_on_each(capabilities, library, tmp_path):
    assert open_engine(write_ours(tmp_path / "engine", compute_capabilities=capabilities), read_contract(tmp_path / "engine"))


def test_a_plan_for_another_kind_of_host_is_refused(library, tmp_path):
    contract = replace(trt_contract(TOY, tensors(TOY)), platform="linux-of-mars")
    with pytest.raises(IncompatibleEngine, match="host linux-of-mars") as error:
        open_engine(write_ours(tmp_path / "engine"), contract)
    assert HOST in error.value.found and "on this machine" in error.value.fix
