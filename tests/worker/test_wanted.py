"""What a stream asks for, and in which fields an engine differs."""

import dataclasses

import pytest
from toy_engines import ALL, LAST, Toy, toy_contract
from toy_streams import LIMITS, QUICK

from tensorrt_llm_ext.errors import BrokerError, InputError, Refusal
from tensorrt_llm_ext.recipes import read_contract
from tensorrt_llm_ext.recipes.contract import Fingerprints
from tensorrt_llm_ext.worker import StreamSettings, Wanted, differences
from tensorrt_llm_ext.worker.wanted import check_priority, read_wanted


def test_what_is_wanted_comes_back_whole_without_canaries(wanted):
    back = read_wanted(wanted.to_json(), "s")
    assert back == wanted and back.version == wanted.version and back.contract.canaries == ()


def test_every_part_of_it_changes_its_version(wanted):
    others = [
        dataclasses.replace(wanted, settings=dataclasses.replace(QUICK, num_partitions=3)),
        dataclasses.replace(wanted, policy=dataclasses.replace(wanted.policy, max_length=7)),
        dataclasses.replace(wanted, contract=dataclasses.replace(wanted.contract, model_name="other")),
    ]
    assert len({wanted.version, *(other.version for other in others)}) == 4


@pytest.mark.parametrize("value", [b"", b"[]", b"{}", b'{"format": "tensorrt_llm_ext.stream", "format_version": 1}'])
def test_what_cannot_be_read_is_an_error(value):
    with pytest.raises(BrokerError, match="what the stream 's' asks for cannot be read"):
        read_wanted(value, "s")


def test_the_same_engine_has_no_difference_and_may_take_longer_items(engine, wanted):
    assert differences(wanted, read_contract(engine)) == []
    shorter = dataclasses.replace(wanted, policy=dataclasses.replace(wanted.policy, max_length=7))
    assert differences(shorter, read_contract(engine)) == []


def test_each_field_that_differs_is_named_with_what_is_wanted_and_what_there_is(wanted):
    has = dataclasses.replace(
        toy_contract(Toy(taps=(LAST, ALL), limits=dataclasses.replace(LIMITS, max_seq_len=16))),
        model_name="other",
        fingerprints=Fingerprints("sha256:c2", "sha256:t2", "sha256:r", "sha256:p"),
        weight_dtype="float16",
    )
    found = {difference.field: (difference.wanted, difference.has) for difference in differences(wanted, has)}
    engine = found.pop("engine")
    assert engine == (wanted.contract.engine_fingerprint(), has.engine_fingerprint())
    assert found == {
        "model": ("toy", "other"),
        "checkpoint": ("sha256:c", "sha256:c2"),
        "tokenizer": ("sha256:t", "sha256:t2"),
        "taps": ("final@last,final@mean", "final@last,final@all"),
        "weights": ("float32", "float16"),
        "length": ("at least 32 tokens", "16 tokens"),
    }


def test_requests_are_spread_over_partitions_the_same_way_always(wanted):
    spread = [wanted.partition_of(f"r{i}") for i in range(1000)]
    assert 400 < sum(spread) < 600 and set(spread) == {0, 1}
    assert [wanted.partition_of(name) for name in ("a", "b", "c", "d")] == [1, 1, 1, 0]  # a change would split datasets
    one = Wanted(wanted.contract, wanted.policy, StreamSettings())
    assert {one.partition_of(f"r{i}") for i in range(50)} == {0}


@pytest.mark.parametrize("field", ["num_partitions", "lease_s", "max_message_bytes", "max_alone"])
def test_settings_must_be_positive(field):
    with pytest.raises(InputError, match=f"a stream's {field} must be positive"):
        StreamSettings(**{field: 0})


def test_an_unknown_priority_is_refused():
    assert check_priority("high") == "high"
    with pytest.raises(Refusal) as caught:
        check_priority("urgent")
    assert caught.value.code == "bad_priority" and "high, normal, low" in caught.value.expected
