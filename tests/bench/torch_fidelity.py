"""How near backend torch stays to float32 on real prompts: bfloat16, FP8 as the recipe of the model has it, FP8 everywhere.

    python tests/bench/torch_fidelity.py CHECKPOINT --recipe smollm2-135m [--contract FP8_ENGINE/contract.json] [--draws 100] [--json FILE]

Cosines of every row of every tap with the plain operations in float32, on prompts that nothing was calibrated on. What the
recipe's ``fp8_harm`` keeps in bfloat16 is measured here, as ``build`` does, which takes minutes of a CPU, or read from the
contract of an engine that was built with it. Without a CUDA card the plain operations are measured, on the CPU.

The lowest cosine of many prompts is that of one or two in which a rounding error grows to the end, and is another with every
order of summation. ``--draws`` runs each precision again and again with other rounding errors of the same size, and says how
often the lowest is what.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import machine
import numpy as np
import torch
from torch_models import DEVICE

from tensorrt_llm_ext.backends.torch import plain
from tensorrt_llm_ext.backends.torch.decoder import Decoder, forward
from tensorrt_llm_ext.backends.torch.engine import _operations
from tensorrt_llm_ext.backends.torch.loading import load_decoder
from tensorrt_llm_ext.backends.torch.values import Batch
from tensorrt_llm_ext.backends.torch.weight_index import WeightIndex
from tensorrt_llm_ext.backends.torch.workspace import make_workspace
from tensorrt_llm_ext.builder.calibration import calibrate
from tensorrt_llm_ext.builder.torch_engine import _written
from tensorrt_llm_ext.checkpoint import open_checkpoint
from tensorrt_llm_ext.checkpoint.architecture import Architecture
from tensorrt_llm_ext.checkpoint.layout import PRODUCTS, decoder_shapes, product_linears
from tensorrt_llm_ext.recipes import load_recipe
from tensorrt_llm_ext.recipes.contract import Limits
from tensorrt_llm_ext.taps import Tap, parse_taps

QUANTILE = 1e-3
LEAST = 0.995  # that final@last of every prompt is held to
DRAW_SIZE = 2**-8  # relative: moves a value of the embedding by at most one step of bfloat16, whose own rounding is half a step


class Prompts:
    """Prompts as one packed batch, and what a decoder gives for them at every tap, float32 ``[rows, hidden]``."""

    def __init__(self, path: Path, tokenizer, a: Architecture, taps: tuple[Tap, ...]) -> None:
        texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
        sequences = tokenizer.encode_batch(texts, special_tokens=True)
        lengths = torch.tensor([len(ids) for ids in sequences], dtype=torch.int32)
        self.num_prompts, self.num_tokens, self.longest = len(sequences), int(lengths.sum()), int(lengths.max())
        self.limits = Limits(self.num_tokens, self.num_prompts, self.longest, 1 << 40)
        inputs = (torch.from_numpy(np.concatenate(sequences).astype(np.int32)), lengths, lengths.cumsum(0, dtype=torch.int32))
        self._inputs = [values.to(DEVICE) for values in inputs]
        self._architecture, self._taps = a, taps

    def states(self, operations, decoder: Decoder, dtype: torch.dtype) -> dict[Tap, torch.Tensor]:
        rows = {"all": self.num_tokens, "last": self.num_prompts, "mean": self.num_prompts}
        outputs = {tap: torch.empty(rows[tap.rows], self._architecture.hidden_size, device=DEVICE) for tap in self._taps}
        space = make_workspace(self._architecture, self.limits, dtype, DEVICE)
        forward(operations, decoder, space, Batch(*self._inputs, self.longest, outputs))
        return outputs


def main() -> None:
    arguments = _arguments()
    harm = load_recipe(arguments.recipe).fp8_harm
    on = machine.card(arguments.commit) if DEVICE.type == "cuda" else {"card": "CPU, plain operations", "commit": arguments.commit}
    report = {"machine": on} | measured(
        arguments.checkpoint, harm, arguments.contract, arguments.prompts, has_fixed=arguments.fixed, num_draws=arguments.draws
    )
    print_report(report)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report, indent=1))


@torch.inference_mode()
def measured(
    path: Path, harm: float, contract: Path | None, prompts_path: Path, *, has_fixed: bool = False, num_draws: int = 0
) -> dict:
    """Run every precision over the prompts; the report: cosines by precision and tap, what was kept, on what."""
    started = time.perf_counter()
    with open_checkpoint(path) as checkpoint, tempfile.TemporaryDirectory() as folder:
        a = checkpoint.architecture
        middle = a.num_layers // 2
        taps = parse_taps(f"final@last,final@mean,final@all,layer:{middle}@last,layer:{middle}@all", a.num_layers)
        prompts = Prompts(prompts_path, checkpoint.tokenizer(), a, taps)
        kept = _kept(checkpoint, contract, harm)
        weights = _written(checkpoint, Path(folder), [checkpoint.info(name) for name in decoder_shapes(a)], "float32", lambda *_: None)

        def decoder_of(kept: tuple[str, ...] | None, dtype: torch.dtype = torch.bfloat16) -> Decoder:
            return load_decoder(
                Path(folder), WeightIndex(weights, kept or ()), a, num_layers=a.num_layers, max_seq_len=prompts.longest,
                dtype=dtype, is_fp8=kept is not None, device=DEVICE,
            )  # fmt: skip

        def states(operations, decoder: Decoder) -> dict[Tap, torch.Tensor]:
            return prompts.states(operations, decoder, torch.bfloat16)

        right = prompts.states(plain, decoder_of(None, torch.float32), torch.float32)
        ours = {"bfloat16": None, f"fp8, {len(kept)} of {len(PRODUCTS) * a.num_layers} products kept": kept, "fp8 everywhere": ()}
        found, drawn = {}, {}
        for name, products in ours.items():
            decoder, ops = decoder_of(products), _operations(DEVICE)
            found[name] = _cosines(states(ops, decoder), right)
            if num_draws:
                draws = (states(ops, _drawn(decoder, number))[taps[0]] for number in range(num_draws))
                drawn[name] = _lowest(torch.stack([_row_cosines(rows, right[taps[0]]) for rows in draws]))
        if has_fixed:
            fixed = _calibrated_inputs(checkpoint)
            for name, products in [*ours.items()][1:]:
                decoder = _with_input_scales(decoder_of(products), fixed)
                found[f"{name}, one scale for all rows of an input"] = _cosines(states(plain, decoder), right)
        return {
            "model": checkpoint.name,
            "num_prompts": prompts.num_prompts,
            "num_tokens": prompts.num_tokens,
            "fp8_harm": harm,
            "kept": kept,
            "cosines": {name: {tap.spelling(a.num_layers): row for tap, row in rows.items()} for name, rows in found.items()},
            "draws": drawn,
            "seconds": round(time.perf_counter() - started, 1),
        }


def _kept(checkpoint, contract: Path | None, harm: float) -> tuple[str, ...]:
    """The products that stay in bfloat16 within ``harm``; from a contract, which must be of this checkpoint and harm."""
    if contract is None:
        return calibrate(checkpoint, None, num_layers=checkpoint.architecture.num_layers, most=harm).kept
    value = json.loads(contract.read_text())
    facts = value["build"]["calibration"]
    found = value["fingerprints"]["checkpoint"], facts["harm_allowed"]
    if found != (checkpoint.fingerprint(), harm):
        raise SystemExit(f"'{contract}' is of another checkpoint or recipe: {found}")
    return tuple(facts["kept_products"])


def _calibrated_inputs(checkpoint) -> dict[str, float]:
    """One scale for the input of each product, from the demo's prompts."""
    num_layers = checkpoint.architecture.num_layers
    scales = calibrate(checkpoint, None, num_layers=num_layers, most=None).linears.scales
    products = [f"{layer}.{part}" for layer in range(num_layers) for part in PRODUCTS]
    return {product: max(scales[name].activation for name in product_linears(product)) for product in products}


def _with_input_scales(decoder: Decoder, fixed: dict[str, float]) -> Decoder:
    def linear(layer, number: int, part: str):
        found = getattr(layer, part)
        return replace(found, input_scale=fixed.get(f"{number}.{part}")) if found.is_fp8 else found

    layers = (replace(layer, **{part: linear(layer, number, part) for part in PRODUCTS}) for number, layer in enumerate(decoder.layers))
    return replace(decoder, layers=tuple(layers))


def _drawn(decoder: Decoder, seed: int) -> Decoder:
    """The decoder with its embedding moved by a step or none: every rounding after it is another."""
    noise = torch.rand(decoder.embedding.shape, generator=torch.Generator().manual_seed(seed)).mul_(2).sub_(1).to(DEVICE)
    moved = decoder.embedding.float() * (1 + DRAW_SIZE * noise)
    return replace(decoder, embedding=moved.to(decoder.embedding.dtype))


def _lowest(cosines: torch.Tensor) -> dict:
    """Of the cosines ``[draws, prompts]``: how the lowest of a draw is spread, and the prompts that fall below LEAST."""
    lowest = cosines.amin(1)
    below = (cosines < LEAST).float().mean(0)
    return {
        "num_draws": len(cosines),
        "least": LEAST,
        "lowest": {"median": lowest.median().item(), "min": lowest.min().item(), "max": lowest.max().item()},
        "share_of_draws_at_least": (lowest >= LEAST).float().mean().item(),
        "share_below_by_prompt": {str(index): below[index].item() for index in below.nonzero()[:, 0].tolist()},
    }


def _row_cosines(found: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    cosines = torch.nn.functional.cosine_similarity(found.double(), right.double(), dim=-1)
    if not len(cosines) or not torch.isfinite(cosines).all():
        raise SystemExit("nothing to compare, or rows that are not finite")
    return cosines


def _cosines(found: dict[Tap, torch.Tensor], right: dict[Tap, torch.Tensor]) -> dict[Tap, dict[str, float]]:
    rows = {}
    for tap, states in found.items():
        cosines = _row_cosines(states, right[tap])
        low = torch.quantile(cosines, QUANTILE)
        rows[tap] = {"mean": cosines.mean().item(), "quantile": low.item(), "min": cosines.min().item(), "rows": len(cosines)}
    return rows


def print_report(report: dict) -> None:
    print(
        f"{report['model']} on {report['machine']['card']}: {report['num_prompts']} prompts, {report['num_tokens']:,} tokens; cosine of each row with "
        f"float32; fp8_harm {report['fp8_harm']:g}; {report['seconds']} s"
    )
    for name, taps in report["cosines"].items():
        print(f"{name}")
        for tap, row in taps.items():
            print(f"  {tap:20} mean {row['mean']:.6f}  0.1 % {row['quantile']:.5f}  min {row['min']:.5f}  of {row['rows']:,} rows")
        if drawn := report["draws"].get(name):
            low, below = drawn["lowest"], drawn["share_below_by_prompt"]
            print(
                f"  lowest final@last of {drawn['num_draws']} draws: median {low['median']:.5f}, {low['min']:.5f} to {low['max']:.5f}; at least "
                f"{LEAST} in {drawn['share_of_draws_at_least']:.0%}; share of draws below, by row of the prompts: {below or 'none'}"
            )


def _arguments() -> argparse.Namespace:
    parser = machine.arguments(__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--recipe", required=True, help="name or file: its fp8_harm is what FP8 is held to")
    parser.add_argument("--contract", type=Path, help="of an FP8 engine of the checkpoint: what it keeps is not measured again")
    parser.add_argument("--prompts", type=Path, default=Path("tests/data/held_out.jsonl"))
    parser.add_argument("--fixed", action="store_true", help="FP8 with calibrated scales of inputs, too: plain operations, slow")
    parser.add_argument("--draws", type=int, default=0, help="runs of each precision with other rounding errors; half a CPU minute each")
    return parser.parse_args()


if __name__ == "__main__":
    main()
