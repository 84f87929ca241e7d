"""A Hugging Face folder gives every tensor of the decoder, exactly, or says by name what is wrong with it."""

import ml_dtypes
import numpy as np
import pytest
import torch
from tiny import FAMILIES, tiny_checkpoint, tiny_model

from tensorrt_llm_ext.checkpoint import open_checkpoint

NUMPY_DTYPES = {torch.float32: np.float32, torch.float16: np.float16, torch.bfloat16: ml_dtypes.bfloat16}


@pytest.mark.parametrize("max_shard_size", ["5GB", "200KB"], ids=["single", "sharded"])
@pytest.mark.parametrize("dtype", NUMPY_DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_is_what_transformers_wrote(tmp_path, family, dtype, max_shard_size):
    tiny_checkpoint(tmp_path, family, dtype=dtype, max_shard_size=max_shard_size)
    wanted = tiny_model(family).to(dtype).state_dict()
    with open_checkpoint(tmp_path) as checkpoint:
        names = [info.name for info in checkpoint.tensors()]
        assert sorted(names) == sorted(wanted)
        for name in names:
            tensor = checkpoint.tensor(name)
            assert tensor.dtype == NUMPY_DTYPES[dtype] and tensor.flags.c_contiguous
            assert np.array_equal(tensor.astype(np.float32), wanted[name].float().numpy())
