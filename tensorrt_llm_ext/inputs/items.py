"""Work items from rows: every row becomes one, or a refusal with a stable code, in the order of the input.

The codes: ``not_utf8``, ``line_too_long``, ``empty_row``, ``not_json``, ``not_an_object`` (the line itself);
``missing_field``, ``bad_request_id``, ``not_text``, ``bad_messages``, ``template_failed``, ``bad_ids``,
``lone_surrogate`` (its fields); ``empty_prompt``, ``outside_vocabulary``, ``too_long`` (its tokens);
``bad_loss_mask``, ``no_loss_mask`` (its loss mask); ``duplicate_id`` (an accepted row has this id and the same tokens),
``conflicting_id`` (and other tokens).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial

import numpy as np

from tensorrt_llm_ext.checkpoint.tokenizer import Tokenizer
from tensorrt_llm_ext.errors import InputError, Refusal
from tensorrt_llm_ext.fingerprint import token_hashes
from tensorrt_llm_ext.inputs.duplicates import SeenIds, Verdict
from tensorrt_llm_ext.inputs.fields import (
    loss_mask_of_row,
    messages_of_row,
    request_id_of_row,
    text_of_row,
    token_ids_of_row,
    unicode_checked,
)
from tensorrt_llm_ext.inputs.id_rows import IdRows, accepted_rows
from tensorrt_llm_ext.inputs.policy import TokenPolicy
from tensorrt_llm_ext.inputs.rows import AcceptedRow, Fields, RefusedRow, Row
from tensorrt_llm_ext.results.record import WorkItem

_BATCH_ROWS = 512
_BATCH_CHARACTERS = 1 << 20
_SIZED = (str, list, np.ndarray)


def work_items(
    rows: Iterable[Row | IdRows], fields: Fields, tokenizer: Tokenizer, policy: TokenPolicy, *, vocab_size: int, source: str
) -> Iterator[AcceptedRow | RefusedRow]:
    """Turn each row into a work item or a refusal, in order; texts are tokenised many at a time.

    ``source`` names the input in each work item's id (``prompts.jsonl#17``). Only accepted rows claim their request
    id. Memory: one batch of rows, and 16 bytes a row where the input brings its own ids.
    """
    seen = SeenIds() if fields.request_id is not None else None
    steps = _Steps(fields, tokenizer, policy, vocab_size)
    for batch in _batches(rows, fields):
        if isinstance(batch, IdRows):
            if (accepted := accepted_rows(batch, policy, vocab_size, source)) is not None:
                yield from accepted if seen is None else _claimed(seen, accepted, batch)
                continue
            batch = list(batch.rows(fields))
        drafts = [_Draft(row) for row in batch]
        _each(drafts, steps.read)
        steps.tokenise(drafts)
        steps.check_tokens(drafts)
        if seen is not None:
            _claim_ids(seen, drafts)
        for draft in drafts:
            yield draft.finished(source)


@dataclass(slots=True)
class _Draft:
    """A row on its way to becoming a work item."""

    row: Row
    request_id: str | None = None
    text: str | None = None
    token_ids: np.ndarray | None = None
    token_hash: str = ""
    truncated_from: int | None = None
    spans: list[tuple[int, int]] | None = None  # of the text that the assistant wrote
    loss_mask: np.ndarray | None = None
    refusal: Refusal | None = field(default=None)

    def finished(self, source: str) -> AcceptedRow | RefusedRow:
        row = self.row
        if self.refusal is not None:
            return RefusedRow(row.number, row.fraction, row.line, self.request_id, self.refusal)
        self.token_ids.flags.writeable = False
        work_item_id = f"{source}#{row.number}"
        item = WorkItem(
            self.request_id, work_item_id, self.token_ids, self.token_hash, self.truncated_from, self.loss_mask
        )
        return AcceptedRow(row.number, row.fraction, item)


class _Steps:
    """What is done to each draft, with what it needs; a step raises Refusal for a row that cannot go on."""

    def __init__(self, fields: Fields, tokenizer: Tokenizer, policy: TokenPolicy, vocab_size: int) -> None:
        self._fields = fields
        self._tokenizer = tokenizer
        self._policy = policy
        self._vocab_size = vocab_size
        self._adds_special_tokens = policy.special_tokens == "tokenizer"
        self._now = policy.template_date and datetime.fromisoformat(policy.template_date)

    def read(self, draft: _Draft) -> None:
        if isinstance(draft.row.fields, Refusal):
            raise draft.row.fields
        draft.request_id = request_id_of_row(draft.row, self._fields)
        if self._fields.ids:
            draft.token_ids = token_ids_of_row(draft.row, self._fields.ids)
        elif self._fields.messages:
            messages = messages_of_row(draft.row, self._fields.messages)
            draft.text = unicode_checked(self._rendered(messages), self._fields.messages)
            if self._policy.loss_mask == "assistant":
                draft.spans = self._spans(messages)
        else:
            draft.text = (self._policy.prefix or "") + text_of_row(draft.row, self._fields.text)
        if self._policy.loss_mask == "field":
            draft.loss_mask = loss_mask_of_row(draft.row, self._fields.loss_mask)

    def _rendered(self, messages: list[dict]) -> str:
        try:
            return self._tokenizer.render_chat(messages, self._policy.add_generation_prompt, now=self._now)
        except InputError as error:
            raise Refusal(
                "template_failed", error.what, expected=error.expected, found=error.found, fix=error.fix
            ) from error

    def _spans(self, messages: list[dict]) -> list[tuple[int, int]]:
        try:
            return self._tokenizer.assistant_spans(messages, self._policy.add_generation_prompt, now=self._now)
        except InputError as error:
            raise Refusal(
                "no_loss_mask", error.what, expected=error.expected, found=error.found, fix=error.fix
            ) from error

    def tokenise(self, drafts: list[_Draft]) -> None:
        texts = [draft for draft in drafts if draft.refusal is None and draft.text is not None]
        if not texts:
            return
        if self._policy.loss_mask == "assistant":
            encoded = self._tokenizer.encode_with_offsets([draft.text for draft in texts], self._adds_special_tokens)
            for draft, (token_ids, offsets) in zip(texts, encoded, strict=True):
                draft.token_ids, draft.loss_mask = token_ids, _tokens_within(offsets, draft.spans)
            return
        encoded = self._tokenizer.encode_batch([draft.text for draft in texts], self._adds_special_tokens)
        for draft, token_ids in zip(texts, encoded, strict=True):
            draft.token_ids = token_ids

    def check_tokens(self, drafts: list[_Draft]) -> None:
        """Check, cut and hash the token ids of many drafts."""
        token_ids, _ = _packed(drafts)
        are_known = not len(token_ids) or 0 <= token_ids.min() <= token_ids.max() < self._vocab_size
        _each(drafts, partial(self._check_tokens, are_known=are_known))
        hashes = iter(token_hashes(*_packed(drafts)))
        for draft in drafts:
            if draft.refusal is None:
                draft.token_hash = next(hashes)

    def _check_tokens(self, draft: _Draft, *, are_known: bool) -> None:
        """``are_known``: every token id of every draft is in the vocabulary, this one's too."""
        token_ids = draft.token_ids
        if not len(token_ids):
            raise _empty_prompt("no token")
        if not (are_known or 0 <= token_ids.min() <= token_ids.max() < self._vocab_size):
            place = int(np.flatnonzero((token_ids < 0) | (token_ids >= self._vocab_size))[0])
            raise Refusal(
                "outside_vocabulary",
                "a token id is outside the model's vocabulary",
                expected=f"0 to {self._vocab_size - 1}",
                found=f"{token_ids[place]} at position {place}",
                fix="tokenise with this model's tokenizer",
            )
        draft.token_ids = token_ids.astype(np.int32, copy=False)
        if self._policy.loss_mask == "ones":
            draft.loss_mask = np.ones(len(token_ids), np.uint8)
        if draft.loss_mask is not None and len(draft.loss_mask) != len(token_ids):
            raise Refusal(
                "bad_loss_mask",
                f"the field '{self._fields.loss_mask}' has not one value for each token",
                expected=f"{len(token_ids)} values, as many as tokens",
                found=f"{len(draft.loss_mask)} values",
                fix="make the mask with the tokens that this engine sees",
            )
        if len(token_ids) > self._policy.max_length:
            self._cut(draft)

    def _cut(self, draft: _Draft) -> None:
        """Cut the text's own tokens; special tokens at either end stay, as transformers' truncation leaves them."""
        num_tokens, max_length = len(draft.token_ids), self._policy.max_length
        head, tail = self._special_ends(draft)
        num_kept = max_length - head - tail
        if self._policy.too_long == "refuse" or num_kept < 1:
            raise Refusal(
                "too_long",
                "the prompt is too long",
                expected=f"at most {max_length} tokens",
                found=f"{num_tokens} tokens",
                fix="shorten it, or ask for --too-long truncate-left or truncate-right",
            )
        end = num_tokens - tail
        kept = slice(end - num_kept, end) if self._policy.too_long == "truncate-left" else slice(head, head + num_kept)

        def cut(values: np.ndarray) -> np.ndarray:
            return np.concatenate([values[:head], values[kept], values[end:]])

        draft.token_ids, draft.truncated_from = cut(draft.token_ids), num_tokens
        draft.loss_mask = None if draft.loss_mask is None else cut(draft.loss_mask)

    def _special_ends(self, draft: _Draft) -> tuple[int, int]:
        """How many tokens before and after the text the tokenizer added."""
        if draft.text is None or not self._adds_special_tokens:
            return 0, 0
        (bare,) = self._tokenizer.encode_batch([draft.text], special_tokens=False)
        added = len(draft.token_ids) - len(bare)
        for head in range(added + 1):
            if np.array_equal(draft.token_ids[head : head + len(bare)], bare):
                return head, added - head
        return 0, 0  # special tokens within the text: there is no end to keep


def _packed(drafts: list[_Draft]) -> tuple[np.ndarray, np.ndarray]:
    """The token ids of all drafts that are not refused, one after another ``[tokens]``, and where each begins."""
    sequences = [draft.token_ids for draft in drafts if draft.refusal is None]
    offsets = np.cumsum([0, *map(len, sequences)])
    return np.concatenate(sequences) if sequences else np.empty(0, np.int32), offsets


def _tokens_within(offsets: np.ndarray, spans: list[tuple[int, int]]) -> np.ndarray:
    """1 for each token whose first character lies in one of the spans; a token that was added has none."""
    starts = offsets[:, 0]
    mask = np.zeros(len(offsets), dtype=np.uint8)
    for start, end in spans:
        mask[(starts >= start) & (starts < end) & (offsets[:, 1] > starts)] = 1
    return mask


def _batches(rows: Iterable[Row | IdRows], fields: Fields) -> Iterator[list[Row] | IdRows]:
    """Group rows for the tokenizer, which spreads one call over the cores; rows of ids are a group already."""
    batch: list[Row] = []
    num_characters = 0
    for row in rows:
        if isinstance(row, IdRows):
            if batch:
                yield batch
            yield row
            batch, num_characters = [], 0
            continue
        batch.append(row)
        text = None if isinstance(row.fields, Refusal) else row.fields.get(fields.prompt)
        num_characters += len(text) if isinstance(text, _SIZED) else 0
        if len(batch) >= _BATCH_ROWS or num_characters >= _BATCH_CHARACTERS:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


def _each(drafts: list[_Draft], step: Callable[[_Draft], None]) -> None:
    for draft in drafts:
        if draft.refusal is None:
            try:
                step(draft)
            except Refusal as refusal:
                draft.refusal = refusal


def _claim_ids(seen: SeenIds, drafts: list[_Draft]) -> None:
    accepted = [draft for draft in drafts if draft.refusal is None]
    verdicts = seen.claim([draft.request_id for draft in accepted], [draft.token_hash for draft in accepted])
    for draft, verdict in zip(accepted, verdicts, strict=True):
        if verdict is not Verdict.NEW:
            draft.refusal = _repeated(draft.request_id, verdict)


def _claimed(seen: SeenIds, rows: list[AcceptedRow], given: IdRows) -> Iterator[AcceptedRow | RefusedRow]:
    verdicts = seen.claim([row.item.request_id for row in rows], [row.item.token_hash for row in rows])
    for place, (row, verdict) in enumerate(zip(rows, verdicts, strict=True)):
        if verdict is Verdict.NEW:
            yield row
        else:
            line, request_id = given.line and given.line + place, row.item.request_id
            yield RefusedRow(row.number, row.fraction, line, request_id, _repeated(request_id, verdict))


def _repeated(request_id: str, verdict: Verdict) -> Refusal:
    is_same = verdict is Verdict.SAME_TOKENS
    return Refusal(
        "duplicate_id" if is_same else "conflicting_id",
        "the request id was used by an earlier row",
        expected="each request id once",
        found=f"{request_id!r} again, with {'the same' if is_same else 'other'} tokens",
        fix="remove the row" if is_same else "give each request an id of its own",
    )


def _empty_prompt(found: str) -> Refusal:
    return Refusal(
        "empty_prompt", "the prompt is empty", expected="at least one token", found=found, fix="remove the row or fill it"
    )
