"""Memory of the caller's as torch tensors: an address, a dtype and a shape; nothing is owned or copied."""

from __future__ import annotations

import ctypes
import math

import torch

_BITS = {
    torch.int32: ("<i4", torch.int32),
    torch.float32: ("<f4", torch.float32),
    torch.float16: ("<f2", torch.float16),
}
_BITS[torch.bfloat16] = ("<i2", torch.bfloat16)  # the interface has no bfloat16


class _DeviceMemory:
    """What torch asks an object for that lends device memory."""

    def __init__(self, address: int, shape: tuple[int, ...], typestr: str) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False), "shape": shape, "typestr": typestr, "strides": None, "version": 3,
            "stream": None,  # the work is ordered by the stream that it runs on
        }  # fmt: skip


def tensor_at(address: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """View memory at ``address`` of ``device``, which the caller keeps alive."""
    if device.type == "cuda":
        typestr, dtype = _BITS[dtype]
        return torch.as_tensor(_DeviceMemory(address, shape, typestr), device=device).view(dtype)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=dtype).view(shape)
