"""Batches from what is held, and lanes: full, fair, within their bounds."""

import dataclasses
import random

import numpy as np
import pytest
from toy_engines import work_item

from tensorrt_llm_ext.recipes.contract import Limits
from tensorrt_llm_ext.worker.broker import Delivery
from tensorrt_llm_ext.worker.held import Held, HeldItem, budget_of, is_full, next_batch
from tensorrt_llm_ext.worker.lanes import PROBE_S, FairLanes
from tensorrt_llm_ext.worker.wanted import LANES

LIMITS = Limits(max_num_tokens=2048, max_batch_size=256, max_seq_len=2048, max_padded_tokens=4096, opt_num_tokens=2048)


def held_of(length, number, **changed):
    delivery = Delivery("work.normal.short.x", b"", {}, number, 1, f"reply {number}")
    return HeldItem(delivery, work_item(f"r{number}", [1] * length), **changed)


@pytest.mark.parametrize("mean, sigma", [(4.5, 0.8), (5.0, 1.0), (3.5, 0.7)])
def test_batches_of_log_normal_lengths_are_more_than_nine_tenths_full(mean, sigma):
    rng = np.random.default_rng(0)
    held, fills, padding, number = Held(8 * 2048), [], [], 0
    for _ in range(200):
        while held.num_tokens < 6 * 2048:
            number += 1
            held.add([held_of(int(np.clip(rng.lognormal(mean, sigma), 1, 2048)), number)])
        batch = held.take_batch(LIMITS, partly_filled=False)
        tokens = sum(item.num_tokens for item in batch)
        assert 0 < tokens <= 2048
        fills.append(tokens / 2048)
        padding.append(len(batch) * max(item.num_tokens for item in batch) / tokens)
        held.release(batch)
    assert np.mean(fills) > 0.93 and np.mean(padding) < 1.35


def test_a_batch_keeps_every_limit_of_the_engine():
    rng, limits = random.Random(3), Limits(100, 7, 60, 150, 90)
    for _ in range(300):
        waiting = [held_of(rng.randint(1, 60), number) for number in range(30)]
        batch = next_batch(waiting, limits)
        lengths = [item.num_tokens for item in batch]
        assert batch[0] is waiting[0] and len(set(map(id, batch))) == len(batch) <= 7
        assert sum(lengths) <= budget_of(limits) == 90 and len(batch) * max(lengths) <= 150


def test_an_item_longer_than_the_budget_is_a_batch_of_its_own():
    limits = dataclasses.replace(LIMITS, opt_num_tokens=100)
    batch = next_batch([held_of(500, 1), held_of(5, 2)], limits)
    assert len(batch) == 1 and is_full(batch, limits)


def test_a_suspect_goes_first_and_alone():
    assert [item.delivery.sequence for item in next_batch([held_of(5, 1), held_of(5, 2, runs_alone=True)], LIMITS)] == [2]


def test_a_request_id_is_in_a_batch_once():
    twice = [held_of(5, 1), held_of(5, 2)]
    twice[1] = dataclasses.replace(twice[1], item=twice[0].item)
    assert len(next_batch(twice, LIMITS)) == 1


def test_a_batch_that_is_not_full_waits_unless_it_need_not():
    held = Held(100)
    held.add([held_of(5, 1)])
    assert held.take_batch(LIMITS, partly_filled=False) == []
    assert len(held.take_batch(LIMITS, partly_filled=True)) == 1


def test_a_delivery_that_comes_again_replaces_the_older_and_is_not_run_twice():
    held = Held(100)
    held.add([held_of(5, 1)])
    (running,) = held.take_batch(LIMITS, partly_filled=True)
    again = held_of(5, 1)
    again.delivery = dataclasses.replace(again.delivery, reply="newer")
    held.add([again])
    assert running.delivery.reply == "newer" and held.take_batch(LIMITS, partly_filled=True) == []
    assert (len(held), held.num_tokens, held.free_tokens) == (1, 5, 95)
    held.release([running])
    assert (len(held), held.num_tokens) == (0, 0)


def test_what_waits_is_given_back_and_what_runs_is_kept():
    held = Held(1000)
    held.add([held_of(5, 1), held_of(500, 2)])
    (running,) = held.take_batch(dataclasses.replace(LIMITS, opt_num_tokens=5), partly_filled=True)
    assert [delivery.sequence for delivery in held.give_back(waiting_only=True)] == [2]
    assert held.deliveries() == [running.delivery]
    assert held.give_back(waiting_only=False) == [running.delivery] and len(held) == 0


def simulated(wanted, waiting, rounds=400, budget=200):
    """Tokens taken from each lane when everything pulled is done at once; ``waiting`` says the lengths a lane offers."""
    lanes, taken, now, rng = FairLanes(wanted), dict.fromkeys(waiting, 0), 0.0, random.Random(0)
    for _ in range(rounds):
        now += 0.01
        wants = lanes.wants(budget, now)
        got = {}
        for lane, number in wants.items():
            assert number >= 1
            got[lane] = [rng.randint(*waiting[lane]) for _ in range(number)] if lane in waiting else []
            if lane in waiting:
                taken[lane] += sum(got[lane])
        assert sum(number * wanted.max_tokens_of(lane) for lane, number in wants.items()) <= budget
        lanes.took(wants, got, now)
    return taken


def lanes_named(*names):
    return [next(lane for lane in LANES if lane.name == name) for name in names]


def test_short_and_long_items_share_a_workers_tokens_evenly(wanted):
    short, long = lanes_named("normal.short", "normal.long")
    taken = simulated(wanted, {short: (1, 3), long: (20, 32)})
    assert 0.8 < taken[short] / taken[long] < 1.25


def test_a_priority_has_its_weight_and_never_everything(wanted):
    high, normal, low = lanes_named("high.short", "normal.short", "low.short")
    taken = simulated(wanted, {high: (1, 8), normal: (1, 8), low: (1, 8)})
    assert 3.2 < taken[high] / taken[normal] < 4.8 and 3.2 < taken[normal] / taken[low] < 4.8


def test_a_lane_without_work_leaves_its_share_to_the_others_and_is_asked_again(wanted):
    (short,) = lanes_named("low.short")
    lanes = FairLanes(wanted)
    wants = lanes.wants(1000, 0.0)
    lanes.took(wants, {short: [3] * wants.get(short, 0)}, 0.0)
    for lane in LANES:  # each is asked until it was found empty
        wants = lanes.wants(1000, 0.01)
        lanes.took(wants, {short: [3] * wants.get(short, 0)}, 0.01)
    assert set(lanes.wants(1000, 0.02)) == {short}
    assert set(lanes.wants(1000, 0.02 + PROBE_S)) > {short}


def test_a_long_item_is_not_starved_where_little_is_free(wanted):
    """20 tokens are free and a long item may hold 32: the short ones wait until it fits."""
    short, long = lanes_named("normal.short", "normal.long")
    lanes = FairLanes(wanted)
    for lane, state in lanes._states.items():
        state.empty_until = 0.0 if lane in (short, long) else 1e9
    lanes._states[short].virtual = 100.0
    assert lanes.wants(20, 1.0) == {}
    assert set(lanes.wants(40, 1.0)) == {long}
