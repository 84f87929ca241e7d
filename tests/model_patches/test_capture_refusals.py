"""What capture refuses: steps that do not give whole prompts, forwards it cannot follow, models of another kind."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from captured_steps import LIMITS, check, items, prompts_of, step
from upstream_torch import HIDDEN, AttentionMetadata, write_step

from model_patches import capture, captured_contract, captured_origin
from tensorrt_llm_ext.errors import PatchError, PlanError, TapError


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
