"""Fixtures of the C++ runtime: a stand-in driver that is built here, and a rig that runs batches on any kind of stream."""

import gc
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # tests import rig.py and stand_in.py by name

from rig import Rig
from stand_in import StandIn, compile_shared

from tensorrt_llm_ext import _runtime

HELD = ("slots_out", "tickets_open", "streams_open", "mapped_bytes", "device_bytes")


@pytest.fixture(scope="session")
def stand_in_library(tmp_path_factory):
    return compile_shared(Path(__file__).parent / "stand_in_driver.cpp", tmp_path_factory.mktemp("stand_in"))


@pytest.fixture
def stand_in(stand_in_library):
    """The stand-in driver, reset; after the test nothing may be live in it and no rule of it broken."""
    driver = StandIn(stand_in_library)
    driver.reset()
    yield driver
    gc.collect()
    assert driver.violations() == ""
    assert driver.live() == {"streams": 0, "registered": 0, "allocations": 0}
    driver.reset()


@pytest.fixture(autouse=True)
def home():
    """C++ counts what it makes: after each test nothing is held, and no destructor failed unless the test says so."""
    allowed = SimpleNamespace(destructor_errors=0)
    gc.collect()
    before = _runtime.stats()
    yield allowed
    gc.collect()
    after = _runtime.stats()
    assert {name: after[name] - before[name] for name in HELD} == dict.fromkeys(HELD, 0)
    assert after["destructor_errors"] - before["destructor_errors"] == allowed.destructor_errors


@pytest.fixture(params=["host", "stand_in", "stand_in_without_memory_operations", pytest.param("cuda", marks=pytest.mark.gpu)])
def open_rig(request):
    """Open rigs of one kind of stream; every test that takes this runs on every kind."""
    kind = request.param
    options = {}
    if kind.startswith("stand_in"):
        options["stand_in"] = request.getfixturevalue("stand_in")
        options["stand_in"].refuse_memory_operations(kind.endswith("without_memory_operations"))
    rigs = []

    def open_one(**more):
        rigs.append(Rig("stand_in" if options else kind, **options, **more))
        return rigs[-1]

    yield open_one
    for rig in rigs:
        rig.close()
        vars(rig).clear()  # pytest still holds the object


@pytest.fixture
def rig(open_rig):
    return open_rig()
