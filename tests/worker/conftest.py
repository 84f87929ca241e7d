"""What the tests of the worker share: a real server, both brokers, toy engines and what a stream asks for."""

import itertools
import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "backends")]

from nats_server import MISSING, PROGRAM, NatsServer  # noqa: E402
from toy_engines import ALL, LAST, MEAN, Toy, write_engine  # noqa: E402
from toy_streams import LIMITS, wanted_of  # noqa: E402

from tensorrt_llm_ext.builder import build_engine  # noqa: E402
from tensorrt_llm_ext.runtime import Session  # noqa: E402
from tensorrt_llm_ext.worker import Access, InProcessBroker, JetStreamBroker  # noqa: E402

_NAMES = itertools.count()


@pytest.fixture(scope="session")
def engine(tmp_path_factory):
    """An engine directory with a last and a mean tap; one token's embedding is NaN."""
    return write_engine(tmp_path_factory.mktemp("engine") / "engine", Toy(taps=(LAST, MEAN), limits=LIMITS))


@pytest.fixture(scope="session")
def states_engine(tmp_path_factory):
    """An engine directory with a tap of every token's rows."""
    return write_engine(tmp_path_factory.mktemp("states") / "engine", Toy(taps=(ALL,), limits=LIMITS))


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory):
    import tiny

    return tiny.tiny_checkpoint(tmp_path_factory.mktemp("fleet") / "checkpoint", "llama")


@pytest.fixture(scope="session")
def tiny_engine(tiny_checkpoint):
    """An engine of a tiny model with its tokenizer, as the verbs need one."""
    build_engine(tiny_checkpoint, tiny_checkpoint.parent / "engine", taps="final@last", max_seq_len=64, opt_num_tokens=256)
    return tiny_checkpoint.parent / "engine"


@pytest.fixture
def wanted(engine):
    """A stream that asks for the toy engine."""
    return wanted_of(engine)


@pytest.fixture
def session(engine):
    with Session.open(engine, num_threads=1) as opened:
        yield opened


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory):
    """One server for all tests that do not stop it."""
    if PROGRAM is None:
        pytest.skip(MISSING)
    server = NatsServer(tmp_path_factory.mktemp("nats")).start()
    yield server
    server.stop()


@pytest.fixture
def own_nats_server(tmp_path):
    """A server for this test alone, to be stopped and started again."""
    if PROGRAM is None:
        pytest.skip(MISSING)
    (tmp_path / "nats").mkdir()
    server = NatsServer(tmp_path / "nats").start()
    yield server
    server.stop()


@pytest.fixture(params=["in_process", "jetstream"])
def broker(request):
    """An empty stream at each kind of broker."""
    name = f"stream-{next(_NAMES)}"
    if request.param == "in_process":
        yield InProcessBroker(name)
        return
    server = request.getfixturevalue("nats_server")
    with JetStreamBroker.open(Access(server.url), name, name="test") as opened:
        yield opened
