"""verify: an engine's hidden states against transformers in float32, tap by tap, prompt by prompt."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tensorrt_llm_ext.builder.canaries import make_canaries, rows_of
from tensorrt_llm_ext.checkpoint import Checkpoint
from tensorrt_llm_ext.checks.comparison import TapComparison, Tolerance, compare, tolerance_of
from tensorrt_llm_ext.checks.reference import next_tokens, reference_source, reference_states
from tensorrt_llm_ext.checks.rounding import SecondOpinion, second_opinions
from tensorrt_llm_ext.errors import CheckpointError, EngineError, VerificationFailed
from tensorrt_llm_ext.recipes import Contract, write_contract
from tensorrt_llm_ext.results.record import Failure, WorkItem
from tensorrt_llm_ext.runtime import Session
from tensorrt_llm_ext.taps import Tap

RowsByTap = dict[Tap, dict[str, np.ndarray]]
"""Rows by tap and request id."""


@dataclass(frozen=True)
class NextTokens:
    """The next token that the output head gives for our ``final@last`` and for the reference's."""

    num_prompts: int
    num_different: int
    first_different: str | None  # request id


@dataclass(frozen=True)
class Verification:
    """What was compared, and how far apart it lies. ``next_tokens`` is None where ``next_tokens_note`` says why."""

    source: str
    dtype: str
    tolerance: Tolerance
    num_prompts: int
    num_tokens: int
    taps: tuple[TapComparison, ...]
    second_opinions: tuple[SecondOpinion, ...]
    next_tokens: NextTokens | None
    next_tokens_note: str

    @property
    def has_passed(self) -> bool:
        """Whether no tap has a wrong row, and the next tokens are the same where that is demanded."""
        same = self.next_tokens is None or not self.next_tokens.num_different or not self.tolerance.same_next_token
        return same and bool(self.taps) and not any(map(self.num_wrong, self.taps)) and not self.too_far_in_the_mean()

    def num_wrong(self, tap: TapComparison) -> int:
        """How many rows of a tap lie beyond the tolerance, and not by float32's own rounding."""
        return tap.num_rows_beyond - sum(o.is_rounding for o in self.second_opinions if o.tap == tap.tap)

    def too_far_in_the_mean(self) -> list[TapComparison]:
        """The taps whose mean cosine is below what the tolerance allows."""
        return [tap for tap in self.taps if tap.mean_cosine < self.tolerance.min_mean_cosine]

    def to_dict(self) -> dict:
        """The result as JSON types, ``has_passed`` included; a number that JSON lacks (Inf, NaN) is its name."""
        opinions = [{**dataclasses.asdict(o), "is_rounding": o.is_rounding} for o in self.second_opinions]
        return _json_types({"has_passed": self.has_passed, **dataclasses.asdict(self), "second_opinions": opinions})

    def raise_if_failed(self) -> None:
        """Raise VerificationFailed, with the worst place of the worst tap, unless everything passed."""
        if self.has_passed:
            return
        beyond = [tap for tap in self.taps if self.num_wrong(tap)]
        if not beyond and (far := self.too_far_in_the_mean()):
            raise VerificationFailed(
                f"the engine's states lie too far from {self.source} in the mean, for {self.dtype}: "
                + ", ".join(tap.tap for tap in far),
                expected=f"a mean cosine of at least {self.tolerance.min_mean_cosine}",
                found=", ".join(f"{tap.mean_cosine:.6f}" for tap in far),
                fix="build again with more products in bfloat16: a smaller fp8_harm in the recipe",
            )
        if not beyond:
            raise VerificationFailed(
                "the states lie within the tolerance, but the output head gives another next token",
                expected=f"the same next token on all {self.next_tokens.num_prompts} prompts",
                found=f"{self.next_tokens.num_different} differ, the first is '{self.next_tokens.first_different}'",
                fix="do not use this engine's numbers; build it again",
            )
        worst = max(beyond, key=lambda tap: tap.nearest_to_limit.difference / tap.nearest_to_limit.limit)
        place, cosine = worst.nearest_to_limit, worst.smallest_cosine
        raise VerificationFailed(
            f"the engine's states lie beyond the tolerance for {self.dtype}: "
            + ", ".join(f"{tap.tap} ({self.num_wrong(tap)} of {tap.num_rows} rows)" for tap in beyond),
            expected=f"{worst.tap} within {place.limit:g} of {self.source}: {place.expected:g} at row {place.row}, column "
            f"{place.column} of request '{place.request_id}'; every cosine at least {self.tolerance.min_cosine}",
            found=f"{place.found:g}, {place.difference:g} away; smallest cosine {cosine.cosine:.9f}, row {cosine.row} of "
            f"request '{cosine.request_id}'",
            fix="do not use this engine's numbers; build it again",
        )


def verify(
    session: Session,
    checkpoint: Checkpoint,
    items: Sequence[WorkItem],
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Verification:
    """Compare the session's states with the reference on every item, for every tap of the engine.

    Layer by layer, so it works for a model larger than the machine; in memory are one layer, and the states of the
    items. ``progress`` hears how many layers are done. Raises CheckpointError for another checkpoint than the engine
    was built from, VerificationFailed when there is nothing to compare or a request did not come back; a result beyond
    tolerance is returned, not raised.
    """
    contract = session.contract
    source = reference_source()  # first: without the extra it says what to install
    refuse_foreign(contract, checkpoint)
    tolerance = tolerance_of(contract.activation_dtype)
    found = _found_rows(session, items)
    expected = _expected_rows(checkpoint, items, contract.taps, progress)
    num_layers = contract.architecture.num_layers
    taps = tuple(compare(tap, num_layers, expected[tap], found[tap], tolerance) for tap in contract.taps)
    tokens, note = _compared_next_tokens(checkpoint, expected, found)
    return Verification(
        source=source,
        dtype=contract.activation_dtype,
        tolerance=tolerance,
        num_prompts=len(items),
        num_tokens=sum(len(item.token_ids) for item in items),
        taps=taps,
        second_opinions=second_opinions(checkpoint, items, expected, found, tolerance),
        next_tokens=tokens,
        next_tokens_note=note,
    )


def update_canaries(
    engine_path: Path,
    contract: Contract,
    checkpoint: Checkpoint,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Contract:
    """Replace the engine's canaries by the reference's numbers, under the builder's rules; return the new contract.

    The engine's fingerprint stays: canaries prove an engine, they do not make it. Raises BuildError for a canary that
    could be confused, EngineError when the engine directory cannot be written to; the old contract then stays.
    """
    refuse_foreign(contract, checkpoint)
    canaries = make_canaries(
        checkpoint,
        contract.taps,
        contract.activation_dtype,
        progress,
        max_seq_len=contract.limits.max_seq_len,
        oracle=reference_states,
        source=reference_source(),
    )
    contract = dataclasses.replace(contract, canaries=canaries)
    try:
        write_contract(engine_path, contract)
    except OSError as error:
        raise EngineError(
            f"the contract of '{engine_path}' could not be replaced",
            expected="an engine directory that can be written to",
            found=error,
            fix="copy the engine to a folder of your own, and update its canaries there",
        ) from error
    return contract


def refuse_foreign(contract: Contract, checkpoint: Checkpoint) -> None:
    """Raise CheckpointError when the engine was not built from this checkpoint's weights and tokenizer."""
    built_from = contract.fingerprints
    for what, expected, found in (
        ("checkpoint", built_from.checkpoint, checkpoint.fingerprint()),
        ("tokenizer", built_from.tokenizer, checkpoint.tokenizer().fingerprint()),
    ):
        if expected != found:
            raise CheckpointError(
                f"'{checkpoint.path}' is not the {what} this engine was built from",
                expected=f"{what} {expected} ({contract.model_name})",
                found=f"{what} {found}",
                fix="name the checkpoint the engine was built from, or build an engine from this one",
            )


def _found_rows(session: Session, items: Sequence[WorkItem]) -> RowsByTap:
    found: RowsByTap = {tap: {} for tap in session.contract.taps}
    for answer in session.extract(items):
        if isinstance(answer, Failure):
            raise VerificationFailed(
                f"request '{answer.request_id}' did not come back from the engine",
                expected="finite rows",
                found=answer.reason,
                fix="do not use this engine's numbers; build it again",
            )
        for state in answer.states:
            found[state.tap][answer.request_id] = state.rows.astype(np.float32)
    return found


def _expected_rows(
    checkpoint: Checkpoint, items: Sequence[WorkItem], taps: Sequence[Tap], progress: Callable[[int, int], None]
) -> RowsByTap:
    last_layer = None if any(tap.norm == "post" for tap in taps) else max(tap.layer for tap in taps)
    num_layers = checkpoint.architecture.num_layers if last_layer is None else last_layer
    sequences = [item.token_ids for item in items]
    expected: RowsByTap = {}
    for layer, norm, states in reference_states(checkpoint, sequences, last_layer=last_layer):
        for tap in taps:
            if (tap.layer, tap.norm) == (layer, norm):
                expected[tap] = {item.request_id: rows_of(state, tap.rows) for item, state in zip(items, states, strict=True)}
        progress(layer, num_layers)
    return expected


def _compared_next_tokens(checkpoint: Checkpoint, expected: RowsByTap, found: RowsByTap) -> tuple[NextTokens | None, str]:
    final = [tap for tap in expected if tap.norm == "post" and tap.rows in ("last", "all")]
    if not final:
        return None, "not compared: the engine has no tap final@last or final@all"
    request_ids = list(expected[final[0]])
    theirs = next_tokens(checkpoint, np.stack([expected[final[0]][name][-1] for name in request_ids]))
    if theirs is None:
        return None, "not compared: the checkpoint has no output head"
    ours = next_tokens(checkpoint, np.stack([found[final[0]][name][-1] for name in request_ids]))
    different = [name for name, is_other in zip(request_ids, ours != theirs, strict=True) if is_other]
    return NextTokens(len(request_ids), len(different), different[0] if different else None), "compared"


def _json_types(value: object) -> object:
    if isinstance(value, dict):
        return {name: _json_types(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_json_types(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
