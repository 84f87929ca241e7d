"""Taps: which hidden state is taken out of the model.

A tap is a triple, and the triple is what fingerprints and comparisons use:

* ``layer``: the residual stream after k decoder layers; 0 is the embedding, n (the number of layers) the last.
  This is Hugging Face's ``hidden_states[k]`` for k < n.
* ``norm``: ``pre`` or ``post`` the model's final norm. ``post`` exists only for layer n.
* ``rows``: ``last`` (the last token's row), ``mean`` (over the sequence's tokens, in float32) or ``all``.

Text is only a spelling: ``final@last`` is (n, post, last), ``final:pre@all`` is (n, pre, all), ``layer:16@mean`` is
(16, pre, mean). ``layer:n`` is refused, because Hugging Face's ``hidden_states[n]`` is the *post*-norm state and the
spelling could mean either.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from tensorrt_llm_ext.errors import TapError

Norm = Literal["pre", "post"]
Rows = Literal["last", "mean", "all"]

EAGLE3 = "eagle3"
DEFAULT_TAPS = "final@last"

_SPELLING = re.compile(r"^(?:final(?P<pre>:pre)?|layer:(?P<layer>\d+))@(?P<rows>\w+)$")


@dataclass(frozen=True, order=True)
class Tap:
    """One place where a hidden state is taken out: layer, norm point, rows."""

    layer: int
    norm: Norm
    rows: Rows

    def column(self, num_layers: int) -> str:
        """Name the column or tensor of this tap: ``final_post_last``, ``final_pre_all``, ``layer_016_pre_mean``."""
        place = "final" if self.layer == num_layers else f"layer_{self.layer:03d}"
        return f"{place}_{self.norm}_{self.rows}"

    def spelling(self, num_layers: int) -> str:
        """Spell this tap as a user writes it: ``final@last``, ``final:pre@all``, ``layer:16@mean``."""
        if self.layer != num_layers:
            return f"layer:{self.layer}@{self.rows}"
        return f"final{':pre' if self.norm == 'pre' else ''}@{self.rows}"

    def to_dict(self) -> dict[str, int | str]:
        return {"layer": self.layer, "norm": self.norm, "rows": self.rows}

    @classmethod
    def from_dict(cls, value: dict) -> Tap:
        return cls(layer=int(value["layer"]), norm=value["norm"], rows=value["rows"])


def parse_taps(text: str, num_layers: int) -> tuple[Tap, ...]:
    """Read a comma-separated list of taps for a model of ``num_layers`` layers, in the order given.

    ``eagle3`` stands for layers 2, n//2, n-3 and ``final:pre``, rows ``all`` (the sets of vLLM and speculators;
    SGLang and TensorRT-LLM name the same tensors 1, n//2-1, n-4). Raises TapError for a spelling, a layer or a
    repetition that cannot be served.
    """
    taps: list[Tap] = []
    for spelling in (part.strip() for part in text.split(",")):
        for tap in _eagle3(num_layers) if spelling == EAGLE3 else (_parse_tap(spelling, num_layers),):
            if tap in taps:
                raise TapError(
                    f"tap '{tap.spelling(num_layers)}' is named twice",
                    expected="each tap once",
                    found=text,
                    fix="remove the repetition",
                )
            taps.append(tap)
    return tuple(taps)


def _eagle3(num_layers: int) -> tuple[Tap, ...]:
    layers = (2, num_layers // 2, num_layers - 3)
    if not 0 < layers[0] < layers[1] < layers[2]:
        raise TapError(
            "the eagle3 preset needs three different layers: 2, n//2 and n-3",
            expected="a model of at least 7 layers",
            found=f"{num_layers} layers",
            fix="name the layers, for example 'layer:1@all,layer:2@all,final:pre@all'",
        )
    return (*(Tap(layer, "pre", "all") for layer in layers), Tap(num_layers, "pre", "all"))


def _parse_tap(spelling: str, num_layers: int) -> Tap:
    match = _SPELLING.match(spelling)
    if match is None or match["rows"] not in get_args(Rows):
        raise TapError(
            f"'{spelling}' is not a tap",
            expected=f"final@ROWS, final:pre@ROWS or layer:K@ROWS, with ROWS one of {', '.join(get_args(Rows))}; or {EAGLE3}",
            found=repr(spelling),
            fix="write for example --taps 'final@last,layer:16@mean'",
        )
    if match["layer"] is None:
        return Tap(num_layers, "pre" if match["pre"] else "post", match["rows"])
    layer = int(match["layer"])
    if layer == num_layers:
        raise TapError(
            f"'{spelling}' names the last layer, where the state before and after the final norm differ",
            expected=f"layer:0 to layer:{num_layers - 1}, or final, or final:pre",
            found=spelling,
            fix=f"write 'final@{match['rows']}' (after the norm, as Hugging Face's hidden_states[-1]) "
            f"or 'final:pre@{match['rows']}' (before it)",
        )
    if layer > num_layers:
        raise TapError(
            f"'{spelling}' names a layer that the model does not have",
            expected=f"layer:0 to layer:{num_layers - 1} for a model of {num_layers} layers",
            found=spelling,
            fix="name an existing layer, or 'final'",
        )
    return Tap(layer, "pre", match["rows"])
