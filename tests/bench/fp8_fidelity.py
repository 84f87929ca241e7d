"""How near static FP8 stays to float32 for each share of the weights that is kept in bfloat16: the frontier of one checkpoint.

    python tests/bench/fp8_fidelity.py CHECKPOINT [--prompts tests/data/held_out.jsonl] [--harms 0.002 0.0004 …]

Scales and harms come from the demo's prompts; the graph with its roundings runs in ONNX Runtime on the prompts, which are
others. What is kept is float32 here, as in every graph for the CPU.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
import onnxruntime

from tensorrt_llm_ext.builder.calibration import calibrate
from tensorrt_llm_ext.builder.harms import products_to_keep, total
from tensorrt_llm_ext.checkpoint import open_checkpoint
from tensorrt_llm_ext.checkpoint.layout import product_linears
from tensorrt_llm_ext.graph import write_decoder
from tensorrt_llm_ext.graph.quantisation import Fp8Linears
from tensorrt_llm_ext.recipes.contract import row_cosines
from tensorrt_llm_ext.taps import parse_taps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--prompts", type=Path, default=Path("tests/data/held_out.jsonl"))
    parser.add_argument("--harms", type=float, nargs="+", default=[2.0, 2e-3, 1e-3, 6e-4, 4e-4, 2e-4])
    arguments = parser.parse_args()
    with open_checkpoint(arguments.checkpoint) as checkpoint:
        num_layers = checkpoint.architecture.num_layers
        texts = [json.loads(line)["text"] for line in arguments.prompts.read_text().splitlines()]
        sequences = checkpoint.tokenizer().encode_batch(texts, special_tokens=True)
        calibration = calibrate(checkpoint, None, num_layers=num_layers, most=2.0)
        scales, harms = calibration.linears.scales, calibration.harms
        sizes = {
            product: sum(int(np.prod(checkpoint.info(f"{name}.weight").shape)) for name in product_linears(product))
            for product in harms
        }
        print(f"{len(sequences)} prompts, {sum(map(len, sequences))} tokens; all products harm {total(harms, harms):.5f}", flush=True)
        exact = _states(checkpoint, None, sequences)
        for most in arguments.harms:
            kept = products_to_keep(harms, sizes, most)
            linears = frozenset(name for product in kept for name in product_linears(product))
            fp8 = Fp8Linears({name: scale for name, scale in scales.items() if name not in linears}, linears)
            found = _states(checkpoint, fp8, sequences)
            last, every = (np.concatenate([row_cosines(a[i], b[i]) for a, b in zip(exact, found, strict=True)]) for i in (0, 1))
            more = sum(sizes[product] for product in kept)
            print(
                f"harm {most:g}: {len(kept)} of {len(harms)} products kept, {more / 1e6:.1f} MB more ({more / sum(sizes.values()):.0%})"
                f" | final@last mean {last.mean():.5f} min {last.min():.5f} below 0.995: {(last < 0.995).sum()}"
                f" | final@all mean {every.mean():.5f} 0.1 % {np.quantile(every, 1e-3):.4f} min {every.min():.4f} below 0.9: {(every < 0.9).sum()}",
                flush=True,
            )


def _states(checkpoint, fp8: Fp8Linears | None, sequences) -> list[list[np.ndarray]]:
    """``final@last`` and ``final@all`` of every sequence, each run alone."""
    taps = parse_taps("final@last,final@all", checkpoint.architecture.num_layers)
    with tempfile.TemporaryDirectory() as folder:
        longest = max(map(len, sequences))
        write_decoder(checkpoint, Path(folder), taps=taps, dtype="float32", max_seq_len=longest, fp8=fp8)
        session = onnxruntime.InferenceSession(f"{folder}/model.onnx", providers=["CPUExecutionProvider"])
        return [session.run(["final_post_last", "final_post_all"], _inputs(ids)) for ids in sequences]


def _inputs(token_ids: np.ndarray) -> dict[str, np.ndarray]:
    rows = np.arange(len(token_ids), dtype=np.int32)
    places = {"position_ids": rows, "attention_rows": rows[None], "packed_slots": rows}
    return {"input_ids": token_ids.astype(np.int32), **places, "last_token_ids": rows[-1:] + 1}


if __name__ == "__main__":
    main()
