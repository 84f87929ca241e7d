"""Fixtures of backend trt: the stand-in library on the stand-in driver, and sessions that run on both."""

import gc
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # tests import stand_in_trt.py by name
sys.path.insert(0, str(Path(__file__).parents[2] / "cpp"))  # and stand_in.py

from stand_in import StandIn, compile_shared
from stand_in_trt import make_library
from upstream_site import write_upstream_site

from tensorrt_llm_ext import _runtime
from tensorrt_llm_ext.backends.trt import machine
from tensorrt_llm_ext.runtime import Session


@pytest.fixture(scope="session")
def stand_in_library(tmp_path_factory):
    source = Path(__file__).parents[2] / "cpp" / "stand_in_driver.cpp"
    return compile_shared(source, tmp_path_factory.mktemp("stand_in"))


@pytest.fixture
def driver(stand_in_library, monkeypatch):
    """The stand-in driver instead of the machine's; after the test no rule of it is broken."""
    driver = StandIn(stand_in_library)
    driver.reset()
    open_driver = _runtime.Driver
    monkeypatch.setattr(_runtime, "Driver", lambda: open_driver(driver.path))
    yield driver
    gc.collect()
    assert driver.violations() == ""
    driver.reset()


@pytest.fixture
def library(driver, monkeypatch):
    """A stand-in for TensorRT-RTX 1.7.1.116, and a machine with an RTX 5090."""
    library = make_library(driver, "tensorrt_rtx_bindings", "1.7.1.116", b"vtrt")
    monkeypatch.setitem(sys.modules, "tensorrt_rtx_bindings", library)
    card = machine.PresentCard("NVIDIA GeForce RTX 5090", "12.0", "13.0")
    monkeypatch.setattr(machine, "present_card", lambda: card)
    return library


@pytest.fixture
def open_session(library):
    """Open sessions that are closed at the end."""
    opened = []

    def open_one(path, **options):
        opened.append(Session.open(path, **{"deadline_s": 20.0, **options}))
        return opened[-1]

    yield open_one
    for session in opened:
        session.close()
    assert all(session.stats()["cross_request"] == 0 for session in opened)


@pytest.fixture
def upstream(driver, library, tmp_path, monkeypatch):
    """Stand-ins for TensorRT 10.7 and for TensorRT-LLM 0.16 with its plugin library; returns the former."""
    tensorrt = make_library(driver, "tensorrt", "10.7.0", b"ftrt")
    monkeypatch.setitem(sys.modules, "tensorrt", tensorrt)
    tensorrt.plugins = write_upstream_site(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return tensorrt
