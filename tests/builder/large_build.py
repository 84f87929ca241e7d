"""Build a plan of a Llama-2-7B shape with random weights, as a process of its own so that its peak memory is its own.

    python tests/builder/large_build.py FOLDER PRECISION [LAYERS]

Prints JSON: seconds of the whole build and of the compiler, peak memory, plan size. ``fp8`` starts from a ModelOpt checkpoint,
which brings its scales: a build besides calibration. ``fp8-calibrated`` starts from bfloat16 weights and measures everything.
"""

import json
import shutil
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tiny
import transformers

from tensorrt_llm_ext.builder import build, build_engine, canaries
from tensorrt_llm_ext.checkpoint.architecture import architecture_from_config
from tensorrt_llm_ext.checkpoint.layout import decoder_shapes
from tensorrt_llm_ext.recipes import Recipe

CONFIG = dict(
    architectures=["LlamaForCausalLM"], vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_attention_heads=32,
    num_key_value_heads=32, max_position_embeddings=4096, rms_norm_eps=1e-5, tie_word_embeddings=True,
)  # fmt: skip
NUM_PROMPTS = 4  # of which 16 tokens each are measured
_BLOCK = 1 << 22  # random values; every weight repeats them from another place


def write_checkpoint(folder: Path, num_layers: int, is_fp8: bool) -> None:
    """Write random weights in bfloat16, the linears of ``is_fp8`` in e4m3 with their scales, a tensor in memory at a time."""
    config = transformers.LlamaConfig(num_hidden_layers=num_layers, **CONFIG)
    config.save_pretrained(folder)
    tiny.byte_tokenizer().save_pretrained(folder)
    import ml_dtypes

    rng = np.random.default_rng(0)
    block = rng.standard_normal(_BLOCK, dtype=np.float32)
    values = {"BF16": (block * 0.05).astype(ml_dtypes.bfloat16), "F8_E4M3": (block * 80).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)}
    entries: dict[str, tuple[str, list[int]]] = {}
    for name, shape in decoder_shapes(architecture_from_config(config.to_dict())).items():
        in_fp8 = is_fp8 and name.endswith("_proj.weight")
        entries[name] = ("F8_E4M3" if in_fp8 else "BF16", list(shape))
        if in_fp8:
            for kind, _ in SCALES:
                entries[name.replace("weight", f"{kind}_scale")] = ("F32", [])
    entries = dict(sorted(entries.items(), key=lambda entry: (DTYPES.index(entry[1][0]), entry[0])))  # as safetensors does
    header, at = {}, 0
    for name, (dtype, shape) in entries.items():
        length = int(np.prod(shape)) * {"BF16": 2, "F8_E4M3": 1, "F32": 4}[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + length]}
        at += length
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for number, (name, (dtype, shape)) in enumerate(entries.items()):
            if dtype == "F32":
                out.write(np.float32(next(scale for kind, scale in SCALES if name.endswith(f"{kind}_scale"))).tobytes())
                continue
            turned = np.roll(values[dtype], 977 * number)
            for start in range(0, int(np.prod(shape)), _BLOCK):
                out.write(turned[: int(np.prod(shape)) - start].tobytes())
    if is_fp8:
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))


DTYPES = ("F32", "BF16", "F8_E4M3")  # in the order in which safetensors writes them
SCALES = (("weight", 0.05 / 80), ("input", 0.05))


def main() -> None:
    folder, kind, num_layers = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 32
    precision, _, is_calibrated = kind.partition("-")
    canaries.TOLERANCES[precision] = 0.005  # random layers change the states by less than trained ones, and FP8 by more
    build.check_fp8_canaries = lambda *given: 0.0
    folder.mkdir(parents=True)
    write_checkpoint(folder, num_layers, kind == "fp8")
    contract = build_engine(
        folder,
        folder / "engine",
        recipe=Recipe(fp8_harm=2.0) if is_calibrated else None,  # all products are measured, and none is kept
        card="l40s",
        precision=precision,
        calibration=_text(folder) if is_calibrated else None,
        progress=_told(),
    )
    shutil.rmtree(folder / "engine")
    (folder / "model.safetensors").unlink()
    facts = {name: contract.build[name] for name in ("seconds", "compile_seconds", "peak_rss_bytes", "plan_bytes")}
    print(json.dumps({"layers": num_layers, "precision": kind, **facts, **contract.build.get("calibration", {})}))


def _text(folder: Path) -> Path:
    """Few tokens: every layer runs on them once for each product below it, some 2,000 times in all."""
    lines = [json.dumps({"text": f"{number:02d} bottles of beer on the wall"}) for number in range(NUM_PROMPTS)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    return folder / "prompts.jsonl"


def _told() -> Callable[[str, int, int], None]:
    """Says on stderr when a step of the build has moved on."""
    start = time.monotonic()
    return lambda step, done, total: print(f"{time.monotonic() - start:7.1f} s  {step} {done}/{total}", file=sys.stderr)


if __name__ == "__main__":
    main()
