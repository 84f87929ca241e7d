"""Fair lanes: how many messages a worker asks of each lane, counted in tokens.

Weighted fair queueing: a lane's virtual time is the tokens taken from it over its weight, and whoever is furthest behind
is asked first. So short items cannot crowd out long ones, and a high priority gets a larger share, never all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tensorrt_llm_ext.worker.wanted import LANES, Lane, Wanted

PROBE_S = 0.2
"""Seconds until a lane that had nothing is asked again while others have work."""

_SMOOTHING = 0.1


@dataclass
class _State:
    max_tokens: int  # of one item
    mean_tokens: float
    virtual: float = 0.0
    empty_until: float = 0.0


class FairLanes:
    """Decides what to pull. ``wants`` before a pull, ``took`` after it."""

    def __init__(self, wanted: Wanted) -> None:
        self._states = {}
        for lane in LANES:
            if (longest := wanted.max_tokens_of(lane)) > 0:
                self._states[lane] = _State(longest, longest / 2)

    def wants(self, free_tokens: int, now: float) -> dict[Lane, int]:
        """How many messages to ask of each lane, so that they surely fit ``free_tokens``.

        A lane whose turn it is and whose longest item does not fit makes the others wait: else it would never fit.
        """
        asked: dict[Lane, int] = {}
        active = {lane: state.virtual for lane, state in self._states.items() if state.empty_until <= now}
        quantum = max(state.max_tokens for state in self._states.values())
        while active:
            lane = min(active, key=active.__getitem__)
            state = self._states[lane]
            number = min(free_tokens, quantum) // state.max_tokens
            if not number:
                break
            asked[lane] = asked.get(lane, 0) + number
            free_tokens -= number * state.max_tokens
            active[lane] += number * state.mean_tokens / lane.weight
        return asked

    def took(self, asked: Mapping[Lane, int], taken: Mapping[Lane, Sequence[int]], now: float) -> None:
        """Learn what came: the token counts of the items, by lane."""
        for lane, number in asked.items():
            state, tokens = self._states[lane], taken.get(lane, ())
            state.virtual += sum(tokens) / lane.weight
            for count in tokens:
                state.mean_tokens += _SMOOTHING * (count - state.mean_tokens)
            state.empty_until = now + PROBE_S if len(tokens) < number else 0.0
        awake = [state.virtual for state in self._states.values() if state.empty_until <= now]
        for state in self._states.values():
            if awake and state.empty_until > now:  # a lane that sleeps does not make up for it later
                state.virtual = max(state.virtual, min(awake))
