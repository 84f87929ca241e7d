"""The small door between the runtime and the libraries that run engines.

A backend never allocates, packs, pools or waits: the runtime owns every byte and every order. Per batch the runtime
calls, in this order: ``set_shape`` for every input, ``set_address`` for every tensor, ``enqueue`` once.
"""

from __future__ import annotations

from typing import Protocol

from tensorrt_llm_ext.recipes.contract import TensorSpec


class Engine(Protocol):
    """An engine that is open: a loaded plan and its execution state."""

    def tensors(self) -> tuple[TensorSpec, ...]:
        """Every input and output as the library reports it (``tap`` is None: only the contract knows taps)."""
        ...

    def set_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Fix the shape of an input for the next enqueue. Raises BackendError beyond the engine's profile."""
        ...

    def set_address(self, name: str, address: int) -> None:
        """Bind a tensor to memory that the caller owns and keeps alive until the batch has come back."""
        ...

    def enqueue(self, stream: int) -> None:
        """Run once with the bound shapes and addresses, ordered on ``stream`` (0: in the calling thread, to the end).

        Raises BackendError with the library's words.
        """
        ...

    def close(self) -> None:
        """Free what the library holds. Idempotent."""
        ...


class Backend(Protocol):
    """How one library opens engine directories. Third parties add one by the entry point group
    ``tensorrt_llm_ext.backends``."""

    name: str

    def open(self, path, contract) -> Engine:
        """Open the engine directory at ``path``. Raises IncompatibleEngine when this machine cannot run it."""
        ...
