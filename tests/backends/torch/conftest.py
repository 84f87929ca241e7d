"""Torch engines of tiny models of every family, built once; on the CPU, where the plain operations run them."""

import dataclasses

import pytest
import tiny

from tensorrt_llm_ext.builder import build_engine
from tensorrt_llm_ext.recipes import Card, read_contract, write_contract

CPU = Card(
    name="cpu-torch",
    title="any CPU, by torch",
    backend="torch",
    precisions=("float32", "bfloat16", "fp8"),
    opt_num_tokens=512,
    max_batch_size=16,
)
TAPS = "final@last,eagle3,final@all,layer:0@all,layer:3@mean,final@mean,final:pre@last"


@pytest.fixture(scope="session")
def cpu_card():
    return CPU


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    return {family: tiny.tiny_checkpoint(root / family, family) for family in tiny.FAMILIES}


@pytest.fixture(scope="session")
def engines(checkpoints, tmp_path_factory):
    """The path of the engine ``engines(family, precision)``, built when first asked for.

    fp8 is written into the contract of a bfloat16 build, which has the same files: the canaries of tiny models lie too
    near each other for the tolerance that fp8 needs. Open it with ``prove=False``.
    """
    root = tmp_path_factory.mktemp("engines")

    def engine(family, precision="float32", taps=TAPS, card=CPU, **options):
        name = "-".join([family, precision, taps.replace(":", "_"), card.name, *map(str, options.values())])
        if not (root / name).exists():
            built_as = "bfloat16" if precision == "fp8" else precision
            build_engine(checkpoints[family], root / name, card=card, precision=built_as, taps=taps, **options)
            contract = dataclasses.replace(read_contract(root / name), activation_dtype=precision)
            write_contract(root / name, contract)
        return root / name

    return engine
