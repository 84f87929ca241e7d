"""TrtBackend: from an engine directory to a loaded plan, or to the reason why this machine cannot load it.

Everything that can be asked without TensorRT is asked first: driver, card, host, library and version, the plan's file.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from tensorrt_llm_ext.backends.trt.engine import TrtEngine
from tensorrt_llm_ext.backends.trt.library import MODULES, installed_version, load_library, make_log, missing
from tensorrt_llm_ext.backends.trt.machine import check_machine
from tensorrt_llm_ext.backends.trt.plan_file import check_hash, find_plan
from tensorrt_llm_ext.errors import ContractError, IncompatibleEngine, OutOfMemory, nearest_name
from tensorrt_llm_ext.recipes.contract import Contract, EngineFile


class TrtBackend:
    """Opens plans on the driver's first card with the TensorRT that the contract names."""

    name = "trt"

    def runtime(self, contract: Contract) -> tuple[str, str]:
        """See ``Backend.runtime``. Raises IncompatibleEngine, before it looks for a version, on a machine without the
        engine's card, and MissingExtra."""
        library = _library(contract)
        version = installed_version(library)
        check_machine(contract, f"{library} {version}" if version else f"no {library}")
        if version is None:
            raise missing(library, "no such module")
        return library, version

    def open(self, path: Path, contract: Contract, *, num_threads: int | None) -> TrtEngine:
        """See ``Backend.open``. ``num_threads`` is for CPUs. Raises OutOfMemory with the library's words, too."""
        library, version = self.runtime(contract)  # asked again: without a driver, TensorRT would end the process
        plan, file = find_plan(path, contract)
        trt = load_library(library)
        log = make_log(trt)
        try:
            runtime = trt.Runtime(log)
            engine = _deserialised(runtime, plan)
        except Exception as error:  # the bindings raise RuntimeError and TypeError
            raise _not_loaded(plan, file, contract, f"{library} {version}", f"{error}; {log.take()}") from error
        if engine is None:
            raise _not_loaded(plan, file, contract, f"{library} {version}", log.take())
        return TrtEngine(trt, log, runtime, engine, contract)


def _library(contract: Contract) -> str:
    library = Requirement(contract.accepted_runtime).name
    if library not in MODULES:
        raise ContractError(
            f"backend trt does not know the library '{library}'",
            expected=f"one of {', '.join(MODULES)}",
            found=contract.accepted_runtime,
            fix=f"build the engine again; {nearest_name(library, MODULES)}",
        )
    return library


def _deserialised(runtime: Any, plan: Path) -> Any:
    """Load a plan from its pages on disk: it is not copied into this process first."""
    with open(plan, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return runtime.deserialize_cuda_engine(content)


def _not_loaded(plan: Path, file: EngineFile, contract: Contract, library: str, words: str) -> Exception:
    """Say why the library refused a plan: the card's memory, the file's bytes, or what it was built for."""
    if "out of memory" in words.lower() or "outofmemory" in words.lower():
        return OutOfMemory(
            f"the plan '{plan}' does not fit on the card",
            expected=f"{contract.memory.device_bytes / 1e9:.2f} GB of device memory ({contract.memory.formula})",
            found=words,
            fix="end what else uses the card, or build the engine with lower limits or at a lower precision",
        )
    check_hash(plan, file)
    return IncompatibleEngine(
        f"TensorRT refuses the plan '{plan}', whose bytes are those that were published",
        expected=f"{contract.accepted_runtime}, compute capability {', '.join(contract.compute_capabilities)}",
        found=f"{library}: {words}",
        fix="build the engine again with the library that is installed here, on a machine like this one",
    )
