"""Capture on a stand-in of upstream's PyTorch backend: each prompt's own rows, through a plan, or an error."""

import threading

import ml_dtypes
import numpy as np
import pytest
import torch
from captured_steps import LIMITS, TOLERANCE, check, items, prompts_of, step
from upstream_torch import DecoderModelForCausalLM, Executor, expected_rows, write_step

from model_patches import capture, captured_contract, captured_origin
from tensorrt_llm_ext.errors import PlanError
from tensorrt_llm_ext.fingerprint import token_hash
from tensorrt_llm_ext.results import Failure, Record, WorkItem
from tensorrt_llm_ext.store import Header, VectorStore, open_vectors

# Rows and identity


def test_each_prompt_gets_its_own_rows_and_generations_get_none(model, captured):
    wanted = items(5)
    captured.expect(wanted)
    step(model, prompts_of(wanted[:3]), generations=[(5, [9, 8, 7]), (6, [4])])
    step(model, [], generations=[(70, [3])])
    step(model, prompts_of(wanted[3:]))
    check(model, captured.finish(), wanted)
    assert captured.stats() == {
        "made": 2, "consumed": 2, "refused": 0, "open": 0, "cross_request": 0, "answered": 5, "waiting": 0, "unexpected": 0,
    }  # fmt: skip


def test_interleaved_requests_of_an_executor_keep_their_identity(model, captured):
    wanted = items(60)
    captured.expect(wanted)
    executor = Executor(model)
    for item in reversed(wanted):  # an order that is not the one they were announced in
        executor.submit(item.token_ids)
    executor.stop()
    check(model, captured.finish(), wanted)
    assert captured.stats()["made"] == captured.stats()["consumed"] > 5 and captured.stats()["cross_request"] == 0


def test_concurrent_executors_and_clients_keep_requests_apart(model, captured):
    """Three executors run steps of one model at once, each fed by two threads that announce as they go."""
    groups = [items(20, seed=seed, prefix=f"client-{seed}") for seed in range(6)]
    executors = [Executor(model, first_id=0, seed=seed) for seed in range(3)]  # the same upstream ids in each

    def client(number):
        for item in groups[number]:
            captured.expect([item])
            executors[number % 3].submit(item.token_ids)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(6)]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
    [executor.stop() for executor in executors]
    check(model, captured.finish(), [item for group in groups for item in group])
    assert captured.stats()["refused"] == captured.stats()["cross_request"] == 0


def test_requests_with_the_same_tokens_are_answered_once_each(model, captured):
    first, second = items(1), items(1, prefix="twin")
    captured.expect(first + second)
    step(model, prompts_of(first))
    assert [answer.request_id for answer in captured.take()] == ["request-0"]
    step(model, prompts_of(second))
    assert [answer.request_id for answer in captured.finish()] == ["twin-0"]


def test_a_request_that_nobody_announced_is_counted_and_not_answered(model, captured):
    wanted = items(2)
    captured.expect(wanted)
    step(model, [(1, [5, 6, 7]), *prompts_of(wanted)])
    check(model, captured.finish(), wanted)
    assert captured.stats()["unexpected"] == 1


def test_the_models_result_and_rows_are_those_without_capture(model, captured):
    wanted = items(3)
    captured.expect(wanted)
    with_capture = step(model, prompts_of(wanted))
    captured.close()
    assert torch.equal(step(model, prompts_of(wanted)), with_capture)
    assert "forward" not in vars(model) and "forward" not in vars(model.model)


def test_rows_are_copies_that_upstream_cannot_write_into(model, captured):
    wanted = items(1)
    captured.expect(wanted)
    outputs = []
    model.model.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    step(model, prompts_of(wanted))
    with torch.no_grad():
        outputs[0].zero_()
    check(model, captured.finish(), wanted)


def test_bfloat16_rows_are_kept_bit_for_bit(checkpoint):
    model = DecoderModelForCausalLM(torch.bfloat16)
    contract = captured_contract(checkpoint, version="1.2.1", dtype="bfloat16", precision="fp8", limits=LIMITS)
    wanted = items(1)
    with capture(model, contract, captured_origin(contract)) as captured:
        captured.expect(wanted)
        step(model, prompts_of(wanted))
        (answer,) = captured.finish()
    rows = answer.states[0].rows
    right = expected_rows(model, wanted[0].token_ids.tolist())[-1:]
    assert rows.dtype == ml_dtypes.bfloat16 and answer.states[0].computed_dtype == "fp8"
    np.testing.assert_array_equal(rows.view(np.int16), right.view(torch.int16).numpy())


def test_rows_that_are_not_finite_are_a_failure_of_that_request_alone(model, captured):
    wanted = items(3)
    token_ids = np.array([7, 1], dtype=np.int32)
    wanted[1] = WorkItem("request-1", "row-1", token_ids, token_hash(token_ids))
    with torch.no_grad():
        model.model.embedding.weight[1] = torch.nan  # no other request has this token
    captured.expect(wanted)
    step(model, prompts_of(wanted))
    answers = {answer.request_id: answer for answer in captured.finish()}
    assert isinstance(answers["request-1"], Failure) and answers["request-1"].code == "not_finite"
    assert isinstance(answers["request-0"], Record) and isinstance(answers["request-2"], Record)


def test_records_end_in_a_store(model, checkpoint, tmp_path):
    contract = captured_contract(checkpoint, version="1.2.1", dtype="float32", limits=LIMITS)
    origin = captured_origin(contract)
    wanted = items(20)
    rows = {item.request_id: (row, item) for row, item in enumerate(wanted)}
    with (
        capture(model, contract, origin) as captured,
        VectorStore.create(tmp_path / "out", Header(contract, origin, {})) as store,
    ):
        captured.expect(wanted)
        executor = Executor(model)
        for item in wanted:
            executor.submit(item.token_ids)
        executor.stop()
        answers = captured.finish()
        for answer in answers:
            store.append(*rows[answer.request_id], answer)
        assert store.commit(len(wanted)) == 20
    stored = list(open_vectors(tmp_path / "out").records())
    assert [record.request_id for record in stored] == [item.request_id for item in wanted]
    for record, item in zip(stored, wanted, strict=True):
        np.testing.assert_allclose(
            record.states[0].rows, expected_rows(model, item.token_ids.tolist())[-1:], atol=TOLERANCE
        )
        assert record.origin == origin and record.origin.backend == "tensorrt_llm.torch"


# The plan


class Meddling(torch.nn.Module):
    """A decoder around which something goes wrong."""

    def __init__(self, decoder, before=None, after=lambda output: output):
        super().__init__()
        self.decoder, self.before, self.after = decoder, before, after

    def forward(self, attn_metadata, **arguments):
        output = self.decoder(attn_metadata, **arguments)
        if self.before:
            self.before(attn_metadata)
        return self.after(output)


def meddled(model, contract, **meddling):
    model.model = Meddling(model.model, **meddling)
    return capture(model, contract, captured_origin(contract))


def swap(metadata):
    metadata.request_ids = metadata.request_ids[::-1]


def next_step(metadata):
    write_step(metadata, [(8, [1, 2]), (9, [3, 4, 5])])


@pytest.mark.parametrize("before", [swap, next_step])
def test_metadata_that_changes_during_the_forward_is_refused_and_counted(model, contract, before):
    captured = meddled(model, contract, before=before)
    wanted = items(2)
    captured.expect(wanted)
    with pytest.raises(PlanError, match="what came back is not batch 0"):
        step(model, prompts_of(wanted))
    assert captured.take() == []
    stats = captured.stats()
    assert stats["cross_request"] == stats["refused"] == 1 and stats["open"] == stats["answered"] == 0
    assert stats["waiting"] == 2  # they can be run again


@pytest.mark.parametrize(
    "after, words",
    [
        (lambda output: output[:-1], "what came back is not batch 0"),
        (lambda output: torch.cat([output, output]), "what came back is not batch 0"),
        (lambda output: output[:, :-1], "not the states that the contract promises"),
        (lambda output: output.half(), "not the states that the contract promises"),
        (lambda output: output[None], "what came back is not batch 0"),
        (lambda output: (output, output), "not the states that the contract promises"),
    ],
    ids=["a row less", "twice the rows", "other size", "other dtype", "padded", "a pair"],
)
def test_an_output_that_is_not_the_promised_rows_is_refused(model, contract, after, words):
    captured = meddled(model, contract, after=after)
    captured.expect(items(2))
    with pytest.raises(PlanError, match=words):
        step(model, prompts_of(items(2)))
    assert captured.stats()["open"] == 0 and captured.take() == []


def test_a_plan_is_consumed_once(model, contract):
    class Twice(DecoderModelForCausalLM):
        def forward(self, attn_metadata, input_ids=None, **arguments):
            self.model(attn_metadata, input_ids=input_ids)
            return self.model(attn_metadata, input_ids=input_ids)

    model = Twice()
    captured = capture(model, contract, captured_origin(contract))
    captured.expect(items(2))
    with pytest.raises(PlanError, match="consumed before"):
        step(model, prompts_of(items(2)))
    assert captured.take() == [] and captured.stats()["waiting"] == 2


def test_a_forward_that_passes_the_model_by_is_refused(contract):
    class Replayed(DecoderModelForCausalLM):
        def forward(self, attn_metadata, input_ids=None, **arguments):
            return torch.zeros(1)

    model = Replayed()
    captured = capture(model, contract, captured_origin(contract))
    captured.expect(items(2))
    with pytest.raises(PlanError, match="without its states passing through self.model"):
        step(model, prompts_of(items(2)))
    assert captured.stats()["open"] == 0 and captured.stats()["refused"] == 1


def test_a_request_whose_forward_still_runs_has_not_come_back(model, contract):
    """Upstream's executor has threads of its own: whoever asks too early must hear it."""

    def finish_too_early(metadata):
        with pytest.raises(PlanError, match="1 announced requests did not come back, the first 'request-1'"):
            captured.finish()
        assert captured.stats()["waiting"] == captured.stats()["answered"] == 1

    captured = meddled(model, contract)
    first, second = items(2)
    captured.expect([first, second])
    step(model, prompts_of([first]))
    model.model.before = finish_too_early
    step(model, prompts_of([second]))
    assert [answer.request_id for answer in captured.finish()] == ["request-0", "request-1"]


def test_a_forward_that_fails_leaves_its_requests_waiting(model, contract):
    def fail(output):
        raise RuntimeError("out of memory")

    captured = meddled(model, contract, after=fail)
    captured.expect(items(2))
    with pytest.raises(RuntimeError, match="out of memory"):
        step(model, prompts_of(items(2)))
    model.model.after = lambda output: output
    step(model, prompts_of(items(2)))
    check_ids = sorted(answer.request_id for answer in captured.finish())
    assert check_ids == ["request-0", "request-1"]


def test_requests_of_one_failed_forward_wait_in_the_order_in_which_they_were_announced(model, contract):
    def fail(output):
        raise RuntimeError("out of memory")

    captured = meddled(model, contract, after=fail)
    first, second = items(1), items(1, prefix="twin")
    captured.expect(first + second)
    with pytest.raises(RuntimeError, match="out of memory"):
        step(model, prompts_of(first + second))
    model.model.after = lambda output: output
    step(model, prompts_of(first))
    assert [answer.request_id for answer in captured.take()] == ["request-0"]
