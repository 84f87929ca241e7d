"""The card's benchmark on tiny shapes on the CPU: every part has its rows and ratios; a peer's process keeps the protocol."""

import ast
import dataclasses
import sys
import types
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent))

import card_trace  # noqa: E402
import contenders  # noqa: E402
import operation_contenders  # noqa: E402
import torch_h200  # noqa: E402
import vllm_peer  # noqa: E402
from our_contenders import Sizes, _flops, _product_sizes, random_engines, swiglu_apart  # noqa: E402
from random_checkpoint import write_checkpoint  # noqa: E402
from torch_models import LLAMA_2_7B, QWEN3_8B  # noqa: E402

from tensorrt_llm_ext.backends.torch import gated, plain  # noqa: E402

SIZES = Sizes(num_tokens=256, length=128, long=200, longest=512, num_batches=2)
TINY = {
    name: dataclasses.replace(a, num_layers=2, hidden_size=32, intermediate_size=48, num_heads=4, num_kv_heads=a.num_kv_heads // 8, head_dim=16, vocab_size=99)
    for name, a in (("llama-2-7b", LLAMA_2_7B), ("qwen3-8b", QWEN3_8B))
}  # fmt: skip

STAND_IN = '''
import os
__version__ = "a stand-in"
KIND = os.environ["STAND_IN_VLLM"]

class LLM:
    def __init__(self, model, **options):
        print("words of the library")
        os.write(1, b"words of a library beneath it\\n")
        if KIND == "ends at the start":
            raise RuntimeError("no card for this")
        assert options["runner"] == "pooling"
        self.num_calls = 0

    def embed(self, prompts, use_tqdm):
        self.num_calls += 1
        if KIND == "ends in a round" and self.num_calls > 1:
            os._exit(3)
        if KIND == "is silent" and self.num_calls > 1:
            import time
            time.sleep(60)
        vectors = [[0.0] for prompt in prompts if len(prompt["prompt_token_ids"]) == 128]
        return vectors[1:] if KIND == "loses a vector" else vectors
'''


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Installs a stand-in for vLLM of a kind, here and in the processes that are started."""

    def install(kind):
        (tmp_path / "vllm.py").write_text(STAND_IN)
        monkeypatch.setenv("STAND_IN_VLLM", kind)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.syspath_prepend(str(tmp_path))

    return install


@pytest.fixture
def peer(tmp_path, stand_in):
    started = []

    def start(kind):
        stand_in(kind)
        model = write_checkpoint(tmp_path / "model", TINY["llama-2-7b"])
        one = vllm_peer.VllmPeer(model, quantization="fp8", max_num_batched_tokens=256, log=tmp_path / "log")
        started.append(one)
        return one

    yield start
    for one in started:
        one.close()
        assert one._process.returncode is not None


def test_vllm_is_looked_for_in_the_environment_of_its_interpreter(stand_in):
    stand_in("right")
    assert vllm_peer.is_installed()
    assert not vllm_peer.is_installed("false")


def test_a_peer_s_process_runs_a_round_whenever_it_is_told_to(peer):
    one = peer("right")
    one.wait_ready(60)
    assert one.version == "a stand-in" and one.name == "vllm fp8 256" and one.num_tokens == 256
    assert [one.milliseconds(60) > 0 for _ in range(3)] == [True] * 3
    one.close()
    assert one._process.returncode == 0


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("ends at the start", "no card for this"),
        ("ends in a round", "the process ended"),
        ("is silent", "no answer within 1 s"),
        ("loses a vector", "15 vectors for 16 prompts"),
    ],
)
def test_a_peer_that_fails_says_why(peer, kind, words, monkeypatch):
    monkeypatch.setattr(vllm_peer, "END_S", 0.5)
    one = peer(kind)
    with pytest.raises(vllm_peer.PeerFailed) as error:
        one.wait_ready(60)
        one.milliseconds(1 if kind == "is silent" else 60)
    assert words in str(error.value) and "words of the library" in str(error.value)


@pytest.fixture
def report(stand_in, monkeypatch):
    def measure(parts, kind="right"):
        if kind is not None:
            stand_in(kind)
        monkeypatch.setattr(torch_h200.torch, "compile", lambda model, **options: model)
        monkeypatch.setattr(contenders, "RUNS", 1)
        *_, last = torch_h200.measured(parts, {"card": "none"}, SIZES, TINY)
        return last

    return measure


def test_every_part_has_its_rows_and_ratios_in_every_round(report, capsys):
    found = report([*torch_h200.PARTS])
    assert [part["name"] for part in found["sittings"]] == [*torch_h200.PARTS]
    assert all("attention" in note and "is left out" in note for note in found["notes"])
    rows = [{row["name"] for row in part["rows"]} for part in found["sittings"]]
    ours = {f"llama-2-7b {p}{kind}" for p in ("fp8", "bfloat16") for kind in ("", " mixed", " 200", " 512", " products alone", " deterministic")}
    assert rows[0] == ours and rows[4] == {name.replace("llama-2-7b", "qwen3-8b") for name in ours if "deterministic" not in name}
    limit = {f"llama-2-7b {p} {kind}" for p in ("fp8", "bfloat16") for kind in ("ids to host vectors", "products alone")}
    transformers = {f"llama-2-7b transformers {kind} bf16" for kind in ("eager", "compiled")}
    assert rows[2] == limit | transformers | {"llama-2-7b vllm bf16 256", "llama-2-7b vllm fp8 256"}
    assert rows[3] == {name for name in limit if " fp8 " in name} | {"llama-2-7b vllm fp8 512"}
    assert all(len(row["rounds_ms"]) == contenders.ROUNDS and row["tokens_per_s"] > 0 for part in found["sittings"] for row in part["rows"])
    ratios = found["sittings"][2]["ratios"]
    assert len(ratios) == 10 and "llama-2-7b fp8 ids to host vectors / llama-2-7b vllm fp8 256" in ratios
    assert "llama-2-7b fp8 mixed / llama-2-7b fp8" in found["sittings"][0]["ratios"]
    torch_h200.print_report(found)
    assert "llama-2-7b vllm fp8 512" in capsys.readouterr().out


def test_an_interpreter_that_is_not_there_is_told_before_anything_is_timed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["torch_h200.py", "--vllm-python", "/nowhere/python"])
    with pytest.raises(SystemExit, match="2"):
        torch_h200.main()
    assert "expected an interpreter, found no program '/nowhere/python'" in capsys.readouterr().err


@pytest.fixture
def beside(monkeypatch):
    """Makes the contenders of operations, by name, and the notes on what was left out."""

    def make(compile=lambda twin, **options: twin):
        monkeypatch.setattr(torch, "compile", compile)
        notes = []
        with torch.inference_mode():
            made = operation_contenders.operations(random_engines(TINY["llama-2-7b"], SIZES)["fp8"], SIZES, notes)
        return {contender.name: contender for contender in made}, notes

    return make


def test_every_operation_of_the_kernels_has_a_rival_unless_a_library_computes_it(beside):
    kernels = ast.parse(Path(plain.__file__).with_name("kernels.py").read_text())
    (names,) = (ast.literal_eval(line.value) for line in kernels.body if isinstance(line, ast.Assign) and getattr(line.targets[0], "id", "") == "__all__")
    found, _ = beside()
    ours = {name.split()[0] for name, contender in found.items() if contender.against}
    assert ours == {*names} - {"adds_itself", "multiply", "multiply_add", "multiply_swiglu"}
    assert all(rival.startswith(f"{name} ") and rival in found for name, contender in found.items() for rival in contender.against)
    assert found["take"].against == ("take compiled",) and found["mean"].against == ("mean eager", "mean segment_reduce")
    assert found["attention 2 x 128"].flops == 4 * 64 * 2 * (128 * 129 // 2) and found["attention 1 x 512"].num_tokens == 512


def test_a_twin_that_does_not_compile_is_timed_as_it_is_and_a_note_says_so(beside):
    def fails(twin, **options):
        if twin is plain.swiglu:
            return lambda *given: (_ for _ in ()).throw(RuntimeError("no compiler\nfor this"))
        return twin

    found, notes = beside(fails)
    assert found["swiglu"].against == ("swiglu eager",) and found["quantise"].against == ("quantise compiled",)
    assert "swiglu compiled is left out: no compiler" in notes


def test_a_library_that_is_missing_fails_or_computes_something_else_is_left_out_with_a_note(beside, monkeypatch):
    def attend(q, k, v, starts, _, length, *more, causal=False):
        given = (part.unflatten(0, (-1, length)).transpose(1, 2) for part in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(*given, is_causal=causal).transpose(1, 2), "log-sum-exp"

    def fails(*given, is_causal):
        raise RuntimeError("no card.")

    library = types.SimpleNamespace(right=attend, other=lambda *given: attend(*given), fails=fails)
    monkeypatch.setitem(sys.modules, "library", library)
    monkeypatch.setattr(operation_contenders, "LIBRARIES", {name: f"library.{name}" for name in ("right", "other", "fails", "missing")})
    found, notes = beside()
    assert [rival for rival in found["attention 2 x 128"].against if "flash" not in rival and "cudnn" not in rival] == ["attention 2 x 128 right"]
    said = " ".join(notes)
    assert "attention by library.missing is left out" in said and "attention 1 x 512 fails is left out: no card " in f"{said} "
    assert "attention 1 x 200 other is left out: it differs from ours by" in said


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        ("nvjet_sm90_qqtst_128x256_128x4_2x1_v_bz_coopB_TNT", "products"),
        ("sm90_xmma_gemm_e4m3bf16", "products"),
        ("kernel_cutlass_kernel_quackepiloguefrontendGemmMod_swiglu_mod_0", "products with SwiGLU"),
        ("_add_norm", "_add_norm"),
    ],
)
def test_kernels_of_a_trace_are_told_apart(kernel, name):
    assert card_trace._called(kernel) == name


def test_passes_with_swiglu_apart_are_timed_where_it_is_an_epilogue(monkeypatch):
    a, seen = TINY["llama-2-7b"], []
    with torch.inference_mode():
        engines = random_engines(a, SIZES)
        assert swiglu_apart(engines, "llama", a, SIZES) == []
        monkeypatch.setattr(gated, "can_multiply", lambda linear: True)
        fp8, _ = swiglu_apart(engines, "llama", a, SIZES)
        monkeypatch.setattr(engines["fp8"], "_forward", lambda batch: seen.append(gated.can_multiply(None)))
        assert fp8.name == "llama fp8 SwiGLU apart" and fp8.against == ("llama fp8",) and fp8.measure() > 0
    assert seen and not any(seen) and gated.can_multiply(None)


def test_a_peer_that_is_not_there_or_does_not_start_is_left_out_with_a_note(report):
    found = report(["wide-peers"], kind="ends at the start")
    assert len(found["sittings"][0]["rows"]) == 2
    assert len(found["notes"]) == 1 and all("left out: vllm" in note and "no card for this" in note for note in found["notes"])


def test_without_vllm_a_note_says_so(report, monkeypatch):
    monkeypatch.setattr(torch_h200, "is_installed", lambda python: False)
    assert report(["wide-peers"], kind=None)["notes"] == ["vLLM at 512 tokens a batch is left out: it is not installed here"]


def test_a_peer_s_checkpoint_is_a_llama_of_weights_like_ours(tmp_path):
    import transformers

    a = TINY["llama-2-7b"]
    model, loading = transformers.AutoModel.from_pretrained(write_checkpoint(tmp_path / "model", a), output_loading_info=True)
    assert type(model).__name__ == "LlamaModel" and not any(loading.values())
    weights = dict(model.named_parameters())
    assert 0.9 < weights["layers.1.mlp.down_proj.weight"].float().std() * a.intermediate_size**0.5 < 1.1
    assert (weights["norm.weight"] == 1).all() and len({weight.float().sum().item() for weight in weights.values()}) > a.num_layers


def test_the_operations_of_a_pass_are_those_that_it_computes():
    """Two sequences, three layers: the first looks its queries, keys and values up; the last computes keys and values of every
    token, and the rest for two rows."""
    a = dataclasses.replace(TINY["qwen3-8b"], num_layers=3)
    queries, keys_and_values, rest = 32 * 64, 32 * 2 * 16, 32 * 64 + 3 * 32 * 48
    assert _product_sizes(a) == (queries, keys_and_values, rest)
    products = 5 * rest + 5 * (queries + keys_and_values + rest) + (5 * keys_and_values + 2 * (queries + rest))
    attention = 4 * 64 * (2 * (1 + 2 + 3 + 1 + 2) + (3 + 2))
    assert _flops(a, [3, 2]) == 2 * products + attention


def test_a_trace_of_batches_says_how_long_the_card_was_idle_and_what_the_host_waited_for():
    def event(category, name, start, duration):
        return {"cat": category, "name": name, "ts": start, "dur": duration}

    batches = event("user_annotation", "batches", 100, 1000)
    before, after = event("kernel", "warm-up", 50, 40), event("cuda_runtime", "cudaDeviceSynchronize", 1200, 9)
    kernels = [event("kernel", "a", 200, 300), event("gpu_memcpy", "copy", 250, 100), event("kernel", "c", 400, 50), event("kernel", "b", 600, 200)]
    calls = [event("cuda_runtime", "cudaLaunchKernel", 190, 5), event("cuda_driver", "cuMemAlloc_v2", 195, 5)]
    found = card_trace.read_batches([before, batches, *kernels, *calls, after], 2)
    assert found == {
        "ms a batch": 0.3, "idle share of the card": round(100 / 600, 5), "calls that wait": [],
        "calls that allocate": ["cuMemAlloc_v2"], "calls": 2,
    }  # fmt: skip
    waiting = [event("cuda_runtime", name, 500, 20) for name in ("cudaStreamSynchronize", "cudaMemcpy", "cudaMemcpyAsync")]
    assert card_trace.read_batches([batches, *kernels, *waiting], 2)["calls that wait"] == ["cudaMemcpy", "cudaStreamSynchronize"]
