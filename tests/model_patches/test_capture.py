"""Capture on a stand-in of upstream's PyTorch backend: each prompt's own rows, through a plan, or an error."""

import inspect
import threading
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import tiny
import torch
from upstream_torch import (
    HIDDEN,
    VOCAB,
    AttentionMetadata,
    DecoderModelForCausalLM,
    Executor,
    expected_rows,
    write_step,
)

from model_patches import capture, captured_contract, captured_origin
from tensorrt_llm_ext.checkpoint import open_checkpoint
from tensorrt_llm_ext.errors import PatchError, PlanError, TapError
from tensorrt_llm_ext.fingerprint import token_hash
from tensorrt_llm_ext.recipes import Limits
from tensorrt_llm_ext.results import Failure, Record, WorkItem
from tensorrt_llm_ext.store import Header, VectorStore, open_vectors
from tensorrt_llm_ext.taps import Tap

LIMITS = Limits(max_num_tokens=8192, max_batch_size=64, max_seq_len=512, max_padded_tokens=64 * 512)
ALL, LAST = Tap(8, "post", "all"), Tap(8, "post", "last")
TOLERANCE = 1e-5  # the stand-in sums in another order when its rows lie elsewhere: one rounding of float32


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    with open_checkpoint(tiny.tiny_checkpoint(tmp_path_factory.mktemp("llama"), "llama")) as checkpoint:
        yield checkpoint


@pytest.fixture
def contract(checkpoint):
    return captured_contract(checkpoint, version="1.2.1", dtype="float32", limits=LIMITS, taps="final@last,final@all")


@pytest.fixture
def model():
    return DecoderModelForCausalLM()


@pytest.fixture
def captured(model, contract):
    with capture(model, contract, captured_origin(contract)) as captured:
        yield captured


def items(count, seed=0, prefix="request"):
    """Work items of different tokens, the first of a single one."""
    rng = np.random.default_rng(seed)
    tokens = [rng.integers(20, VOCAB, size=rng.integers(2, 20)).astype(np.int32) for _ in range(count)]
    tokens[0] = np.array([3 + seed], dtype=np.int32)
    return [WorkItem(f"{prefix}-{n}", f"row-{n}", ids, token_hash(ids)) for n, ids in enumerate(tokens)]


def step(model, prompts, generations=(), metadata=None, **arguments):
    metadata = metadata or AttentionMetadata()
    input_ids = write_step(metadata, prompts, generations)
    return model.forward(metadata, **{"input_ids": input_ids, **arguments})


def prompts_of(wanted, first_id=70):
    return [(first_id + n, item.token_ids.tolist()) for n, item in enumerate(wanted)]


def check(model, answers, wanted):
    """Every answer is its own request's record, near its own states and far from every other request's."""
    assert sorted(answer.request_id for answer in answers) == sorted(item.request_id for item in wanted) and wanted
    states = {item.request_id: expected_rows(model, item.token_ids.tolist()).numpy() for item in wanted}
    by_id = {item.request_id: item for item in wanted}
    for answer in answers:
        assert isinstance(answer, Record) and answer.token_hash == by_id[answer.request_id].token_hash
        rows = {state.tap: state.rows for state in answer.states}
        own = states[answer.request_id]
        np.testing.assert_allclose(rows[ALL], own, atol=TOLERANCE)
        np.testing.assert_array_equal(rows[LAST], rows[ALL][-1:])
        others = [rows_of[-1] for request_id, rows_of in states.items() if request_id != answer.request_id]
        assert all(np.abs(rows[LAST][0] - other).max() > 100 * TOLERANCE for other in others)


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


# What is refused


def cached(metadata):
    metadata.kv_cache_params.num_cached_tokens_per_seq[1] = 4


def chunked(metadata):
    metadata.prompt_lens[1] += 5


def pipeline(metadata):
    metadata.mapping = SimpleNamespace(pp_size=2, cp_size=1)


def context_parallel(metadata):
    metadata.mapping = SimpleNamespace(pp_size=1, cp_size=2)


def graph(metadata):
    metadata.is_cuda_graph = True


def repeated(metadata):
    metadata.request_ids = [7, 7]


def too_few(metadata):
    metadata.request_ids = [7]


def anonymous(metadata):
    metadata.request_ids = None


def unknown(metadata):
    del metadata.prompt_lens


@pytest.mark.parametrize(
    "change, words",
    [
        (cached, "chunked prefill or block reuse"),
        (chunked, "chunked prefill or block reuse"),
        (pipeline, "pipeline parallelism is on"),
        (context_parallel, "context parallelism is on"),
        (graph, "speculative decoding or in a CUDA graph"),
        (repeated, "cannot be told apart"),
        (too_few, "cannot be told apart"),
        (anonymous, "does not say whose rows these are"),
        (unknown, "does not say whose rows these are"),
    ],
)
def test_a_step_that_would_not_give_whole_prompts_is_refused_before_it_runs(model, captured, change, words):
    captured.expect(items(2))
    metadata = AttentionMetadata()
    input_ids = write_step(metadata, prompts_of(items(2)))
    change(metadata)
    ran = []
    model.model.register_forward_hook(lambda *arguments: ran.append(1))
    with pytest.raises(PlanError, match=words):
        model.forward(metadata, input_ids=input_ids)
    assert not ran and captured.stats()["made"] == 0 and captured.stats()["waiting"] == 2


def test_a_chunked_prompt_is_never_answered_even_where_each_part_looks_whole(model, captured):
    (whole,) = items(2)[1:]
    captured.expect([whole])
    first, rest = whole.token_ids[:1].tolist(), whole.token_ids[1:].tolist()
    step(model, [(5, first)])
    metadata = AttentionMetadata()
    input_ids = write_step(metadata, [(5, rest)])
    metadata.kv_cache_params.num_cached_tokens_per_seq = [1]
    with pytest.raises(PlanError, match="chunked prefill or block reuse"):
        model.forward(metadata, input_ids=input_ids)
    assert captured.take() == [] and captured.stats()["waiting"] == 1


def test_no_word_about_prompt_lengths_is_served(model, captured):
    captured.expect(items(2))
    metadata = AttentionMetadata()
    input_ids = write_step(metadata, prompts_of(items(2)))
    metadata.prompt_lens = None
    model.forward(metadata, input_ids=input_ids)
    check(model, captured.finish(), items(2))


def test_no_cache_at_all_is_served(model, captured):
    captured.expect(items(2))
    metadata = AttentionMetadata()
    input_ids = write_step(metadata, prompts_of(items(2)))
    metadata.kv_cache_params = None
    model.forward(metadata, input_ids=input_ids)
    check(model, captured.finish(), items(2))


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"spec_metadata": object()}, "speculative decoding"),
        ({"input_ids": None, "inputs_embeds": torch.zeros(3, HIDDEN)}, "cannot be traced to token ids"),
        ({"input_ids": torch.zeros(2, dtype=torch.int32)}, "cannot be traced to token ids"),
    ],
    ids=["speculative", "embeddings", "too few"],
)
def test_a_forward_that_cannot_be_traced_is_refused(model, captured, arguments, words):
    captured.expect(items(2))
    with pytest.raises(PlanError, match=words):
        step(model, prompts_of(items(2)), **arguments)


def test_an_announced_request_that_never_ran_is_an_error_at_the_end(model, captured):
    wanted = items(3)
    captured.expect(wanted)
    step(
        model, [*prompts_of(wanted[:2]), (90, [0, *wanted[2].token_ids.tolist()])]
    )  # upstream added a token of its own
    with pytest.raises(PlanError, match="1 announced requests did not come back, the first 'request-2'") as error:
        captured.finish()
    assert "1 ran with token ids nobody announced" in error.value.found
    check(model, captured.take(), wanted[:2])


def test_a_request_id_is_announced_once(captured):
    captured.expect(items(2))
    with pytest.raises(PlanError, match="'request-1' was announced before"):
        captured.expect(items(2)[1:])


def test_the_forward_under_capture_shows_the_signature_of_the_models_own(model, captured):
    captured.close()
    own = inspect.signature(model.forward)
    with capture(model, captured.contract, captured.origin):
        assert inspect.signature(model.forward) == own


def test_a_model_is_captured_once_at_a_time(model, captured, contract):
    with pytest.raises(PatchError, match="replaced already"):
        capture(model, contract, captured_origin(contract))
    captured.close(), captured.close()
    capture(model, contract, captured_origin(contract)).close()


def test_closing_leaves_a_forward_that_someone_else_put_in_its_place(model, captured):
    model.forward = other = lambda *arguments: None
    captured.close()
    assert model.forward is other and "forward" not in vars(model.model)


def compiled_in_place(decoder):
    decoder.compile()
    return decoder


@pytest.mark.parametrize("compiled", [torch.compile, compiled_in_place])
def test_a_compiled_model_is_refused(model, contract, compiled):
    model.model = compiled(model.model)
    with pytest.raises(PatchError, match="replaced already") as error:
        capture(model, contract, captured_origin(contract))
    assert "not compiled" in error.value.expected and "torch.compile" in error.value.fix


class Headless(torch.nn.Module):
    def forward(self, attn_metadata, input_ids=None): ...


@pytest.mark.parametrize("wrong", [object(), torch.nn.Linear(2, 2), Headless()])
def test_a_model_of_another_kind_is_refused(contract, wrong):
    with pytest.raises(PatchError, match="cannot be captured"):
        capture(wrong, contract, captured_origin(contract))


def test_the_contract_says_which_model_ran_however_its_taps_are_spelled(checkpoint):
    def described(**changes):
        options = {"version": "1.2.1", "dtype": "bfloat16", "precision": "fp8", "limits": LIMITS, "taps": "final@last,final@all"}
        return captured_contract(checkpoint, **{**options, **changes})

    contract = described()
    assert contract.accepted_runtime == "tensorrt_llm==1.2.1" and contract.weight_dtype == contract.activation_dtype == "fp8"
    outputs = [(tensor.name, tensor.dtype, tensor.shape) for tensor in contract.tensors]
    assert outputs == [("final_post_last", "bfloat16", ("B", 48)), ("final_post_all", "bfloat16", ("T", 48))]
    assert described(taps="final@last, final@all").engine_fingerprint() == contract.engine_fingerprint()
    plans = {described(**change).fingerprints.plan for change in ({}, {"version": "1.2.0"}, {"dtype": "float16"}, {"precision": None})}
    assert len(plans) == 4
    assert described(taps="final@all").fingerprints.recipe != contract.fingerprints.recipe


def test_a_tap_that_the_output_does_not_hold_is_refused(checkpoint):
    with pytest.raises(TapError, match="does not give 'final@mean'"):
        captured_contract(checkpoint, version="1.2.1", dtype="float32", limits=LIMITS, taps="final@mean")
