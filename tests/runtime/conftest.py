import sys
import threading
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "backends"))  # tests import toy_engines.py by name

from toy_engines import ALL, LAST, MEAN, Toy, write_engine

from tensorrt_llm_ext.backends import open_engine
from tensorrt_llm_ext.runtime import Session, session


class WatchedEngine:
    """A real engine whose calls are written down, and whose forward pass a test can hold, fail or follow up."""

    def __init__(self, engine):
        self.engine = engine
        self.calls = []
        self.num_running = 0
        self.is_open = threading.Event()  # cleared: forward passes wait
        self.is_open.set()
        self.before = self.after = lambda: None
        self.addresses = {}
        self.num_closed = 0

    def tensors(self):
        return self.engine.tensors()

    def set_shape(self, name, shape):
        self.calls.append(("shape", name))
        self.engine.set_shape(name, shape)

    def set_address(self, name, address):
        self.calls.append(("address", name))
        self.addresses[name] = address
        self.engine.set_address(name, address)

    def enqueue(self, stream):
        self.calls.append(("enqueue", threading.current_thread().name))
        self.num_running += 1
        self.is_open.wait(30)
        self.before()
        self.engine.enqueue(stream)
        self.after()

    def wait_until_running(self, num_batches):
        deadline = time.monotonic() + 10
        while self.num_running < num_batches and time.monotonic() < deadline:
            time.sleep(0.001)
        assert self.num_running == num_batches

    def close(self):
        self.num_closed += 1
        self.engine.close()


@pytest.fixture(scope="session")
def engine_path(tmp_path_factory):
    """A right engine with every kind of rows."""
    return write_engine(tmp_path_factory.mktemp("toy") / "engine", Toy(taps=(LAST, MEAN, ALL)))


@pytest.fixture(name="session")
def open_session(engine_path):
    """A session that ends with the test."""
    with Session.open(engine_path, num_threads=1, deadline_s=20.0) as opened:
        yield opened
    assert opened.stats()["cross_request"] == 0


@pytest.fixture
def watched(engine_path, monkeypatch):
    """Open sessions whose engine is watched: ``session, engine = watched(...)``; all are closed at the end."""
    opened = []

    def open_watched(path=engine_path, **options):
        engines = []

        def opening(*arguments, **keywords):
            engines.append(WatchedEngine(open_engine(*arguments, **keywords)))
            return engines[-1]

        monkeypatch.setattr(session, "open_engine", opening)
        opened.append((Session.open(path, num_threads=1, **{"deadline_s": 20.0, **options}), engines[-1]))
        engines[-1].calls.clear()
        engines[-1].num_running = 0
        return opened[-1]

    yield open_watched
    for one, engine in opened:
        engine.is_open.set()
        one.close()
