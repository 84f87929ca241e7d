"""Which rows a tap gives out: the last token's, the mean over the sequence, or all."""

from __future__ import annotations

from collections.abc import Callable

from tensorrt_llm_ext.graph import names
from tensorrt_llm_ext.graph.operators import Graph


class RowGather:
    """Takes the rows of taps out of packed states ``[T, hidden]``; declares the inputs that this needs, once."""

    def __init__(self, g: Graph, attention_rows: str, rows: set[str]) -> None:
        self._g = g
        self._attention_rows = attention_rows
        self.kept_rows: str | None = None  # the packed rows that states still have; None: all
        if "last" in rows:
            self._last_rows = _last_rows(g)
        if "mean" in rows:
            self._lengths, self._is_token = _mean_mask(g, attention_rows)

    def keep_last(self) -> None:
        """From here on states have the last tokens' rows only, ``[B, hidden]``, and only ``last`` can be taken."""
        self.kept_rows = self._last_rows

    def take(self, x: str, rows: str, norm: Callable[[str], str]) -> str:
        """The rows of ``x``, normed. ``last`` gathers first and norms B rows; ``mean`` norms first, being a mean of states."""
        if rows == "last":
            return norm(x if self.kept_rows else self._g.gather(x, self._last_rows))  # [B, hidden]
        if rows == "mean":
            return self._mean(norm(x))
        return norm(x)

    def _mean(self, x: str) -> str:
        """Mean over each sequence's tokens in float32, ``[B, hidden]``.

        Padded slots are replaced, not multiplied by 0: a NaN times 0 is NaN.
        """
        g = self._g
        states = g.cast(g.gather(x, self._attention_rows), "float32")  # [B, S, hidden]
        states = g.where(self._is_token, states, g.constant(0.0, "float32"))
        return g.divide(g.sum(states, axis=1), self._lengths)


def _last_rows(g: Graph) -> str:
    """Packed row of each sequence's last token: the inclusive prefix sum of the lengths, minus one."""
    return g.subtract(g.input(names.LAST_TOKEN_IDS, "int32", ("B",)), g.constant(1, "int32"))


def _mean_mask(g: Graph, attention_rows: str) -> tuple[str, str]:
    """Lengths as float32 ``[B, 1]``, and which slots hold a token, ``[B, S, 1]``."""
    lengths = g.unsqueeze(g.input(names.SEQUENCE_LENGTHS, "int32", ("B",)), 1)  # [B, 1]
    slots = g.count(g.size(attention_rows, axis=1))  # [S]
    is_token = g.less(slots, g.cast(lengths, "int64"))  # [B, S]
    return g.cast(lengths, "float32"), g.unsqueeze(is_token, 2)
