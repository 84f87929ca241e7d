"""The stand-in refuses what it must: a backend that makes these mistakes cannot pass."""

import pytest
from stand_in_trt import DEVICE_BIT, ExecutionContextAllocationStrategy, ILogger
from toy_engines import Toy, tensors
from toy_plans import write_ours, write_upstream

SHAPES = {"input_ids": (5,), "position_ids": (5,), "attention_rows": (2, 3), "packed_slots": (5,), "last_token_ids": (2,)}
TENSORS = [tensor.name for tensor in tensors(Toy())]
DEVICE = DEVICE_BIT | 4096


class Log(ILogger):
    words = ""

    def log(self, severity, message):
        self.words = message


@pytest.fixture
def context(library, tmp_path, monkeypatch):
    monkeypatch.setattr(library.driver, "launch", lambda stream, kernel: None)  # only the calls are looked at
    runtime = library.Runtime(Log())
    engine = runtime.deserialize_cuda_engine((write_ours(tmp_path / "engine") / "engine.plan").read_bytes())
    return engine.create_execution_context(ExecutionContextAllocationStrategy.STATIC)


def bind(context, shapes=SHAPES, addresses=TENSORS):
    assert all(context.set_input_shape(name, shape) for name, shape in shapes.items())
    assert all(context.set_tensor_address(name, DEVICE) for name in addresses)


def refused(context, words):
    return not context.execute_async_v3(1) and words in context.engine.logger.words


def test_a_batch_that_is_bound_runs_once_and_its_addresses_are_stale_then(context):
    bind(context)
    assert context.execute_async_v3(1)
    assert refused(context, "stale")


def test_a_shape_that_was_never_set_is_seen(context):
    bind(context, {name: shape for name, shape in SHAPES.items() if name != "attention_rows"})
    assert refused(context, "shapes of ['attention_rows'] are not set")


def test_an_address_that_was_never_set_is_seen(context):
    bind(context, addresses=TENSORS[1:])
    assert refused(context, f"the address of {TENSORS[0]} is stale or was never set")


def test_an_address_before_the_last_shape_is_seen(context):
    bind(context)
    context.set_input_shape("input_ids", (5,))
    assert refused(context, "before the last shape change")


def test_a_host_address_for_a_device_tensor_is_seen(context):
    bind(context)
    context.set_tensor_address("input_ids", 4096)
    assert refused(context, "input_ids is bound to 0x1000, which is memory of the other side")


def test_a_device_address_for_a_host_input_is_seen(upstream, tmp_path):
    runtime = upstream.Runtime(Log())
    engine = runtime.deserialize_cuda_engine((write_upstream(tmp_path / "engine") / "rank0.engine").read_bytes())
    context = engine.create_execution_context(ExecutionContextAllocationStrategy.STATIC)
    sizes = {"T": 5, "B": 2}
    shapes = {n: tuple(sizes.get(s, s) for s in shape) for n, (mode, _, shape) in engine.facts.tensors.items() if mode == "input"}
    bind(context, shapes, engine.facts.tensors)
    assert refused(context, "host_context_lengths is bound to")


def test_sizes_that_disagree_are_seen(context):
    bind(context, {**SHAPES, "packed_slots": (6,)})
    assert refused(context, "T is 5 elsewhere, 6 in packed_slots")


def test_a_shape_outside_of_the_selected_profile_is_refused_and_a_new_profile_forgets_all_shapes(context):
    assert not context.set_input_shape("attention_rows", (2, 9))
    assert context.set_optimization_profile_async(1, 1) and context.set_input_shape("attention_rows", (2, 9))
    bind(context)
    assert context.set_optimization_profile_async(2, 1) and refused(context, "are not set")
    assert not context.set_optimization_profile_async(3, 1) and not context.set_optimization_profile_async(0, 0)
