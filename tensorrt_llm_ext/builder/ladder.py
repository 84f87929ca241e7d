"""The ladder of a plan's optimization profiles: few shapes that together take every batch that the limits admit.

A profile bounds B and S, never B x S, so one profile for all would reserve memory for the most sequences at the greatest
length. On a ladder each rung takes longer sequences than the one before, and fewer of them.
"""

from __future__ import annotations

from tensorrt_llm_ext.recipes.contract import Limits, Profile

SHORTEST_RUNG = 128  # tokens: the most common length of a prompt
GROWTH = 4  # of the length from rung to rung. A plan repeats its code for each rung, so rungs are few


def ladder(limits: Limits) -> tuple[Profile, ...]:
    """The rungs for ``limits``, shortest first: every batch within the limits fits the first rung that is long enough.

    A rung's B x S is at most GROWTH times ``max_padded_tokens``, apart from the first, which takes ``max_batch_size``.
    """
    rungs, shorter = [], 0
    while shorter < limits.max_seq_len:
        longest = min(GROWTH * shorter or SHORTEST_RUNG, limits.max_seq_len)
        num_sequences = min(limits.max_batch_size, limits.max_padded_tokens // (shorter + 1))
        num_tokens = min(limits.max_num_tokens, num_sequences * longest)
        rungs.append(Profile(num_tokens, num_sequences, longest))
        shorter = longest
    return tuple(rungs)
