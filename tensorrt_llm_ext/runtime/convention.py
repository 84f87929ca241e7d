"""Measure, by causality, which row an engine reads for every output; a convention is never believed.

``last_token_ids`` is one integer per sequence, and a wrong guess ruins a dataset quietly: every vector is that of a
neighbouring token. So one token is changed at a time, and the row read for an output is the last token of its sequence
whose change moves it. An interior value v is fed that is in range under both conventions: ``v - row`` is 1 under
``prefix_sum`` (1-based, the graph subtracts one) and 0 under ``index``.

Differences are taken per value, relative to its magnitude but at least the row's mean magnitude: a few values of a
row may be a thousand times the others (massive activations) and would hide every change in a common scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from tensorrt_llm_ext.errors import ConventionError
from tensorrt_llm_ext.recipes.contract import Contract, Convention
from tensorrt_llm_ext.taps import Tap

Gather = np.ndarray | Convention
"""What a batch is given as ``last_token_ids``: values (int32 [B]), or those that a convention makes."""

Run = Callable[[Sequence[np.ndarray], Gather], dict[str, np.ndarray]]
"""Runs one batch of sequences (int32) with these gather values; every output by name."""

LENGTHS = (4, 1, 5, 3, 4)
"""Tokens of the measured sequences. The first and last are guards: an engine that reads one row off still reads a row
of this batch. The lengths differ so that a constant distance from the end is not a constant distance from v."""

NUM_NOISE_RUNS = 3

CHANGE, REST = 16.0, 3.0
"""A change exceeds the noise floor this many times, a non-change stays within this many; between the two refuses.

The floor is the largest of two differences, and a non-change is the largest of dozens: of the same noise, the second
comes out up to twice the first, hence 3. An engine that repeats itself exactly has the dtype's eps as its floor.
"""


@dataclass(frozen=True)
class OutputEvidence:
    """What was measured of one output. Differences are relative, as the module says."""

    output: str
    tap: Tap
    convention: Convention
    fed: tuple[int, ...]  # the values v, one per measured sequence; empty for outputs without a gather
    rows_read: tuple[int, ...]  # the packed row read for each
    noise: float  # the largest difference over runs of one batch
    floor: float  # max(noise, eps of the dtype)
    smallest_change: float  # of the tokens that must move the output
    largest_rest: float  # of the tokens that must not


@dataclass(frozen=True)
class ConventionEvidence:
    """The gather convention of an engine, and why it is believed."""

    convention: Convention
    outputs: tuple[OutputEvidence, ...]
    num_runs: int


def measure_convention(run: Run, contract: Contract, lengths: Sequence[int] = LENGTHS) -> ConventionEvidence:
    """Measure the row that is read, for every tapped output of an engine.

    Raises ConventionError when the answer cannot be trusted: rows mixed between sequences, not causal, neither
    convention, not repeatable, ambiguous, or outputs that are zero, constant or not finite.
    """
    _check_limits(contract, lengths)
    batch = _MeasuredBatch(run, contract, lengths)
    gathers = any(tap.rows == "last" for tap in contract.taps)
    measured = batch.change_each(range(batch.num_tokens), batch.interior if gathers else "none")
    outputs = tuple(_OF_ROWS[tap.rows](batch, measured[_name(contract, tap)], tap) for tap in contract.taps)
    convention = _one_convention(outputs)
    if gathers:
        confirmed = batch.change_each(batch.offsets[1:] - 1, convention)
        for output in outputs:
            if output.tap.rows == "last":
                _confirm(batch, confirmed[output.output], convention)
    return ConventionEvidence(convention, outputs, batch.num_runs)


@dataclass(frozen=True)
class _Moves:
    """How far each row of one output moves (relative) when one token changes, and what counts as noise."""

    output: str
    moves: np.ndarray  # float64 [rows, changed tokens]
    noise: float
    floor: float

    def is_change(self) -> np.ndarray:
        return self.moves >= CHANGE * self.floor

    def is_rest(self) -> np.ndarray:
        return self.moves <= REST * self.floor


class _MeasuredBatch:
    """One batch of known sequences, run again and again with one token changed."""

    def __init__(self, run: Run, contract: Contract, lengths: Sequence[int]) -> None:
        self.offsets = np.cumsum([0, *lengths], dtype=np.int32)
        self.num_tokens = int(self.offsets[-1])
        self.spans = [range(start, end) for start, end in zip(self.offsets[:-1].tolist(), self.offsets[1:].tolist())]
        self.interior = np.array([max(1, span.start + len(span) // 2) for span in self.spans], dtype=np.int32)
        self.num_runs = 0
        self._run = run
        # From the middle of the vocabulary, where ids are in use; the second half replaces the first.
        vocab_size = contract.architecture.vocab_size
        ids = np.linspace(vocab_size // 8, vocab_size * 5 // 8, 2 * self.num_tokens, endpoint=False).astype(np.int32)
        self._token_ids, self._replacements = ids[: self.num_tokens], ids[self.num_tokens :]
        self._eps = {t.name: float(ml_dtypes.finfo(t.dtype).eps) for t in contract.tensors if t.tap is not None}

    def change_each(self, tokens: Iterable[int], gather: Gather) -> dict[str, _Moves]:
        """Run the batch as it is, then once for each of ``tokens`` with that token replaced."""
        first, *again = [self._outputs(self._token_ids, gather) for _ in range(NUM_NOISE_RUNS)]
        changed = []
        for token in tokens:
            token_ids = self._token_ids.copy()
            token_ids[token] = self._replacements[token]
            changed.append(self._outputs(token_ids, gather))
        measured = {}
        for name, rows in first.items():
            noise = max(float(_differences(rows, other[name]).max()) for other in again)
            moves = np.stack([_differences(rows, other[name]) for other in changed], axis=1)
            measured[name] = _Moves(name, moves, noise, max(noise, self._eps[name]))
        return measured

    def _outputs(self, token_ids: np.ndarray, gather: Gather) -> dict[str, np.ndarray]:
        self.num_runs += 1
        outputs = self._run(np.split(token_ids, self.offsets[1:-1]), gather)
        rows_of = {name: outputs[name].astype(np.float64) for name in self._eps}
        for name, rows in rows_of.items():
            if not np.isfinite(rows).all():
                raise _refused(
                    f"output '{name}' is not finite", "finite values", f"{np.sum(~np.isfinite(rows))} NaN or Inf"
                )
            if zero := np.flatnonzero(~rows.any(axis=1)).tolist():
                raise _refused(f"output '{name}' has rows of zeros", "hidden states", f"zeros in rows {zero}")
        return rows_of


def _of_last(batch: _MeasuredBatch, measured: _Moves, tap: Tap) -> OutputEvidence:
    _check_repeatable(measured)
    many = {i: span for i, span in enumerate(batch.spans) if len(span) > 1}  # a single token has no interior
    _check_not_mixed(measured, many)
    read = {i: _row_read(span, measured, i) for i, span in many.items()}
    off = {i: int(batch.interior[i]) - row for i, row in read.items()}
    found = "; ".join(f"v = {batch.interior[i]} reads row {read[i]}" for i in many)
    expected = "v reads row v - 1 for every sequence (prefix_sum), or row v (index)"
    if len(set(off.values())) > 1 and min(off.values()) < 0:
        raise _refused(f"output '{measured.output}' moves with later tokens: the engine is not causal", expected, found)
    if len(set(off.values())) > 1:
        raise _refused(f"output '{measured.output}' does not read the row that last_token_ids names", expected, found)
    distance = min(off.values())
    if distance not in (0, 1):
        raise _refused(f"output '{measured.output}' reads a row under neither convention", expected, found)
    must = {i: [read[i]] for i in many}
    must_not = {i: [t for t in range(batch.num_tokens) if t not in batch.spans[i] or t > read[i]] for i in many}
    fed = tuple(int(batch.interior[i]) for i in many)
    convention: Convention = "prefix_sum" if distance == 1 else "index"
    return _evidence(measured, tap, convention, fed, tuple(read.values()), must, must_not)


def _of_all(batch: _MeasuredBatch, measured: _Moves, tap: Tap) -> OutputEvidence:
    _check_repeatable(measured)
    own = {row: span for span in batch.spans for row in span}
    _check_not_mixed(measured, own)
    read = {row: _row_read(span, measured, row) for row, span in own.items()}
    wrong = {row: last for row, last in read.items() if row != last}
    if wrong:
        later = any(last > row for row, last in wrong.items())
        raise _refused(
            f"output '{measured.output}' " + ("moves with later tokens" if later else "has rows of earlier tokens"),
            "row t moves with its own sequence's tokens up to t",
            "; ".join(f"row {row} moves last with token {last}" for row, last in wrong.items()),
        )
    must_not = {row: [t for t in range(batch.num_tokens) if t not in own[row] or t > row] for row in read}
    return _evidence(measured, tap, "none", (), tuple(read), {row: [row] for row in read}, must_not)


def _of_mean(batch: _MeasuredBatch, measured: _Moves, tap: Tap) -> OutputEvidence:
    _check_repeatable(measured)
    _check_not_mixed(measured, dict(enumerate(batch.spans)))
    is_change = measured.is_change()
    for i, span in enumerate(batch.spans):
        if missing := [token for token in span if not is_change[i, token]]:
            raise _refused(
                f"output '{measured.output}' is not a mean over its sequence",
                f"sequence {i} moves with tokens {span.start} to {span.stop - 1}",
                f"tokens {missing} move it by {_size(measured, measured.moves[i, missing].max())}",
            )
    must = {i: list(span) for i, span in enumerate(batch.spans)}
    must_not = {i: [t for t in range(batch.num_tokens) if t not in span] for i, span in enumerate(batch.spans)}
    return _evidence(measured, tap, "none", (), tuple(span.stop - 1 for span in batch.spans), must, must_not)


_OF_ROWS = {"last": _of_last, "all": _of_all, "mean": _of_mean}


def _confirm(batch: _MeasuredBatch, measured: _Moves, convention: Convention) -> None:
    """Check the real gather values, the length-1 sequence included: each output moves with its own last token alone."""
    own = np.eye(len(batch.spans), dtype=bool)
    is_wrong = np.where(own, ~measured.is_change(), ~measured.is_rest())
    if is_wrong.any():
        i, k = np.argwhere(is_wrong)[0]
        raise _refused(
            f"with the real gather values under {convention}, output '{measured.output}' does not read the last rows",
            f"sequence {i} moves with the last token of sequence {i} alone",
            f"the last token of sequence {k} moves it by {_size(measured, measured.moves[i, k])}",
        )


def _check_repeatable(measured: _Moves) -> None:
    """Check that the output stays as it is when nothing changes, and not when something does."""
    if CHANGE * measured.noise >= 1:  # a change would have to be larger than the rows themselves
        raise _refused(
            f"output '{measured.output}' is not repeatable",
            "the same numbers when one batch runs again",
            f"differences of {measured.noise:.3g} of the row over {NUM_NOISE_RUNS} runs",
        )
    if not measured.is_change().any():
        raise _refused(
            f"output '{measured.output}' is constant",
            "hidden states that move with their tokens",
            f"when a token changes, at most {_size(measured, measured.moves.max())}",
        )


def _check_not_mixed(measured: _Moves, own: dict[int, range]) -> None:
    """Check that each row moves with tokens of its own span alone."""
    for row, span in own.items():
        foreign = np.delete(np.arange(measured.moves.shape[1]), span)
        token = int(foreign[measured.moves[row, foreign].argmax()])
        if not measured.is_rest()[row, token]:
            is_clear = measured.is_change()[row, token]
            what = "mixes rows: it moves" if is_clear else "may mix rows: it moves, more than noise,"
            raise _refused(
                f"output '{measured.output}' {what} with a token of another sequence",
                f"row {row} moves with tokens {span.start} to {span.stop - 1} alone",
                f"token {token} moves it by {_size(measured, measured.moves[row, token])}",
            )


def _row_read(span: range, measured: _Moves, row: int) -> int:
    """The last token of ``span`` whose change moves the row; every later one must leave it clearly alone."""
    is_change, is_rest = measured.is_change()[row], measured.is_rest()[row]
    read = max((token for token in span if is_change[token]), default=None)
    if read is None or not is_rest[read + 1 : span.stop].all():
        raise _refused(
            f"the row that output '{measured.output}' reads for row {row} is ambiguous",
            f"one of tokens {span.start} to {span.stop - 1} moves it, and no later one does",
            "; ".join(f"token {token} by {measured.moves[row, token]:.3g}" for token in span)
            + f"; the largest {_size(measured, measured.moves[row, list(span)].max())}",
        )
    return read


def _evidence(
    measured: _Moves,
    tap: Tap,
    convention: Convention,
    fed: tuple[int, ...],
    rows_read: tuple[int, ...],
    must: dict[int, list[int]],
    must_not: dict[int, list[int]],
) -> OutputEvidence:
    return OutputEvidence(
        output=measured.output,
        tap=tap,
        convention=convention,
        fed=fed,
        rows_read=rows_read,
        noise=measured.noise,
        floor=measured.floor,
        smallest_change=min(float(measured.moves[row, tokens].min()) for row, tokens in must.items()),
        largest_rest=max(float(measured.moves[row, tokens].max()) for row, tokens in must_not.items()),
    )


def _one_convention(outputs: Sequence[OutputEvidence]) -> Convention:
    conventions = {output.convention for output in outputs if output.tap.rows == "last"}
    if len(conventions) > 1:
        found = "; ".join(f"{output.output}: {output.convention}" for output in outputs)
        raise _refused("two outputs read last_token_ids differently", "one convention for the engine", found)
    return conventions.pop() if conventions else "none"


def _differences(rows: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The largest relative difference of each row, as the module says. float64 [rows]."""
    magnitude = np.abs(rows)
    return (np.abs(other - rows) / np.maximum(magnitude, magnitude.mean(axis=1, keepdims=True))).max(axis=1)


def _check_limits(contract: Contract, lengths: Sequence[int]) -> None:
    needed = {
        "max_num_tokens": sum(lengths),
        "max_batch_size": len(lengths),
        "max_seq_len": max(lengths),
        "max_padded_tokens": len(lengths) * max(lengths),
    }
    given = {name: getattr(contract.limits, name) for name in needed}
    needed["vocab_size"], given["vocab_size"] = 16, contract.architecture.vocab_size
    if short := [name for name in needed if given[name] < needed[name]]:
        raise _refused(
            "the engine is too small for its gather convention to be measured",
            ", ".join(f"{name} at least {needed[name]}" for name in short),
            ", ".join(f"{name} {given[name]}" for name in short),
        )


def _name(contract: Contract, tap: Tap) -> str:
    return contract.output_of(tap).name


def _size(measured: _Moves, move: float) -> str:
    return f"{move:.3g} of the row (noise {measured.noise:.3g}, a change counts from {CHANGE * measured.floor:.3g})"


def _refused(what: str, expected: str, found: str) -> ConventionError:
    return ConventionError(
        what,
        expected=expected,
        found=found,
        fix="do not use this engine: every vector may be another token's; build it again with this release",
    )
