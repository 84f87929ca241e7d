"""The small door between the runtime and the libraries that run engines.

A backend never allocates, packs, pools or waits: the runtime owns every byte and every order. Per batch the runtime
calls, in this order: ``set_shape`` for every input, ``set_address`` for every tensor, ``enqueue`` once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from tensorrt_llm_ext.recipes.contract import Contract, TensorSpec


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

        Shapes and addresses hold for one enqueue: a tensor that was not bound again since the last one is a
        BackendError, never a stale address. Raises BackendError or OutOfMemory with the library's words.
        """
        ...

    def close(self) -> None:
        """Free what the library holds. Idempotent."""
        ...


class Backend(Protocol):
    """How one library opens engine directories. Third parties add one by the entry point group
    ``tensorrt_llm_ext.backends``: the entry point's name is the backend's name, its value a class without arguments."""

    name: str

    def runtime(self, contract: Contract) -> tuple[str, str]:
        """Name the library that runs this engine and its version here; the contract says which versions it accepts.

        May raise IncompatibleEngine for what comes before a version: a card or a host that the library needs.
        """
        ...

    def open(self, path: Path, contract: Contract, *, num_threads: int | None) -> Engine:
        """Open the engine directory at ``path``, which may be read-only.

        Raises EngineError for a damaged engine, IncompatibleEngine when this machine cannot run it.
        """
        ...
