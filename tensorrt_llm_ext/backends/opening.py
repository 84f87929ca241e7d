"""Open an engine directory with the backend its contract names, and hold the two against each other."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from tensorrt_llm_ext.backends.protocol import Backend, Engine
from tensorrt_llm_ext.errors import ContractError, EngineError, IncompatibleEngine, MissingExtra, nearest_name
from tensorrt_llm_ext.recipes.contract import Contract, TensorSpec

ENTRY_POINT_GROUP = "tensorrt_llm_ext.backends"
_BUILT_IN = {
    "ort": "tensorrt_llm_ext.backends.ort:OrtBackend",
    "torch": "tensorrt_llm_ext.backends.torch.engine:TorchBackend",
    "trt": "tensorrt_llm_ext.backends.trt.backend:TrtBackend",
}
"""Imported when they are asked for: each needs a library of its own."""


def open_engine(path: Path, contract: Contract, *, num_threads: int | None = None) -> Engine:
    """Open the engine directory at ``path``, whose tensors are then known to agree with ``contract``.

    ``num_threads`` bounds the threads of a CPU backend; None leaves the choice to the library. Raises EngineError for
    an unknown backend or a damaged engine, IncompatibleEngine when the library here is not one the contract accepts,
    ContractError when contract and engine disagree.
    """
    backend = _backend(contract.backend)
    _check_version(backend, contract)
    engine = backend.open(Path(path), contract, num_threads=num_threads)
    try:
        _check_tensors(path, contract.tensors, engine.tensors())
    except ContractError:
        engine.close()
        raise
    return engine


def known_backends() -> tuple[str, ...]:
    """Name every backend that can be opened here: the built-in ones and those of installed packages."""
    return tuple(sorted({*_BUILT_IN, *entry_points(group=ENTRY_POINT_GROUP).names}))


def _backend(name: str) -> Backend:
    if name in _BUILT_IN:
        return _built_in(name)
    for entry_point in entry_points(group=ENTRY_POINT_GROUP, name=name):
        return entry_point.load()()
    raise EngineError(
        f"no backend is called '{name}'",
        expected=f"one of {', '.join(known_backends())}",
        found=f"'{name}' in the engine's contract",
        fix=f"install the package that brings this backend (entry point group {ENTRY_POINT_GROUP}); "
        f"{nearest_name(name, known_backends())}",
    )


def _built_in(name: str) -> Backend:
    module, _, attribute = _BUILT_IN[name].partition(":")
    try:
        return getattr(import_module(module), attribute)()
    except ImportError as error:
        raise MissingExtra(
            f"backend {name} needs a library that is not installed",
            expected=f"what runs engines of backend {name}",
            found=error,
            fix=f"pip install 'tensorrt_llm_ext[{name}]'",
        ) from error


def _check_version(backend: Backend, contract: Contract) -> None:
    try:
        accepted = Requirement(contract.accepted_runtime)
    except InvalidRequirement as error:
        raise ContractError(
            "the contract's accepted_runtime is not a version specifier",
            expected="for example 'onnxruntime>=1.32,<2'",
            found=repr(contract.accepted_runtime),
            fix="build the engine again",
        ) from error
    library, version = backend.runtime(contract)
    if accepted.name != library or not accepted.specifier.contains(version, prereleases=True):
        raise IncompatibleEngine(
            f"the engine was built for another version of the library that runs it (backend {backend.name})",
            expected=contract.accepted_runtime,
            found=f"{library} {version}",
            fix=f"install {contract.accepted_runtime}, or build the engine again here",
        )


def _check_tensors(path: Path, promised: tuple[TensorSpec, ...], found: tuple[TensorSpec, ...]) -> None:
    promised_by_name = {tensor.name: _signature(tensor) for tensor in promised}
    found_by_name = {tensor.name: _signature(tensor) for tensor in found}
    different = sorted(
        name
        for name in promised_by_name.keys() | found_by_name.keys()
        if promised_by_name.get(name) != found_by_name.get(name)
    )
    if different:
        raise ContractError(
            f"the contract of '{path}' and the engine beside it disagree about {', '.join(different)}",
            expected="; ".join(promised_by_name.get(name, f"no tensor {name}") for name in different),
            found="; ".join(found_by_name.get(name, f"no tensor {name}") for name in different),
            fix="one of the two files is from another build: build the engine again",
        )


def _signature(tensor: TensorSpec) -> str:
    return f"{tensor.role} {tensor.name} {tensor.dtype}[{', '.join(str(size) for size in tensor.shape)}]"
