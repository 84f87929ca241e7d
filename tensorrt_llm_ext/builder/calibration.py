"""Calibration: the FP8 scales of a checkpoint, and the products that stay out of FP8, from its float32 layers run on text.

One scale serves every token of a linear's input: its largest value over the text. What rounding by these scales does to the
states at the end is then measured product by product on a part of the text (``harms``), and the worst are kept in bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from tensorrt_llm_ext.builder.harms import Harm, product_harms, products_to_keep, total
from tensorrt_llm_ext.builder.layerwise import layer_states
from tensorrt_llm_ext.builder.parts import Progress
from tensorrt_llm_ext.checkpoint.layout import PRODUCTS, product_linears
from tensorrt_llm_ext.checkpoint.protocol import Checkpoint, Fp8Scales
from tensorrt_llm_ext.errors import BuildError, InputError, Refusal
from tensorrt_llm_ext.fingerprint import canonical_json, fingerprint, token_hash
from tensorrt_llm_ext.graph.fp8 import FP8_MAX, scale_of
from tensorrt_llm_ext.graph.quantisation import Fp8Linears, LinearScales
from tensorrt_llm_ext.inputs import Fields, open_input
from tensorrt_llm_ext.inputs.fields import text_of_row
from tensorrt_llm_ext.recipes import BuildSettings

DEMO_PROMPTS = Path(__file__).parents[2] / "demo" / "prompts.jsonl"
SCALES_FILE = "scales.safetensors"

MEASURED_TOKENS, MEASURED_LENGTH = 1024, 16
"""Of the text, for the harms: each layer runs on them once for every product below it. Of many sequences, the first tokens
alone: a state early in a sequence leans on few tokens and is the more easily moved."""

_NAME_TEXT = "name a file of prompts like those that will be run: --calibration prompts.jsonl"
_GOLDEN_RATIO = 0.6180339887498949


@dataclass(frozen=True)
class Calibration:
    """Scales of every linear up to the highest tap, the products that are kept, and what was measured."""

    linears: Fp8Linears
    kept: tuple[str, ...]  # products, as the recipe names them
    most: float | None  # that the others may harm; None where the recipe names the products
    num_sequences: int
    num_tokens: int
    num_measured: int  # tokens that the harms were measured on
    fingerprint: str  # of the text and the rule
    harms: dict[str, Harm] = field(default_factory=dict)  # by product

    def write(self, folder: Path) -> None:
        """Write scales.safetensors, with the calibration's fingerprint and the products that were kept."""
        tensors = {}
        for name, scales in sorted(self.linears.scales.items()):
            tensors[f"{name}.activation_scale"] = np.array([scales.activation], np.float32)
            tensors[f"{name}.weight_scale"] = np.ascontiguousarray(scales.weight, np.float32)
        described = canonical_json({"fingerprint": self.fingerprint, "kept": list(self.kept)})
        save_file(tensors, folder / SCALES_FILE, {"calibration": described})  # one key: the order of several varies

    def facts(self, checkpoint: Checkpoint) -> dict:
        """What was chosen and what it costs, for the contract."""
        facts = {
            "fingerprint": self.fingerprint,
            "sequences": self.num_sequences,
            "tokens": self.num_tokens,
            "fp8_linears": len(self.linears.scales),
            "kept_products": list(self.kept),
            "bytes_for_kept_products": sum(_num_weights(checkpoint, product) for product in self.kept),
        }
        if self.most is None:
            return facts
        return facts | {
            "kept_products": {product: self.harms[product].mean for product in self.kept},
            "measured_tokens": self.num_measured,
            "harm_of_all_products": total(self.harms, self.harms),
            "harm_allowed": self.most,
            "harm_of_fp8": total(self.harms, self.harms.keys() - set(self.kept)),
        }


def calibrate(
    checkpoint: Checkpoint,
    text: Path | str | None,
    *,
    num_layers: int,
    most: float | None,
    kept: Sequence[str] = (),
    progress: Progress = lambda step, done, total: None,
) -> Calibration:
    """Run the text (default: the demo's prompts) through the first ``num_layers`` layers, and choose scales.

    What FP8 harms is measured, and products kept until the others harm at most ``most``; where that is None, the products
    ``kept`` are kept, whatever they harm. Raises InputError for text that cannot be read or holds no prompt, BuildError
    for an input of a linear that is all zeros or not finite.
    """
    sequences = _sequences(checkpoint, text)
    largest: dict[str, float] = {}

    def observe(name: str, value: float) -> None:
        largest[name] = value if math.isnan(value) else max(largest.get(name, 0.0), value)

    for layer, _, _ in layer_states(checkpoint, sequences, last_layer=num_layers, observe=observe):
        progress("calibration", layer, num_layers)
    scales = {name: _scales(checkpoint, name, size) for name, size in largest.items()}
    harms, measured = {}, []
    if most is not None:
        measured = measured_part(sequences)
        harms = product_harms(
            checkpoint, measured, scales, num_layers=num_layers, progress=partial(progress, "harm of FP8")
        )
        kept = products_to_keep(harms, {product: _num_weights(checkpoint, product) for product in harms}, most)
    kept = [product for product in _products(num_layers) if product in kept]
    kept_linears = frozenset(name for product in kept for name in product_linears(product))
    identity = {
        "rule": {"most": most, "tokens": MEASURED_TOKENS, "length": MEASURED_LENGTH} if most is not None else {"kept": kept},
        "text": [token_hash(sequence) for sequence in sequences],
    }
    return Calibration(
        linears=Fp8Linears({name: scale for name, scale in scales.items() if name not in kept_linears}, kept_linears),
        kept=tuple(kept),
        most=most,
        num_sequences=len(sequences),
        num_tokens=sum(map(len, sequences)),
        num_measured=sum(map(len, measured)),
        fingerprint=fingerprint(identity),
        harms=harms,
    )


def calibrated(
    checkpoint: Checkpoint, settings: BuildSettings, text: Path | str | None, progress: Progress
) -> Calibration | None:
    """Calibrate for an engine of fp8 as its settings say; None for any other."""
    if settings.precision != "fp8":
        return None
    num_layers = max(tap.layer for tap in settings.taps)
    kept = settings.fp8_kept or ()
    if is_quantised(checkpoint):
        return stored_calibration(checkpoint, text, num_layers=num_layers, kept=kept)
    return calibrate(checkpoint, text, num_layers=num_layers, most=settings.fp8_harm, kept=kept, progress=progress)


def is_quantised(checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint brings scales: then these are used, and nothing is measured."""
    names = (name for product in _products(checkpoint.architecture.num_layers) for name in product_linears(product))
    return any(checkpoint.fp8_scales(name) is not None for name in names)


def stored_calibration(
    checkpoint: Checkpoint, text: Path | str | None, *, num_layers: int, kept: Sequence[str] = ()
) -> Calibration:
    """Read the scales of a checkpoint that was quantised by others; linears that it stores in another type are kept.

    They are rounded to bfloat16, the type that a plan has them in: an input's upwards, so that nothing is cut. Raises
    BuildError for a linear in FP8 without a scale of its input, InputError for text that nothing would use.
    """
    kept_linears = {name for product in kept for name in product_linears(product)}
    stored = stored_scales(checkpoint, text, num_layers=num_layers)
    scales = {name: _rounded_scales(name, found) for name, found in stored.items() if name not in kept_linears}
    every = {name for product in _products(num_layers) for name in product_linears(product)}
    return Calibration(
        linears=Fp8Linears(scales, frozenset(every - scales.keys())),
        kept=tuple(product for product in _products(num_layers) if not scales.keys() & set(product_linears(product))),
        most=None,
        num_sequences=0,
        num_tokens=0,
        num_measured=0,
        fingerprint=fingerprint({name: [found.activation, found.weight.tolist()] for name, found in scales.items()}),
    )


def stored_scales(checkpoint: Checkpoint, text: Path | str | None, *, num_layers: int) -> dict[str, Fp8Scales]:
    """Read the scales of every linear of the first layers that the checkpoint stores in FP8; empty where it stores none.

    Raises InputError for text that nothing would use.
    """
    linears = [name for product in _products(num_layers) for name in product_linears(product)]
    stored = {name: scales for name in linears if (scales := checkpoint.fp8_scales(name)) is not None}
    if stored and text is not None:
        raise InputError(
            f"a calibration is given, and '{checkpoint.name}' brings its own FP8 scales",
            expected="no calibration: scales that are there are used as they are",
            found=f"'{text}'",
            fix="leave the calibration out, or build from the checkpoint that was quantised",
        )
    return stored


def _rounded_scales(name: str, stored: Fp8Scales) -> LinearScales:
    if stored.activation is None:
        raise BuildError(
            f"the checkpoint has no scale for the input of '{name}'",
            expected=f"'{name}.input_scale': this backend needs scales that are fixed",
            found="a weight in FP8 and no such tensor",
            fix="quantise with static activation scales, or build with --precision bfloat16",
        )
    weight = stored.weight.astype(ml_dtypes.bfloat16).astype(np.float32)
    return LinearScales(float(scale_of(stored.activation * FP8_MAX)), weight)


def measured_part(sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
    """At most MEASURED_TOKENS tokens, from everywhere in the list: the first MEASURED_LENGTH of a sequence."""
    order = np.argsort(np.arange(len(sequences)) * _GOLDEN_RATIO % 1, kind="stable")
    return [sequences[index][:MEASURED_LENGTH] for index in order[: MEASURED_TOKENS // MEASURED_LENGTH]]


def _sequences(checkpoint: Checkpoint, path: Path | str | None) -> list[np.ndarray]:
    """Token ids of every prompt, as the tokenizer gives them with its special tokens."""
    if path is None and not DEMO_PROMPTS.exists():
        raise InputError(
            "FP8 needs text to calibrate on, and the demo's prompts are not installed",
            expected="a file of prompts like those that will be run",
            found="none",
            fix="name one: --calibration prompts.jsonl",
        )
    fields = Fields(text="text")
    name = str(path or DEMO_PROMPTS)
    try:
        opened = open_input(name, fields)
        texts = [text_of_row(row, fields.text) for row in opened.rows()]
    except InputError as error:
        raise InputError(
            f"'{name}' cannot be calibrated on: {error.what}", expected=error.expected, found=error.found, fix=_NAME_TEXT
        ) from error
    except Refusal as refusal:
        raise InputError(
            f"'{name}' cannot be calibrated on: {refusal.what}",
            expected=refusal.expected,
            found=refusal.found,
            fix=refusal.fix,
        ) from refusal
    longest = checkpoint.architecture.max_positions
    sequences = [ids for ids in checkpoint.tokenizer().encode_batch(texts, special_tokens=True) if len(ids)]
    if not sequences or max(map(len, sequences)) > longest:
        raise InputError(
            f"'{opened.name}' cannot be calibrated on",
            expected=f"at least one prompt, and none of more than {longest} tokens",
            found=f"{max(map(len, sequences))} tokens in the longest" if sequences else "no prompt",
            fix=_NAME_TEXT,
        )
    return sequences


def _products(num_layers: int) -> list[str]:
    return [f"{layer}.{part}" for layer in range(num_layers) for part in PRODUCTS]


def _num_weights(checkpoint: Checkpoint, product: str) -> int:
    """Values of a product's weights: the bytes that it takes more in bfloat16 than in FP8."""
    return sum(math.prod(checkpoint.info(f"{name}.weight").shape) for name in product_linears(product))


def _scales(checkpoint: Checkpoint, name: str, largest: float) -> LinearScales:
    if not math.isfinite(largest) or largest == 0:
        raise BuildError(
            f"the input of '{name}' gives no FP8 scale",
            expected="finite numbers, not all of them zero, on the text that was calibrated on",
            found=f"a largest value of {largest}",
            fix="check the checkpoint's weights, or calibrate on other text",
        )
    weight = checkpoint.tensor(f"{name}.weight").astype(np.float32, copy=False)  # [out, in]
    return LinearScales(float(scale_of(largest)), scale_of(np.abs(weight).max(axis=1)))
