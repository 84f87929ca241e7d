"""Repeated request ids are found, within one call and across any number of them, in 16 bytes each."""

import tracemalloc

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tensorrt_llm_ext.inputs import duplicates
from tensorrt_llm_ext.inputs.duplicates import SeenIds, Verdict

NEW, SAME, OTHER = Verdict.NEW, Verdict.SAME_TOKENS, Verdict.OTHER_TOKENS


def test_a_repetition_says_whether_its_tokens_are_the_same():
    seen = SeenIds()
    assert seen.claim(["a", "b", "a", "b"], ["1", "1", "1", "2"]) == [NEW, NEW, SAME, OTHER]
    assert seen.claim(["b", "a", "c"], ["1", "2", "1"]) == [SAME, OTHER, NEW]
    assert seen.claim([], []) == []


calls = st.lists(st.lists(st.tuples(st.integers(0, 30).map(str), st.sampled_from("12")), max_size=8), max_size=30)


@given(calls)
def test_the_verdicts_are_those_of_a_dictionary(calls):
    seen, known = SeenIds(), {}
    for call in calls:
        expected = []
        for request_id, tokens in call:
            expected.append(NEW if request_id not in known else SAME if known[request_id] == tokens else OTHER)
            known.setdefault(request_id, tokens)
        assert seen.claim([request_id for request_id, _ in call], [tokens for _, tokens in call]) == expected


def test_an_id_takes_sixteen_bytes_and_no_more_than_thirty_two_while_levels_merge():
    seen, num_ids = SeenIds(), 40_000
    tracemalloc.start()
    for start in range(0, num_ids, 500):
        ids = [f"request-{number}" for number in range(start, start + 500)]
        assert set(seen.claim(ids, ids)) == {NEW}
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seen.num_bytes == 16 * num_ids
    assert peak < 32 * num_ids + 400_000, f"{peak} bytes"  # 400 kB: the lists of one call
    assert seen.claim(["request-0", "request-39999"], ["request-0", "x"]) == [SAME, OTHER]


def test_levels_beyond_the_limit_stay_apart_and_are_still_searched(monkeypatch):
    monkeypatch.setattr(duplicates, "_MAX_MERGED_ENTRIES", 16)
    seen = SeenIds()
    for number in range(200):
        seen.claim([str(number)], ["1"])
    assert max(len(level) for level in seen._levels) == 16
    assert seen.claim([str(number) for number in range(201)], ["1"] * 201) == [SAME] * 200 + [NEW]


def test_an_id_whose_digest_ends_in_zero_bytes_is_found(monkeypatch):
    digest = bytes([7]) * 8 + bytes(8)
    monkeypatch.setattr(duplicates.xxhash, "xxh3_128_digest", lambda _: digest)
    monkeypatch.setattr(duplicates.xxhash, "xxh3_64_digest", lambda value: bytes([value != b"zero"]) * 8)
    seen = SeenIds()
    assert seen.claim(["a"], ["zero"]) == [NEW]
    assert seen.claim(["a", "a"], ["zero", "one"]) == [SAME, OTHER]
    assert np.concatenate(seen._levels).nbytes == 16
