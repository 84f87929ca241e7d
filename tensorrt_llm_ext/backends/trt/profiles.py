"""The optimization profiles of a plan: a ladder, of which a batch takes the first rung that holds it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tensorrt_llm_ext.errors import BackendError, ContractError
from tensorrt_llm_ext.recipes.contract import Contract, Limits, Profile, TensorSpec

Shape = tuple[int, ...]

_SIZES = {"T": "max_num_tokens", "B": "max_batch_size", "S": "max_seq_len"}


@dataclass(frozen=True)
class Bounds:
    """The smallest and the largest shape of every input in one profile."""

    smallest: dict[str, Shape]
    largest: dict[str, Shape]

    def hold(self, name: str, shape: Shape) -> bool:
        low, high = self.smallest[name], self.largest[name]
        return len(shape) == len(low) and all(a <= size <= b for a, size, b in zip(low, shape, high))

    def words(self, name: str) -> str:
        return f"{name} {list(self.smallest[name])} to {list(self.largest[name])}"


def read_profiles(engine: Any, tensors: Sequence[TensorSpec]) -> tuple[Bounds, ...]:
    """Ask a plan for its profiles, in its own order."""
    profiles = []
    for index in range(engine.num_optimization_profiles):
        smallest, largest = {}, {}
        for tensor in tensors:
            if tensor.role == "input":
                low, _, high = engine.get_tensor_profile_shape(tensor.name, index)
                smallest[tensor.name], largest[tensor.name] = tuple(low), tuple(high)
        profiles.append(Bounds(smallest, largest))
    return tuple(profiles)


def check_profiles(profiles: Sequence[Bounds], tensors: Sequence[TensorSpec], contract: Contract) -> None:
    """Raise ContractError unless the plan's profiles are the contract's, and together hold what its limits admit.

    ``tensors`` are the plan's, with the contract's symbols; one that the contract does not know is not looked at.
    """
    inputs = [tensor for tensor in tensors if tensor.role == "input" and "?" not in tensor.shape]
    promised = contract.profiles
    if promised and len(promised) != len(profiles):
        raise _disagree(f"{len(promised)} profiles", f"{len(profiles)} profiles")
    for index, (profile, bounds) in enumerate(zip(promised, profiles)):
        for tensor in inputs:
            wanted = tuple(_size(profile, size) for size in tensor.shape)
            if bounds.largest[tensor.name] != wanted:
                expected = f"profile {index} up to {tensor.name} {list(wanted)}"
                raise _disagree(expected, f"up to {list(bounds.largest[tensor.name])}")
    for batch in _extremes(contract.limits):
        shapes = {tensor.name: tuple(_size(batch, size) for size in tensor.shape) for tensor in inputs}
        if _first(profiles, shapes) is None:
            raise _disagree(
                f"a profile that holds {batch}", "; or ".join(", ".join(map(bounds.words, shapes)) for bounds in profiles)
            )


def choose(profiles: Sequence[Bounds], shapes: Mapping[str, Shape]) -> int:
    """The number of the first profile that holds all ``shapes``. Raises BackendError when none does."""
    if (index := _first(profiles, shapes)) is not None:
        return index
    raise BackendError(
        "no optimization profile of the plan holds this batch",
        expected="; or ".join(", ".join(bounds.words(name) for name in shapes) for bounds in profiles),
        found=", ".join(f"{name} {list(shape)}" for name, shape in shapes.items()),
        fix="form batches with runtime.batches(items, session.contract.limits)",
    )


def _extremes(limits: Limits) -> Iterator[Profile]:
    """The batch of one token, and the largest of each length, which holds all others of it where profiles begin at one token."""
    yield Profile(1, 1, 1)
    for longest in range(1, min(limits.max_seq_len, limits.max_num_tokens) + 1):
        if batch_size := min(limits.max_batch_size, limits.max_padded_tokens // longest):
            yield Profile(min(limits.max_num_tokens, batch_size * longest), batch_size, longest)


def _first(profiles: Sequence[Bounds], shapes: Mapping[str, Shape]) -> int | None:
    holding = (i for i, bounds in enumerate(profiles) if all(bounds.hold(*given) for given in shapes.items()))
    return next(holding, None)


def _size(profile: Profile, size: int | str) -> int:
    return getattr(profile, _SIZES[size]) if isinstance(size, str) else size


def _disagree(expected: str, found: str) -> ContractError:
    return ContractError(
        "the contract and the plan disagree about the batches that the plan takes",
        expected=expected,
        found=found,
        fix="one of the two files is from another build: build the engine again",
    )
