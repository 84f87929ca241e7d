"""What a batch and an engine directory must be before anything runs."""

import os
from dataclasses import replace

import numpy as np
import pytest
from toy_engines import LAST, LIMITS, VOCAB_SIZE, Toy, random_items, toy_contract, work_item, write_engine

from tensorrt_llm_ext.errors import ContractError, EngineError, OutOfMemory, Refusal
from tensorrt_llm_ext.recipes.contract import Limits, TensorSpec, read_contract
from tensorrt_llm_ext.runtime import Session, check_files
from tensorrt_llm_ext.runtime.door import check_inputs, flattened

CONTRACT = toy_contract(Toy())


def item_of(token_ids):
    return replace(work_item("odd", [1]), token_ids=token_ids)


def items_of(*lengths):
    return [work_item(str(i), [1] * length) for i, length in enumerate(lengths)]


REFUSED = {
    "no item": ([], "empty_batch", "1 item", "0"),
    "an id twice": ([work_item("a", [1]), work_item("a", [2])], "duplicate_id", "once", "a"),
    "no token": (items_of(0), "empty", "at least 1 token", "0"),
    "one token too many": (items_of(41), "too_long", "at most 40 tokens", "41 tokens"),
    "a list": ([item_of([1, 2])], "not_token_ids", "int32 [tokens]", "list"),
    "int64": ([item_of(np.array([1]))], "not_token_ids", "int32 [tokens]", "int64 [1]"),
    "two dimensions": ([item_of(np.zeros((1, 2), np.int32))], "not_token_ids", "int32 [tokens]", "int32 [1, 2]"),
    "beyond the vocabulary": ([work_item("a", [2, VOCAB_SIZE])], "out_of_vocabulary", "0 to 96", "97 at position 1"),
    "negative": ([work_item("a", [-1])], "out_of_vocabulary", "0 to 96", "-1 at position 0"),
    "too many tokens": (items_of(*[9] * 29), "batch_too_large", "max_num_tokens at most 256", "261"),
    "too many sequences": (items_of(*[1] * 33), "batch_too_large", "max_batch_size at most 32", "33"),
    "too much padding": (items_of(40, *[1] * 10), "batch_too_large", "max_padded_tokens at most 400", "440"),
}


@pytest.mark.parametrize(("items", "code", "expected", "found"), REFUSED.values(), ids=REFUSED)
def test_a_batch_the_engine_does_not_take_is_refused_with_the_numbers(items, code, expected, found):
    with pytest.raises(Refusal) as refusal:
        flattened(items, CONTRACT)
    assert refusal.value.code == code
    assert expected in refusal.value.expected and found in refusal.value.found and refusal.value.fix


def test_the_refused_item_is_named():
    with pytest.raises(Refusal, match="request 'b'"):
        flattened([work_item("a", [1]), work_item("b", [2, VOCAB_SIZE])], CONTRACT)


def test_an_item_longer_than_a_whole_batch_is_too_long():
    contract = replace(
        CONTRACT, limits=Limits(max_num_tokens=10, max_batch_size=4, max_seq_len=40, max_padded_tokens=400)
    )
    with pytest.raises(Refusal, match="longer than the engine takes"):
        flattened([work_item("a", [1] * 11)], contract)


def test_sequences_are_laid_one_after_another_in_the_order_given():
    token_ids, offsets = flattened([work_item("a", [5, 6]), work_item("b", [7])], CONTRACT)
    assert token_ids.tolist() == [5, 6, 7] and offsets.tolist() == [0, 2, 3]
    assert token_ids.dtype == offsets.dtype == np.int32


def test_a_refused_batch_takes_no_slot_and_the_session_goes_on(engine_path):
    with Session.open(engine_path) as session:
        for _ in range(5):
            with pytest.raises(Refusal):
                session.submit([work_item("a", [VOCAB_SIZE])])
        assert session.stats()["slots_out"] == session.stats()["open"] == 0
        assert len(session.submit(random_items(3)).wait()) == 3


def test_an_input_that_the_packer_cannot_fill_is_refused_by_name():
    unknown = TensorSpec("kv_cache", "input", "int32", ("T",))
    with pytest.raises(ContractError, match="cannot fill: kv_cache"):
        check_inputs(replace(CONTRACT, tensors=(*CONTRACT.tensors, unknown)))


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda model: model.unlink(), "no such file"),
        (lambda model: os.truncate(model, 100), "100 bytes"),
        (lambda model: (model.unlink(), model.mkdir()), "no such file"),
    ],
    ids=["missing", "truncated", "a folder"],
)
def test_a_file_that_is_not_the_published_one_is_refused_before_it_is_opened(tmp_path, damage, found):
    path = write_engine(tmp_path, Toy())
    damage(path / "model.onnx")
    with pytest.raises(EngineError, match="model.onnx' is not the one that was published") as error:
        Session.open(path)
    assert error.value.found == found


def test_a_flipped_byte_is_found_when_everything_is_hashed(tmp_path):
    path = write_engine(tmp_path, Toy())
    contract = read_contract(path)
    check_files(path, contract, is_full=True)
    content = bytearray((path / "model.onnx").read_bytes())
    content[len(content) // 2] ^= 1
    (path / "model.onnx").write_bytes(content)
    check_files(path, contract)
    with pytest.raises(EngineError, match="sha256:"):
        check_files(path, contract, is_full=True)


@pytest.mark.parametrize("max_padded_tokens", [1 << 40, 1 << 60])
def test_limits_that_no_memory_holds_are_an_error_and_not_a_crash(tmp_path, max_padded_tokens):
    path = write_engine(tmp_path, Toy(taps=(LAST,), limits=replace(LIMITS, max_padded_tokens=max_padded_tokens)))
    with pytest.raises(OutOfMemory, match="cannot be had") as error:
        Session.open(path)
    assert "bytes" in error.value.expected and "bytes free" in error.value.found and "smaller limits" in error.value.fix
