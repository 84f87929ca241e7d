"""The library that runs an engine: TensorRT-RTX, TensorRT, or TensorRT with TensorRT-LLM's plugins."""

from __future__ import annotations

import ctypes
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from tensorrt_llm_ext.errors import IncompatibleEngine, MissingExtra

UPSTREAM = "tensorrt_llm"
PLUGINS = Path("libs", "libnvinfer_plugin_tensorrt_llm.so")  # in upstream's package
MODULES = {"tensorrt_rtx": "tensorrt_rtx_bindings", "tensorrt": "tensorrt", UPSTREAM: "tensorrt"}

_WORDS_KEPT = 4  # messages of one call: the first say what is wrong, later ones that something was


def installed_version(library: str) -> str | None:
    """The version of ``library`` here, or None where it is not installed. Upstream's package is not imported for it."""
    try:
        return metadata.version(UPSTREAM) if library == UPSTREAM else import_module(MODULES[library]).__version__
    except (ImportError, OSError):
        return None


def load_library(library: str) -> ModuleType:
    """Import what ``library`` runs engines with, its plugins registered. Raises MissingExtra, or IncompatibleEngine."""
    try:
        module = import_module(MODULES[library])
    except (ImportError, OSError) as error:
        raise missing(library, error) from error
    if library == UPSTREAM:
        _register_plugins()
    return module


def missing(library: str, found: object) -> MissingExtra:
    installs = {"tensorrt_rtx": "pip install 'tensorrt_llm_ext[trt-rtx]'"}
    return MissingExtra(
        f"the engine needs {library}, which is not installed",
        expected=f"the module {MODULES[library]}",
        found=found,
        fix=installs.get(library, f"install {library} from NVIDIA, in the version that the engine's contract names"),
    )


def _register_plugins() -> None:
    """Load upstream's plugin library for the whole process: its engines name plugins that TensorRT must know first."""
    spec = find_spec(UPSTREAM)
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    if not folders:
        raise missing(UPSTREAM, f"no package {UPSTREAM}")
    path = Path(folders[0]) / PLUGINS
    try:
        plugins = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        is_registered = plugins.initTrtLlmPlugins
    except (OSError, AttributeError) as error:
        raise _broken_plugins(path, error) from error
    is_registered.restype, is_registered.argtypes = ctypes.c_bool, [ctypes.c_void_p, ctypes.c_char_p]
    if not is_registered(None, UPSTREAM.encode()):
        raise _broken_plugins(path, "initTrtLlmPlugins refused")


def _broken_plugins(path: Path, found: object) -> IncompatibleEngine:
    return IncompatibleEngine(
        "TensorRT-LLM's plugins cannot be loaded, and its engines need them",
        expected=f"'{path}', with the libraries it is linked to",
        found=found,
        fix=f"install {UPSTREAM} completely, in the version that the engine's contract names",
    )


def make_log(trt: ModuleType) -> Any:
    """A logger of the library's that keeps the words of its errors, and prints nothing."""

    class Log(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self._words: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR) and len(self._words) < _WORDS_KEPT:
                self._words.append(message.strip())

        def take(self) -> str:
            """What was said since the last time."""
            words, self._words = self._words, []
            return "; ".join(words) or "no reason given"

    return Log()
