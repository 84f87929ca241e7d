"""A shard is written whole and hashed as it was written, whatever the disk takes of it at once."""

import os
import time
from itertools import count

import numpy as np
import pytest
import safetensors.numpy
import xxhash

from tensorrt_llm_ext.store import shard


def test_a_shard_of_many_blocks_is_whole_however_slowly_they_are_written(tmp_path, monkeypatch):
    tensors = {"a": np.random.default_rng(0).integers(0, 256, (7, 9001), np.uint8), "b": np.arange(12_345, dtype=np.int32)}
    write, turns = shard._write, count()

    def slow_now_and_then(*arguments):
        time.sleep(0.02 * (next(turns) % 2 == 0))
        write(*arguments)

    monkeypatch.setattr(shard, "_BLOCK_BYTES", 8192)
    monkeypatch.setattr(shard, "_write", slow_now_and_then)
    file = shard.write_shard(tmp_path / "shard", tensors, "shard-{hash}", {"key": "value"})
    content = (tmp_path / "shard").read_bytes()
    assert next(turns) > 10 and len(content) == file.num_bytes
    assert file.hash == f"xxh3-128:{xxhash.xxh3_128_hexdigest(content)}"
    for name, stored in safetensors.numpy.load(content).items():
        np.testing.assert_array_equal(stored, tensors[name], strict=True)


def test_a_disk_that_takes_a_part_of_a_block_gets_the_rest(tmp_path, monkeypatch):
    tensors, write = {"a": np.random.default_rng(0).integers(0, 256, (7, 9001), np.uint8)}, os.write
    monkeypatch.setattr(shard.os, "write", lambda descriptor, block: write(descriptor, block[:8192]))
    file = shard.write_shard(tmp_path / "shard", tensors, "shard", {})
    assert file.hash == shard.hash_of_file(tmp_path / "shard")
    np.testing.assert_array_equal(shard.open_shard(tmp_path / "shard")["a"], tensors["a"])


def test_the_error_of_the_last_block_is_that_of_the_shard(tmp_path, monkeypatch):
    def broken(*arguments):
        raise OSError(5, "a broken disk")

    monkeypatch.setattr(shard, "_write", broken)
    with pytest.raises(OSError, match="a broken disk"):
        shard.write_shard(tmp_path / "shard", {"a": np.zeros((2, 3), np.float32)}, "shard", {})
