"""The row an engine reads is measured; an engine whose answer cannot be trusted is refused, and why."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from toy_engines import ALL, HIDDEN_SIZE, LAST, LIMITS, MEAN, NUM_LAYERS, Toy, toy_contract, write_engine

from tensorrt_llm_ext.backends import open_engine
from tensorrt_llm_ext.errors import ConventionError
from tensorrt_llm_ext.runtime.convention import CHANGE, LENGTHS, measure_convention
from tensorrt_llm_ext.runtime.pipeline import Pipeline
from tensorrt_llm_ext.taps import Tap

OTHER_LAST = Tap(NUM_LAYERS, "pre", "last")
WITHOUT_LENGTH_1 = (4, 5, 3, 4)


@pytest.fixture
def measure(tmp_path):
    """Build a toy engine and measure it."""

    def measured(toy, lengths=LENGTHS):
        contract = toy_contract(toy)
        pipeline = Pipeline(open_engine(write_engine(tmp_path, toy), contract), contract, num_slots=2, deadline_s=20)
        try:
            return measure_convention(pipeline.run, contract, lengths)
        finally:
            pipeline.close()

    return measured


def read_v(graph):
    return "last_token_ids"


def read_v_plus_1(graph):
    return graph.op("Add", "last_token_ids", graph.constant(np.int32(1)))


def read_v_minus_2(graph):
    return graph.op("Sub", "last_token_ids", graph.constant(np.int32(2)))


def read_the_true_last_row(graph):
    """Ignores last_token_ids: the last column of attention_rows is each sequence's last row."""
    return graph.op("Gather", "attention_rows", graph.constant(np.int32(-1)), axis=1)


def read_at_most_row_15(graph):
    return graph.op("Min", graph.minus_one("last_token_ids"), graph.constant(np.int32(15)))


def scaled(factor, offset=0.0):
    return lambda graph, rows: graph.op(
        "Add", graph.op("Mul", rows, graph.constant(np.float32(factor))), graph.constant(np.float32(offset))
    )


def noisy(scale):
    return lambda graph, rows: graph.op("Add", rows, graph.op("RandomNormalLike", rows, scale=scale))


def reversed_rows(graph, rows):
    ints = [graph.constant(np.array([value])) for value in (-1, np.iinfo(np.int64).min, 0, -1)]
    return graph.op("Slice", rows, *ints)


def next_row(graph, rows):
    zero, one, end = (graph.constant(np.array([value])) for value in (0, 1, np.iinfo(np.int64).max))
    return graph.op("Concat", graph.op("Slice", rows, one, end, zero), graph.op("Slice", rows, zero, one, zero), axis=0)


def zero_in_one_row(graph, rows):
    is_row_2 = graph.op("Equal", "last_token_ids", graph.constant(np.int32(7)))  # the interior value of sequence 2
    is_row_2 = graph.op("Unsqueeze", is_row_2, graph.constant(np.array([1])))
    return graph.op("Where", is_row_2, graph.constant(np.float32(0)), rows)


def scaled_by_the_batch_maximum(graph, rows):
    """What a per-tensor dynamic scale does: every row depends on every other."""
    return graph.op("Div", rows, graph.op("ReduceMax", graph.op("Abs", rows), keepdims=0))


def leaking(share):
    """A little of the mean over all rows in every row."""

    def leak(graph, rows):
        mean = graph.op("ReduceMean", rows, graph.constant(np.array([0])), keepdims=1)
        return graph.op("Add", rows, graph.op("Mul", mean, graph.constant(np.float32(share))))

    return leak


def massive_first_value(graph, rows):
    push = np.zeros(HIDDEN_SIZE, np.float32)
    push[0] = 3e6
    return graph.op("Add", rows, graph.constant(push))


@pytest.mark.parametrize(("last", "convention"), [(Toy().last, "prefix_sum"), (read_v, "index")])
def test_each_convention_is_measured_with_the_rows_that_were_read(measure, last, convention):
    evidence = measure(Toy(last=last))
    (output,) = evidence.outputs
    assert evidence.convention == output.convention == convention
    assert output.fed == (2, 7, 11, 15)
    assert output.rows_read == ((1, 6, 10, 14) if convention == "prefix_sum" else (2, 7, 11, 15))
    assert output.largest_rest == 0 < CHANGE * output.floor < output.smallest_change
    assert evidence.num_runs == 3 + sum(LENGTHS) + 3 + len(LENGTHS)


@pytest.mark.parametrize("tap", [MEAN, ALL], ids=["mean", "all"])
def test_an_output_without_a_gather_has_convention_none_and_is_measured_too(measure, tap):
    evidence = measure(Toy(taps=(tap,)))
    assert (evidence.convention, evidence.outputs[0].convention, evidence.outputs[0].fed) == ("none", "none", ())
    assert (
        evidence.outputs[0].largest_rest == 0 < CHANGE * evidence.outputs[0].floor < evidence.outputs[0].smallest_change
    )


def test_every_output_of_an_engine_is_measured(measure):
    evidence = measure(Toy(taps=(ALL, LAST, MEAN), last=read_v))
    assert evidence.convention == "index"
    assert [(output.tap, output.convention) for output in evidence.outputs] == [
        (ALL, "none"),
        (LAST, "index"),
        (MEAN, "none"),
    ]


def test_noise_far_below_a_change_is_measured_and_does_not_matter(measure):
    evidence = measure(Toy(change_output=noisy(1e-4)))
    assert evidence.convention == "prefix_sum"
    assert 1e-5 < evidence.outputs[0].noise == evidence.outputs[0].floor < 1e-2


def test_a_few_massive_values_do_not_hide_the_others(measure):
    assert measure(Toy(change_output=massive_first_value, taps=(LAST, ALL))).convention == "prefix_sum"


REFUSED = {
    "off by one the other way": (Toy(last=read_v_plus_1), "reads a row under neither convention"),
    "off by two": (Toy(last=read_v_minus_2), "mixes rows"),
    "ignores last_token_ids": (Toy(last=read_the_true_last_row), "engine is not causal|does not read the row"),
    "right inside, wrong at the end": (Toy(last=read_at_most_row_15), "with the real gather values under prefix_sum"),
    "rows swapped": (Toy(change_output=reversed_rows), "mixes rows"),
    "rows of the next sequence": (Toy(change_output=next_row), "mixes rows"),
    "all zero": (Toy(change_output=scaled(0)), r"has rows of zeros"),
    "one row zero": (Toy(change_output=zero_in_one_row), r"zeros in rows \[2\]"),
    "constant": (Toy(change_output=scaled(0, 1)), "is constant"),
    "NaN": (Toy(change_output=scaled(1, np.nan)), "is not finite"),
    "Inf": (Toy(change_output=scaled(np.inf)), "is not finite"),
    "not causal": (Toy(later_share=1.0), "moves with later tokens: the engine is not causal"),
    "not repeatable": (Toy(change_output=noisy(10.0)), "is not repeatable"),
    "hardly repeatable": (Toy(change_output=noisy(0.1)), "is not repeatable"),
    "a few eps of later tokens": (Toy(later_share=2e-7), "is ambiguous"),
    "scaled by the batch": (Toy(change_output=scaled_by_the_batch_maximum), "mixes rows"),
    "a leak of a few eps": (Toy(change_output=leaking(1.5e-6)), "may mix rows"),
    "mean, not causal within its sequence only": (Toy(taps=(MEAN,), change_output=next_row), "mixes rows"),
    "mean of zeros": (Toy(taps=(MEAN,), change_output=scaled(0)), "rows of zeros"),
    "mean, constant": (Toy(taps=(MEAN,), change_output=scaled(0, 1)), "is constant"),
    "mean, NaN": (Toy(taps=(MEAN,), change_output=scaled(1, np.nan)), "is not finite"),
    "all, not causal": (Toy(taps=(ALL,), later_share=1.0), "moves with later tokens"),
    "all, rows of the next": (Toy(taps=(ALL,), change_output=next_row), "moves with later tokens|mixes rows"),
    "all, reversed": (Toy(taps=(ALL,), change_output=reversed_rows), "mixes rows"),
    "all, constant": (Toy(taps=(ALL,), change_output=scaled(0, 1)), "is constant"),
    "all, NaN": (Toy(taps=(ALL,), change_output=scaled(1, np.nan)), "is not finite"),
}


@pytest.mark.parametrize(("toy", "words"), REFUSED.values(), ids=REFUSED)
def test_an_engine_that_cannot_be_trusted_is_refused(measure, toy, words):
    with pytest.raises(ConventionError, match=words) as error:
        measure(toy)
    assert error.value.expected and error.value.found and "do not use this engine" in error.value.fix


@pytest.mark.parametrize("taps", [(LAST,), (ALL,)], ids=["last", "all"])
@pytest.mark.parametrize("lengths", [LENGTHS, WITHOUT_LENGTH_1], ids=["with length 1", "without"])
def test_an_engine_that_is_not_causal_is_refused_with_and_without_a_length_1_sequence(measure, taps, lengths):
    with pytest.raises(ConventionError, match="moves with later tokens"):
        measure(Toy(taps=taps, later_share=1.0), lengths)
    assert measure(Toy(taps=taps), lengths)  # the same engine, made causal, passes


def test_a_mean_that_leaves_out_its_last_token_is_refused(measure):
    def without_the_last_row(graph, rows):  # the same for every later use of the rows
        is_last = graph.op(
            "Equal",
            graph.op("Gather", "attention_rows", graph.constant(np.int32(-1)), axis=1),
            graph.constant(np.int32(9)),
        )
        return graph.op(
            "Where",
            graph.op("Unsqueeze", is_last, graph.constant(np.array([1]))),
            graph.constant(np.float32(0.5)),
            rows,
        )

    with pytest.raises(ConventionError, match="is not a mean over its sequence"):
        measure(Toy(taps=(MEAN,), change_output=without_the_last_row))


def test_two_outputs_that_read_last_token_ids_differently_are_refused(measure):
    reads = itertools.cycle([Toy().last, read_v])
    with pytest.raises(ConventionError, match="read last_token_ids differently"):
        measure(Toy(taps=(LAST, OTHER_LAST), last=lambda graph: next(reads)(graph)))


@pytest.mark.parametrize("limit", ["max_num_tokens", "max_batch_size", "max_seq_len", "max_padded_tokens"])
def test_an_engine_too_small_to_be_measured_is_refused_with_the_limit(measure, limit):
    with pytest.raises(ConventionError, match=f"{limit} at least"):
        measure(Toy(limits=replace(LIMITS, **{limit: 4})))
