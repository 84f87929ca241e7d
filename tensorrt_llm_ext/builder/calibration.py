"""Calibration: the FP8 scales of a checkpoint, from its float32 layers run on text.

One scale serves every token of a linear's input. Where a few tokens have values far larger than the rest, the others lie
at the bottom of FP8's range, where its numbers are evenly spaced and rounding no longer shrinks with the value. So the
loss is measured for the token that loses most, and a linear that loses too much keeps its precision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tensorrt_llm_ext.builder.layerwise import layer_states
from tensorrt_llm_ext.builder.parts import Progress
from tensorrt_llm_ext.checkpoint.protocol import Checkpoint
from tensorrt_llm_ext.errors import BuildError, InputError, Refusal
from tensorrt_llm_ext.fingerprint import canonical_json, fingerprint, token_hash
from tensorrt_llm_ext.graph.fp8 import scale_of
from tensorrt_llm_ext.graph.quantisation import Fp8Linears, LinearScales
from tensorrt_llm_ext.inputs import Fields, open_input
from tensorrt_llm_ext.inputs.fields import text_of_row
from tensorrt_llm_ext.recipes import BuildSettings

DEMO_PROMPTS = Path(__file__).parents[2] / "demo" / "prompts.jsonl"
SCALES_FILE = "scales.safetensors"

_STEP = 2.0**-9 / 12**0.5  # root mean square of rounding to FP8's smallest numbers, by a scale of 1
MAX_LOSS = 0.025
"""The most that this rounding may change a token's input of a linear, relative to the input's root mean square: as much as
FP8's three bits of mantissa change any number. Measured on SmolLM2: one linear of 210 lies above, the next at a tenth. This rule alone does not suffice there (50 unseen
prompts: cosine of ``final@last`` 0.995 in the mean, 0.924 at least): its recipe keeps more."""


_PARTS = {"q": "qkv", "k": "qkv", "v": "qkv", "o": "o", "gate": "gate_up", "up": "gate_up", "down": "down"}


@dataclass(frozen=True)
class Calibration:
    """Scales of every linear up to the highest tap, and what they were measured on."""

    linears: Fp8Linears
    losses: dict[str, float]  # by linear: the largest relative loss of any token
    num_sequences: int
    num_tokens: int
    fingerprint: str  # of the text and the rule

    def write(self, folder: Path) -> None:
        """Write scales.safetensors, with the calibration's fingerprint and the linears that were kept."""
        tensors = {}
        for name, scales in sorted(self.linears.scales.items()):
            tensors[f"{name}.activation_scale"] = np.array([scales.activation], np.float32)
            tensors[f"{name}.weight_scale"] = np.ascontiguousarray(scales.weight, np.float32)
        kept = {name: self.losses[name] for name in sorted(self.linears.kept)}
        described = canonical_json({"fingerprint": self.fingerprint, "kept": kept})
        save_file(tensors, folder / SCALES_FILE, {"calibration": described})  # one key: the order of several varies

    def facts(self, checkpoint: Checkpoint) -> dict:
        """What was chosen and what it costs, for the contract."""
        kept = sorted(self.linears.kept)
        return {
            "fingerprint": self.fingerprint,
            "sequences": self.num_sequences,
            "tokens": self.num_tokens,
            "max_loss": MAX_LOSS,
            "fp8_linears": len(self.linears.scales),
            "kept_linears": {name: round(self.losses[name], 4) for name in kept},
            "bytes_for_kept_linears": sum(int(np.prod(checkpoint.info(f"{name}.weight").shape)) for name in kept),
        }


def calibrate(
    checkpoint: Checkpoint,
    text: Path | str | None,
    *,
    num_layers: int,
    kept_products: tuple[str, ...] = (),
    progress: Callable[[int, int], None],
) -> Calibration:
    """Run the text (default: the demo's prompts) through the first ``num_layers`` layers, and choose scales.

    ``kept_products`` are the recipe's (``11.down``): their linears are kept whatever is measured.
    Raises InputError for text that cannot be read or holds no prompt, BuildError for an input of a linear that is all
    zeros or not finite. ``progress`` hears of layers.
    """
    sequences = _sequences(checkpoint, text)
    sizes: dict[str, list[np.ndarray]] = {}  # by linear: [tokens, 2], largest and root mean square

    def observe(name: str, values: np.ndarray) -> None:
        sizes.setdefault(name, []).append(values)

    for layer, _, _ in layer_states(checkpoint, sequences, last_layer=num_layers, observe=observe):
        progress(layer, num_layers)
    largest, losses = {}, {}
    for name, parts in sizes.items():
        largest[name], losses[name] = _measured(name, np.concatenate(parts))
    kept = frozenset(name for name, loss in losses.items() if loss > MAX_LOSS or _product(name) in kept_products)
    identity = {"rule": {"max_loss": MAX_LOSS}, "text": [token_hash(sequence) for sequence in sequences]}
    return Calibration(
        linears=Fp8Linears({name: _scales(checkpoint, name, largest[name]) for name in largest if name not in kept}, kept),
        losses=losses,
        num_sequences=len(sequences),
        num_tokens=sum(map(len, sequences)),
        fingerprint=fingerprint(identity),
    )


def write_scales(
    checkpoint: Checkpoint, folder: Path, settings: BuildSettings, text: Path | str | None, progress: Progress
) -> tuple[Fp8Linears | None, dict]:
    """For an engine of fp8: calibrate, write scales.safetensors into ``folder``, return the scales and facts of the build."""
    if settings.precision != "fp8":
        return None, {}
    num_layers = max(tap.layer for tap in settings.taps)
    calibration = calibrate(
        checkpoint,
        text,
        num_layers=num_layers,
        kept_products=settings.fp8_kept,
        progress=partial(progress, "calibration"),
    )
    calibration.write(folder)
    return calibration.linears, {"calibration": calibration.facts(checkpoint)}


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
    opened = open_input(str(path or DEMO_PROMPTS), fields)
    try:
        texts = [text_of_row(row, fields.text) for row in opened.rows()]
    except Refusal as refusal:
        raise InputError(
            f"'{opened.name}' cannot be calibrated on: {refusal.what}",
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
            fix="name a file of prompts like those that will be run: --calibration prompts.jsonl",
        )
    return sequences


def _product(linear: str) -> str:
    """The recipe's name of the product that a linear is part of: ``11.down`` for ``model.layers.11.mlp.down_proj``."""
    _, _, layer, _, name = linear.split(".")
    return f"{layer}.{_PARTS[name.removesuffix('_proj')]}"


def _measured(name: str, sizes: np.ndarray) -> tuple[float, float]:
    """The largest value of any token, and the relative loss of the token that loses most."""
    largest, smallest = float(sizes[:, 0].max()), float(sizes[:, 1].min())
    if not np.isfinite(largest) or smallest == 0:
        raise BuildError(
            f"the input of '{name}' gives no FP8 scale",
            expected="finite numbers, not all of them zero, for each token that was calibrated on",
            found=f"a largest value of {largest}, and a token of size {smallest}",
            fix="check the checkpoint's weights, or calibrate on other text",
        )
    return largest, float(scale_of(largest)) * _STEP / smallest


def _scales(checkpoint: Checkpoint, name: str, largest: float) -> LinearScales:
    weight = checkpoint.tensor(f"{name}.weight").astype(np.float32, copy=False)  # [out, in]
    return LinearScales(float(scale_of(largest)), scale_of(np.abs(weight).max(axis=1)))
