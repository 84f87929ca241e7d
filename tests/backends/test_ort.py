"""Backend ort reads and writes the caller's memory where it lies, one binding per enqueue, and maps every failure."""

import os
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from toy_engines import ALL, HIDDEN_SIZE, LAST, MEAN, VOCAB_SIZE, Toy, reference, tensors, toy_contract, write_engine

from tensorrt_llm_ext.backends import open_engine
from tensorrt_llm_ext.errors import BackendError, EngineError
from tensorrt_llm_ext.runtime.packing import index_arrays

TOY = Toy(taps=(LAST, MEAN, ALL))
SEQUENCES = ([5, 6, 7], [8], [9, 10])


@pytest.fixture
def engine(tmp_path):
    engine = open_engine(write_engine(tmp_path / "engine", TOY), toy_contract(TOY), num_threads=1)
    yield engine
    engine.close()


def packed(sequences=SEQUENCES):
    """Writable arrays for every tensor of a batch."""
    offsets = np.cumsum([0, *map(len, sequences)], dtype=np.int32)
    sizes = {"T": offsets[-1], "B": len(sequences)}
    plain = [t for t in tensors(TOY) if t.role == "input" and t.name != "last_token_ids"]
    arrays = index_arrays(plain, np.concatenate(sequences).astype(np.int32), offsets, VOCAB_SIZE)
    inputs = {"last_token_ids": offsets[1:].copy(), **{name: array.copy() for name, array in arrays.items()}}
    outputs = {t.name: np.zeros([sizes.get(s, s) for s in t.shape], t.dtype) for t in tensors(TOY) if t.role == "output"}
    return SimpleNamespace(inputs=inputs, outputs=outputs)


def bind(engine, batch):
    for name, view in batch.inputs.items():
        engine.set_shape(name, view.shape)
    for name, view in (*batch.inputs.items(), *batch.outputs.items()):
        engine.set_address(name, view.ctypes.data)


def test_outputs_are_written_where_the_caller_said(engine):
    batch = packed()
    bind(engine, batch)
    engine.enqueue(0)
    right = {tap: np.concatenate([reference(ids, tap) for ids in SEQUENCES]) for tap in TOY.taps}
    for tap in TOY.taps:
        np.testing.assert_allclose(batch.outputs[tap.column(3)], right[tap], atol=1e-5)


def test_every_tensor_is_reported_as_the_model_has_it(engine):
    assert {(t.role, t.name, t.dtype, t.shape) for t in engine.tensors()} == {
        (t.role, t.name, t.dtype, t.shape) for t in tensors(TOY)
    }


def test_shapes_may_change_from_batch_to_batch(engine):
    for sequences in (SEQUENCES, [[1]], [[2] * 30, [3] * 4]):
        batch = packed(sequences)
        bind(engine, batch)
        engine.enqueue(0)
        np.testing.assert_allclose(batch.outputs["final_post_last"][0], reference(sequences[0], LAST)[0], atol=1e-5)


def test_addresses_hold_for_one_enqueue_and_a_stale_one_is_never_used(engine):
    batch = packed()
    bind(engine, batch)
    engine.enqueue(0)
    with pytest.raises(BackendError, match="not fully bound"):
        engine.enqueue(0)
    for name, view in batch.inputs.items():
        engine.set_shape(name, view.shape)
    with pytest.raises(BackendError, match="nothing for attention_rows, final_post_all"):
        engine.enqueue(0)


@pytest.mark.parametrize("name", ["input_ids", "final_post_last"])
def test_a_tensor_without_an_address_is_named(engine, name):
    batch = packed()
    views = {**batch.inputs, **batch.outputs}
    for other, view in batch.inputs.items():
        engine.set_shape(other, view.shape)
    for other in views.keys() - {name}:
        engine.set_address(other, views[other].ctypes.data)
    with pytest.raises(BackendError, match=f"nothing for {name}"):
        engine.enqueue(0)


@pytest.mark.parametrize(
    ("name", "shape"), [("input_ids", (1, 2)), ("final_post_last", (3, HIDDEN_SIZE)), ("ids", (3,))]
)
def test_a_shape_the_model_does_not_have_is_refused(engine, name, shape):
    with pytest.raises(BackendError, match="no input"):
        engine.set_shape(name, shape)


def test_the_librarys_failure_comes_with_its_words_and_the_engine_goes_on(engine, capfd):
    batch = packed()
    batch.inputs["input_ids"][0] = 10**6
    bind(engine, batch)
    with pytest.raises(BackendError, match="out of data bounds"):
        engine.enqueue(0)
    assert capfd.readouterr() == ("", "")  # the library prints nothing beside the exception
    batch.inputs["input_ids"][0] = 5
    bind(engine, batch)
    engine.enqueue(0)


def test_a_closed_engine_refuses_and_closing_twice_is_nothing(engine):
    batch = packed()
    bind(engine, batch)
    engine.close()
    engine.close()
    with pytest.raises(BackendError, match="a closed engine"):
        engine.enqueue(0)


@pytest.mark.parametrize(
    "damage",
    [
        lambda model: model.write_bytes(b""),
        lambda model: model.write_bytes(b"not a model" * 100),
        lambda model: model.write_bytes(model.read_bytes()[: model.stat().st_size // 2]),
        lambda model: model.unlink(),
    ],
    ids=["empty", "garbage", "truncated", "missing"],
)
def test_a_damaged_model_is_an_engine_error_with_the_file(tmp_path, damage):
    folder = write_engine(tmp_path, TOY)
    damage(folder / "model.onnx")
    with pytest.raises(EngineError, match="cannot open '.*model.onnx'"):
        open_engine(folder, toy_contract(TOY))


def test_a_truncated_weights_file_is_an_engine_error(tmp_path):
    folder = write_engine(tmp_path, TOY)
    model = onnx.load(folder / "model.onnx")
    onnx.save(model, folder / "model.onnx", save_as_external_data=True, location="weights.bin", size_threshold=500)
    open_engine(folder, toy_contract(TOY)).close()
    os.truncate(folder / "weights.bin", 100)
    with pytest.raises(EngineError, match="cannot open"):
        open_engine(folder, toy_contract(TOY))


def test_an_engine_directory_may_be_read_only(tmp_path):
    folder = write_engine(tmp_path / "engine", TOY)
    before = sorted(folder.iterdir())
    (folder / "model.onnx").chmod(0o444)
    folder.chmod(0o555)
    try:
        engine = open_engine(folder, toy_contract(TOY))
        batch = packed()
        bind(engine, batch)
        engine.enqueue(0)
        engine.close()
        assert sorted(folder.iterdir()) == before  # root may write all the same: nothing did
    finally:
        folder.chmod(0o755)
