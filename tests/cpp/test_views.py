"""Views: tensors inside a slot, by NumPy and DLPack, without a copy, for as long as anyone looks."""

import gc

import ml_dtypes
import numpy as np
import pytest
from rig import DIGEST, PATIENCE_S

from tensorrt_llm_ext import _runtime

DTYPES = ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int32", "int64", "int8", "uint8", "bool"]


def a_batch(dtype: str, write):
    """Run one batch whose output [B, 3] of ``dtype`` is written by ``write(memory)``; arena, stream, view."""
    layout = _runtime.Layout(
        [("input_ids", "input", "int32", ("T",)), ("out", "output", dtype, ("B", 3))],
        vocab_size=10,
        max_num_tokens=8,
        max_batch_size=4,
        max_seq_len=8,
        max_padded_tokens=32,
    )
    arena, stream = _runtime.PinnedArena(layout.slot_bytes, 1), _runtime.HostStream()
    slot = arena.acquire(0)
    _runtime.pack(layout, np.zeros(3, np.int32), np.array([0, 1, 3], np.int32), slot, convention="none", batch=1, digest=DIGEST)
    stream.copy_in(slot)
    stream.run(slot, lambda slot: write(dict((name, address) for name, _, address in stream.tensors(slot))["out"]))
    stream.copy_out(slot)
    ticket = stream.ring(slot)
    return arena, stream, ticket.wait(PATIENCE_S)["out"]


def writer(values: np.ndarray):
    import ctypes

    return lambda address: ctypes.memmove(address, np.ascontiguousarray(values).ctypes.data, values.nbytes)


def values_of(dtype: str) -> np.ndarray:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    return np.array([[1, 0, 1], [2, 3, 4]]).astype(kind)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_view_shows_what_the_engine_wrote_in_its_own_type(dtype):
    expected = values_of(dtype)
    arena, stream, view = a_batch(dtype, writer(expected))
    array = view.numpy()
    assert array.dtype == expected.dtype and array.shape == view.shape == (2, 3) and view.dtype == dtype
    assert array.tobytes() == expected.tobytes()


def test_a_view_is_no_copy_and_cannot_be_written_to():
    arena, stream, view = a_batch("float32", writer(values_of("float32")))
    first, second = view.numpy(), view.numpy()
    assert np.shares_memory(first, second)
    with pytest.raises(ValueError, match="read-only"):
        first[0, 0] = 9


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "int64", "uint8"])
def test_numpy_takes_a_view_by_dlpack_read_only(dtype):
    arena, stream, view = a_batch(dtype, writer(values_of(dtype)))
    array = np.from_dlpack(view)
    np.testing.assert_array_equal(array, values_of(dtype))
    assert np.shares_memory(array, view.numpy()) and not array.flags.writeable


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int64", "bool"])
def test_torch_takes_a_view_by_dlpack_without_a_copy(dtype):
    torch = pytest.importorskip("torch")
    arena, stream, view = a_batch(dtype, writer(values_of(dtype)))
    tensor = torch.from_dlpack(view)
    assert tensor.dtype == getattr(torch, dtype)
    assert tensor.data_ptr() == view.numpy().ctypes.data
    assert tensor.float().tolist() == values_of(dtype).astype(np.float32).tolist()


@pytest.mark.parametrize("look", ["numpy", "slice", "dlpack", "unused capsule", "old capsule"])
def test_a_slot_comes_home_when_its_last_view_dies(look):
    arena, stream, view = a_batch("float32", writer(values_of("float32")))
    looks = {
        "numpy": lambda: view.numpy(),
        "slice": lambda: view.numpy()[1:, :2],
        "dlpack": lambda: np.from_dlpack(view),
        "unused capsule": lambda: view.__dlpack__(max_version=(1, 0)),
        "old capsule": lambda: view.__dlpack__(),
    }
    seen = looks[look]()
    del view, looks
    gc.collect()
    assert arena.stats()["slots_out"] == 1
    del seen
    gc.collect()
    assert arena.stats()["slots_out"] == 0


def test_dlpack_requests_that_would_need_a_copy_are_refused():
    arena, stream, view = a_batch("float32", writer(values_of("float32")))
    assert view.__dlpack_device__() == (1, 0)
    with pytest.raises(BufferError, match="host memory"):
        view.__dlpack__(dl_device=(2, 0))
    with pytest.raises(BufferError, match="never copied"):
        view.__dlpack__(copy=True)
