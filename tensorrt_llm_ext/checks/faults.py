"""What can be seen of a dump without computing: sequences that are there twice or not at all, token ids of another row, rows
that are not as many as tokens, padding, values that are not finite, a BOS that is missing."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tensorrt_llm_ext.checkpoint import Checkpoint
from tensorrt_llm_ext.checks.dumps import Dump, Dumped, Entry
from tensorrt_llm_ext.fingerprint import token_hash

_SHOWN = 5


@dataclass(frozen=True)
class Fault:
    """One thing that is not what the format promises. ``code`` is a stable word for machines."""

    code: str
    where: str
    expected: str
    found: str


@dataclass(frozen=True)
class Held:
    """A sequence that could be loaded: its tokens stay in memory, its rows do not."""

    entry: Entry
    token_ids: np.ndarray


def twice(dump: Dump, held: Mapping[str, Held]) -> list[Fault]:
    """Keys that are there more than once, and sequences whose tokens and rows are all those of another."""
    keys = Counter(entry.key for entry in dump.entries)
    faults = [Fault("duplicated", key, "each key once", f"{count} times") for key, count in keys.items() if count > 1]
    by_tokens = defaultdict(list)
    for key, sequence in held.items():
        by_tokens[token_hash(sequence.token_ids)].append(key)
    for keys_of_tokens in by_tokens.values():
        if len(keys_of_tokens) == 1:
            continue
        first = held[keys_of_tokens[0]].entry.load()
        same = [key for key in keys_of_tokens[1:] if _same_rows(first, held[key].entry.load())]
        if same:
            faults.append(
                Fault("duplicated", ", ".join(same[:_SHOWN]), "rows of its own", f"tokens and rows of '{keys_of_tokens[0]}'")
            )
    return faults


def _same_rows(one: Dumped, other: Dumped) -> bool:
    return len(one.slots) == len(other.slots) and all(map(np.array_equal, one.slots, other.slots))


def against_reference(
    held: Mapping[str, Held], reference: Mapping[str, np.ndarray], may_be_padded: bool
) -> list[Fault]:
    """Sequences that are not there, and token ids that are not those of the input's row."""
    faults = []
    missing = [key for key in reference if key not in held]
    if missing:
        is_tail = missing == list(reference)[-len(missing) :]
        code, what = ("lost_tail", "the last") if is_tail else ("missing", "some")
        faults.append(
            Fault(code, "the dump", f"{len(reference)} sequences", f"{what} {len(missing)} are not there: {missing[:_SHOWN]}")
        )
    extra = [key for key in held if key not in reference]
    if extra:
        faults.append(Fault("unknown_key", "the dump", "keys of the input", f"{len(extra)} others: {extra[:_SHOWN]}"))
    rows = {token_hash(tokens): key for key, tokens in reference.items()}
    found_at = {
        key: rows.get(token_hash(sequence.token_ids))
        for key, sequence in held.items()
        if key in reference and not np.array_equal(sequence.token_ids, reference[key])
    }
    if found_at and _is_textual_order(found_at, list(reference)):
        where = f"{len(found_at)} sequences, the first '{next(iter(found_at))}'"
        first = next(iter(found_at.items()))
        found = f"'{first[0]}' is row '{first[1]}'"
        return [*faults, Fault("textual_order", where, "rows in the order of their numbers", found)]
    wrong = [_wrong_tokens(key, held[key].token_ids, reference[key], row) for key, row in found_at.items()]
    return faults + [fault for fault in wrong if not (may_be_padded and fault.code == "padded")]


def _is_textual_order(found_at: Mapping[str, str | None], keys: Sequence[str]) -> bool:
    """Whether the n-th sequence is the n-th of the keys sorted as text (1, 10, 11, 2 …)."""
    textual = dict(zip(keys, sorted(keys), strict=True))
    return all(row == textual[key] for key, row in found_at.items()) and len(found_at) > 1


def _wrong_tokens(key: str, tokens: np.ndarray, right: np.ndarray, row: str | None) -> Fault:
    expected = f"{len(right)} tokens: {right[:_SHOWN].tolist()} …"
    if row is not None:
        return Fault("other_request", key, expected, f"the tokens of row '{row}'")
    if np.array_equal(tokens, right[1:]):
        return Fault("missing_bos", key, expected, f"the same without the first, {right[0]}")
    if len(tokens) < len(right) and np.array_equal(tokens, right[: len(tokens)]):
        return Fault("truncated", key, expected, f"its first {len(tokens)} tokens")
    if len(tokens) > len(right) and np.array_equal(tokens[: len(right)], right):
        more = tokens[len(right) :]
        return Fault("padded", key, expected, f"{len(more)} tokens more: {more[:_SHOWN].tolist()}")
    return Fault("other_tokens", key, expected, f"{len(tokens)} tokens: {tokens[:_SHOWN].tolist()} …")


def wrong_shapes(key: str, dumped: Dumped, dump: Dump, checkpoint: Checkpoint, notes: list[str]) -> list[Fault]:
    """What is wrong with a sequence's shapes and values; padding is a note where the format allows it."""
    faults = []
    tokens, hidden_size = dumped.token_ids, checkpoint.architecture.hidden_size
    vocab_size = checkpoint.architecture.vocab_size
    if not len(tokens) or not 0 <= tokens.min() <= tokens.max() < vocab_size:
        faults.append(Fault("bad_tokens", key, f"token ids from 0 to {vocab_size - 1}", f"{tokens[:_SHOWN].tolist()} …"))
    for slot, rows in enumerate(dumped.slots):
        where = f"{key}, slot {slot}"
        if rows.ndim != 2 or rows.shape[1] != hidden_size:
            faults.append(Fault("wrong_shape", where, f"rows of {hidden_size} values", f"shape {list(rows.shape)}"))
        elif len(rows) not in (1, len(tokens)):
            faults.append(Fault("truncated", where, f"{len(tokens)} rows, one a token", f"{len(rows)} rows"))
        if not np.isfinite(rows.astype(np.float32)).all():
            faults.append(Fault("not_finite", where, "finite values", f"{_num_not_finite(rows)} that are NaN or Inf"))
    if (pads := num_pads(dumped)) and all(len(rows) == len(tokens) for rows in dumped.slots):
        found = f"{pads} of {len(tokens)} tokens at the end are {tokens[-1]}, which nobody learns"
        if dump.may_be_padded:
            notes.append(f"'{key}' is padded: {found}")
        else:
            faults.append(Fault("padded", key, "no padding", found))
    return faults


def _num_not_finite(rows: np.ndarray) -> int:
    return int((~np.isfinite(rows.astype(np.float32))).sum())


def num_pads(dumped: Dumped) -> int:
    """How many tokens at the end are one and the same, three or more, and not learnt."""
    tokens = dumped.token_ids
    different = np.flatnonzero(tokens != tokens[-1]) if len(tokens) else ()
    num_same = len(tokens) - 1 - int(different[-1]) if len(different) else 0
    if num_same < 3 or (dumped.loss_mask is not None and dumped.loss_mask[-num_same:].any()):
        return 0
    return num_same


def missing_bos(sample: Mapping[str, Dumped], checkpoint: Checkpoint) -> list[Fault]:
    """Sequences without the BOS that the checkpoint's tokenizer puts before every text."""
    tokenizer = checkpoint.tokenizer()
    ((first, *_),) = tokenizer.encode_batch(["a"], True)
    if tokenizer.bos_id is None or first != tokenizer.bos_id:
        return []
    without = [key for key, dumped in sample.items() if len(dumped.token_ids) and dumped.token_ids[0] != first]
    expected = f"{first} first, which the tokenizer puts before every text"
    return [Fault("missing_bos", ", ".join(without[:_SHOWN]), expected, f"{len(without)} of {len(sample)} without")] if without else []
