"""How near backend torch stays to float32 on a card, on real prompts: bfloat16, FP8, and FP8 with some products kept.

    python tests/bench/torch_fidelity.py CHECKPOINT [--rank demo/prompts.jsonl] [--prompts tests/data/held_out.jsonl]

Reference: the plain operations in float32, on the same card. Every product is put into FP8 alone and its harm on the prompts
of ``--rank`` measured; then the worst are kept in bfloat16, and the rest is measured on ``--prompts``, which are others.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path

import numpy as np
import torch

from tensorrt_llm_ext.backends.torch import kernels, plain
from tensorrt_llm_ext.backends.torch.decoder import Batch, Decoder, forward
from tensorrt_llm_ext.backends.torch.loading import _linear, load_decoder
from tensorrt_llm_ext.backends.torch.weight_index import WeightIndex
from tensorrt_llm_ext.backends.torch.workspace import make_workspace
from tensorrt_llm_ext.builder.torch_engine import _written
from tensorrt_llm_ext.checkpoint import open_checkpoint
from tensorrt_llm_ext.checkpoint.layout import PRODUCTS, decoder_shapes
from tensorrt_llm_ext.recipes.contract import Limits
from tensorrt_llm_ext.taps import Tap, parse_taps

LIMITS = Limits(max_num_tokens=16384, max_batch_size=1024, max_seq_len=2048, max_padded_tokens=1 << 40)
MAX_HARM_WEIGHT = 0.1  # of the worst prompt beside the mean over prompts, in the order of the products
CARD = torch.device("cuda")


class Prompts:
    """Prompts as one packed batch, and the float32 states of every tap."""

    def __init__(self, path: Path, tokenizer, taps: tuple[Tap, ...], exact: Decoder, architecture) -> None:
        texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
        sequences = tokenizer.encode_batch(texts, special_tokens=True)
        while sum(map(len, sequences)) > LIMITS.max_num_tokens:
            sequences.pop()
        lengths = torch.tensor([len(ids) for ids in sequences], dtype=torch.int32, device=CARD)
        self.num_prompts, self.num_tokens = len(sequences), int(lengths.sum())
        self._inputs = (torch.from_numpy(np.concatenate(sequences)).to(CARD), lengths, lengths.cumsum(0, dtype=torch.int32))
        self._hidden_size = architecture.hidden_size
        self._right = self.states(plain, exact, make_workspace(architecture, LIMITS, torch.float32, CARD), taps)

    def states(self, operations, decoder: Decoder, space, taps: tuple[Tap, ...]) -> dict[Tap, torch.Tensor]:
        rows = {"all": self.num_tokens, "last": self.num_prompts, "mean": self.num_prompts}
        outputs = {tap: torch.empty(rows[tap.rows], self._hidden_size, device=CARD) for tap in taps}
        forward(operations, decoder, space, Batch(*self._inputs, outputs))
        return outputs

    def cosines(self, decoder: Decoder, space, taps: tuple[Tap, ...]) -> dict[Tap, torch.Tensor]:
        found = self.states(kernels, decoder, space, taps)
        return {tap: torch.nn.functional.cosine_similarity(found[tap], self._right[tap], dim=-1) for tap in taps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--rank", type=Path, default=Path("demo/prompts.jsonl"))
    parser.add_argument("--prompts", type=Path, default=Path("tests/data/held_out.jsonl"))
    parser.add_argument("--step", type=int, default=8, help="products kept more from line to line")
    arguments = parser.parse_args()
    with open_checkpoint(arguments.checkpoint) as checkpoint, torch.inference_mode():
        a = checkpoint.architecture
        taps = parse_taps(f"final@last,final@mean,final@all,layer:{a.num_layers // 2}@last,layer:{a.num_layers // 2}@all", a.num_layers)
        exact, rounded = _loaded(checkpoint)
        space = make_workspace(a, LIMITS, torch.bfloat16, CARD)
        prompts, ranking = (
            Prompts(path, checkpoint.tokenizer(), taps, exact, a) for path in (arguments.prompts, arguments.rank)
        )
        fp8 = {
            (layer, part): _linear([getattr(weights, part).weight], getattr(weights, part).bias, True)
            for layer, weights in enumerate(exact.layers)
            for part in PRODUCTS
        }
        order = _by_harm(rounded, fp8, ranking, space, taps[0])
        print(f"{prompts.num_prompts} prompts, {prompts.num_tokens} tokens; cosine with float32, mean and minimum of rows")
        print("most harmful first:", ",".join(f"{layer}.{part}" for layer, part in order))
        _print("bfloat16", prompts.cosines(rounded, space, taps), a.num_layers)
        for count in range(0, len(order) + 1, arguments.step):
            decoder = _mixed(rounded, fp8, kept=set(order[:count]))
            _print(f"fp8, {count} of {len(order)} kept", prompts.cosines(decoder, space, taps), a.num_layers)


def _loaded(checkpoint) -> tuple[Decoder, Decoder]:
    """The decoder in float32 and in bfloat16."""
    a = checkpoint.architecture
    with tempfile.TemporaryDirectory() as folder:
        infos = [checkpoint.info(name) for name in decoder_shapes(a)]
        index = WeightIndex(_written(checkpoint, Path(folder), infos, "float32", lambda done, total: None))
        shape = dict(num_layers=a.num_layers, max_seq_len=LIMITS.max_seq_len, is_fp8=False, device=CARD)
        return tuple(load_decoder(Path(folder), index, a, dtype=dtype, **shape) for dtype in (torch.float32, torch.bfloat16))


def _mixed(rounded: Decoder, fp8: dict, kept: set) -> Decoder:
    def layer(number: int, weights):
        replaced = {part: fp8[number, part] for part in PRODUCTS if (number, part) not in kept}
        return dataclasses.replace(weights, **replaced)

    return dataclasses.replace(rounded, layers=tuple(layer(*item) for item in enumerate(rounded.layers)))


def _by_harm(rounded: Decoder, fp8: dict, prompts: Prompts, space, tap: Tap) -> list[tuple[int, str]]:
    harm = {}
    for product in fp8:
        away = 1 - prompts.cosines(_mixed(rounded, fp8, kept=set(fp8) - {product}), space, (tap,))[tap]
        harm[product] = away.mean().item() + MAX_HARM_WEIGHT * away.max().item()
    return sorted(fp8, key=lambda product: -harm[product])


def _print(name: str, cosines: dict[Tap, torch.Tensor], num_layers: int) -> None:
    found = (f"{tap.spelling(num_layers)} {c.mean():.5f} {c.min():.5f}" for tap, c in cosines.items())
    print(f"{name:24}", " | ".join(found))


if __name__ == "__main__":
    main()
