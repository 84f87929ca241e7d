"""A build takes memory for one tensor, and with canaries for one layer: measured on a model far larger than that."""

import subprocess
import sys

import pytest
import tiny
import torch
import transformers
from safetensors.torch import save_file

from tensorrt_llm_ext.builder import build_engine
from tensorrt_llm_ext.checkpoint.architecture import architecture_from_config
from tensorrt_llm_ext.checkpoint.layout import decoder_shapes

SESSION_BYTES = 50e6  # its own slots and buffers are beside the engine
BIG = dict(
    vocab_size=2000, hidden_size=1024, intermediate_size=6144, num_hidden_layers=8, num_attention_heads=8,
    num_key_value_heads=2, head_dim=128, max_position_embeddings=512, tie_word_embeddings=True,
    architectures=["LlamaForCausalLM"],
)  # fmt: skip
LAYER_BYTES = 4 * (2 * 1024 * 1024 + 2 * 1024 * 2 * 128 + 3 * 1024 * 6144)  # float32: 86 MB
LARGEST_BYTES = 4 * 1024 * 6144  # one float32 tensor: 25 MB
ALLOWED_BYTES = 300e6

MEASURE = """
import sys
from pathlib import Path

def peak():
    status = dict(line.split(":") for line in open("/proc/self/status"))
    return int(status["VmHWM"].split()[0]) * 1024

from tensorrt_llm_ext.builder import build_engine
from tensorrt_llm_ext.checkpoint import open_checkpoint
from tensorrt_llm_ext.graph import write_decoder
from tensorrt_llm_ext.taps import parse_taps

floor = peak()
checkpoint, out, dtype, step = sys.argv[1:]
if step == "graph":
    Path(out).mkdir()
    write_decoder(open_checkpoint(checkpoint), Path(out), taps=parse_taps("final@last", 8), dtype=dtype, max_seq_len=512)
else:
    build_engine(checkpoint, out, precision=dtype)
print(peak() - floor)
"""


@pytest.fixture(scope="module")
def big_checkpoint(tmp_path_factory):
    """340 MB of bfloat16 weights; each repeats one random block, because drawing them all takes half a minute."""
    folder = tmp_path_factory.mktemp("big")
    config = transformers.LlamaConfig(**BIG)
    config.save_pretrained(folder)
    tiny.byte_tokenizer().save_pretrained(folder)
    block = torch.randn(1_000_003, generator=torch.Generator().manual_seed(0)).mul_(0.05).bfloat16()

    def weight(shape):
        count = torch.Size(shape).numel()
        return block.repeat(-(-count // len(block)))[:count].reshape(shape).contiguous()

    shapes = decoder_shapes(architecture_from_config(config.to_dict()))
    save_file({name: weight(shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    return folder


def grown(checkpoint, out, dtype, step) -> int:
    """Bytes by which the peak of a fresh process grew."""
    command = [sys.executable, "-c", MEASURE, str(checkpoint), str(out), dtype, step]
    num_bytes = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(f"{step} {dtype}: {num_bytes / 1e6:.0f} MB")
    return num_bytes


def test_the_model_is_larger_than_what_is_allowed():
    assert 8 * LAYER_BYTES > LAYER_BYTES + ALLOWED_BYTES


@pytest.mark.parametrize("dtype", ["float32", "float16"])  # linked, and streamed
def test_writing_the_graph_takes_one_tensor(dtype, big_checkpoint, tmp_path):
    assert grown(big_checkpoint, tmp_path / "engine", dtype, "graph") < LARGEST_BYTES + ALLOWED_BYTES


def test_building_with_canaries_takes_one_layer(big_checkpoint, tmp_path):
    assert grown(big_checkpoint, tmp_path / "engine", "float32", "build") < LAYER_BYTES + ALLOWED_BYTES


LOAD = """
import sys
import numpy as np
from tensorrt_llm_ext.fingerprint import token_hash
from tensorrt_llm_ext.recipes import read_contract
from tensorrt_llm_ext.results.record import WorkItem
from tensorrt_llm_ext.runtime import Session

def resident(key):
    status = dict(line.split(":") for line in open("/proc/self/status"))
    return int(status[key].split()[0]) * 1024

floor = resident("VmHWM")
engine, batch_size, length = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
rng = np.random.default_rng(0)
items = []
for i in range(batch_size):
    ids = rng.integers(10, 1900, length).astype(np.int32)
    items.append(WorkItem(str(i), str(i), ids, token_hash(ids)))
with Session.open(engine) as session:
    session.submit(items).wait()
print(resident("VmHWM") - floor, read_contract(engine).memory.host_bytes)
"""


def measured_and_estimated(engine, batch_size, length) -> tuple[int, int]:
    """Bytes by which a fresh process grew that opened the engine and ran its largest batch, and what the contract says."""
    command = [sys.executable, "-c", LOAD, str(engine), str(batch_size), str(length)]
    measured, estimate = map(int, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    print(f"{batch_size} x {length}: {measured / 1e6:.0f} MB, estimated {estimate / 1e6:.0f} MB")
    return measured, estimate


@pytest.mark.slow  # two builds of a 700 MB engine
@pytest.mark.parametrize(("batch_size", "length"), [(1, 512), (64, 8)])
def test_the_estimate_bounds_what_a_loaded_engine_takes(batch_size, length, big_checkpoint, tmp_path):
    build_engine(big_checkpoint, tmp_path / "engine", max_seq_len=length, max_num_tokens=512, max_padded_tokens=512)
    measured, estimate = measured_and_estimated(tmp_path / "engine", batch_size, length)
    assert 0.8 * estimate < measured < estimate + SESSION_BYTES


@pytest.mark.parametrize(
    ("limits", "batch_size", "length"),
    [
        pytest.param({}, 1, 2048, id="the longest sequence that the recipe allows"),
        pytest.param(
            {"max_seq_len": 32, "max_num_tokens": 1024, "max_padded_tokens": 1024}, 32, 32, id="short ones", marks=pytest.mark.slow
        ),
    ],
)
def test_the_estimate_of_smollm2_is_within_a_fifth_of_what_a_load_takes(limits, batch_size, length, tmp_path):
    build_engine(tiny.smollm2_gguf(), tmp_path / "engine", recipe="smollm2-135m", **limits)
    measured, estimate = measured_and_estimated(tmp_path / "engine", batch_size, length)
    assert 0.8 * estimate < measured < estimate + SESSION_BYTES
