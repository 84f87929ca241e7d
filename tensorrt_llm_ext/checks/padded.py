"""transformers as most people run it: padded batches, the last hidden state, the last real token's row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tensorrt_llm_ext.results.record import WorkItem


def padded_last_states(
    model, items: Sequence[WorkItem], *, batch_size: int, is_sorted: bool
) -> dict[str, np.ndarray]:
    """The last token's state after the final norm, by request id: float32 ``[hidden]``.

    Batches are padded on the right, with an attention mask, in the order given or sorted by length, and run where the model is.
    """
    import torch

    states = {}
    with torch.inference_mode():
        for batch in _batches(items, batch_size, is_sorted):
            lengths = torch.tensor([len(item.token_ids) for item in batch])
            mask = torch.arange(int(lengths.max())) < lengths[:, None]  # [batch, longest]
            ids = torch.zeros(mask.shape, dtype=torch.int64)
            ids[mask] = torch.from_numpy(np.concatenate([item.token_ids for item in batch]).astype(np.int64))
            ids, mask = ids.to(model.device), mask.long().to(model.device)
            hidden = model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
            rows = hidden[torch.arange(len(batch)), lengths - 1].float().cpu().numpy()
            states |= {item.request_id: row for item, row in zip(batch, rows, strict=True)}
    return states


def _batches(items: Sequence[WorkItem], batch_size: int, is_sorted: bool) -> Iterator[Sequence[WorkItem]]:
    if is_sorted:
        items = sorted(items, key=lambda item: len(item.token_ids))
    for start in range(0, len(items), batch_size):
        yield items[start : start + batch_size]
