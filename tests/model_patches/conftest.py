"""What the tests of the patch set share: stand-ins of upstream, patched or captured."""

import sys
from pathlib import Path

import pytest
import tiny
from upstream_source import VERSIONS, write_upstream
from upstream_torch import DecoderModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent))

from captured_steps import LIMITS  # noqa: E402

from model_patches import capture, captured_contract, captured_origin, find_site  # noqa: E402
from tensorrt_llm_ext.checkpoint import open_checkpoint  # noqa: E402


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    with open_checkpoint(tiny.tiny_checkpoint(tmp_path_factory.mktemp("llama"), "llama")) as checkpoint:
        yield checkpoint


@pytest.fixture
def contract(checkpoint):
    return captured_contract(checkpoint, version="1.2.1", dtype="float32", limits=LIMITS, taps="final@last,final@all")


@pytest.fixture
def model():
    return DecoderModelForCausalLM()


@pytest.fixture
def captured(model, contract):
    with capture(model, contract, captured_origin(contract)) as captured:
        yield captured


@pytest.fixture(params=VERSIONS)
def site(request, tmp_path):
    return find_site(write_upstream(tmp_path, request.param))


@pytest.fixture
def one_site(tmp_path):
    return find_site(write_upstream(tmp_path, "0.16.0"))
