"""Site: where TensorRT-LLM is installed and which version it is, found without importing it (an import needs a GPU)."""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from tensorrt_llm_ext.errors import PatchError

PACKAGE = "tensorrt_llm"
FIRST, LAST = (0, 13), (1, 2)  # before 0.13 no engine can be built without a cache; after 1.2 the definition is removed


@dataclass(frozen=True)
class Site:
    """An installed TensorRT-LLM: the folder that holds the package, and its version."""

    folder: Path
    version: Version

    def shown(self, path: Path) -> str:
        """Name a file of the site as a reader does: relative to the folder."""
        return str(path.relative_to(self.folder))


def find_site(folder: Path | None = None) -> Site:
    """Find TensorRT-LLM in ``folder`` (a site-packages), or where this Python would import it from.

    Raises PatchError when it is not installed, its version cannot be read, or the patch does not serve that version.
    """
    folder = Path(folder) if folder is not None else _installed()
    if not (folder / PACKAGE).is_dir():
        raise _not_installed(f"no folder '{folder / PACKAGE}'")
    version = _version(folder / PACKAGE / "version.py")
    if not FIRST <= version.release[:2] <= LAST:
        raise PatchError(
            f"TensorRT-LLM {version} in '{folder}' is not a version that the patch serves",
            expected=f"{'.'.join(map(str, FIRST))} to {'.'.join(map(str, LAST))}",
            found=version,
            fix="earlier versions cannot build without a cache; later ones have no TensorRT backend: capture with "
            "model_patches.capture on the PyTorch backend, or build with `trtllm-extract build`",
        )
    return Site(folder, version)


def _installed() -> Path:
    spec = importlib.util.find_spec(PACKAGE)  # of a top-level name: looks, and runs nothing of the package
    if spec is None or not spec.submodule_search_locations:
        raise _not_installed("no package of this name on this Python's path")
    return Path(next(iter(spec.submodule_search_locations))).parent


def _version(path: Path) -> Version:
    try:
        tree = ast.parse(path.read_bytes())
        values = [ast.literal_eval(node.value) for node in tree.body if _is_version(node)]
        return Version(values[-1])
    except (OSError, SyntaxError, ValueError, IndexError, TypeError, InvalidVersion) as error:
        raise PatchError(
            f"the version of TensorRT-LLM cannot be read from '{path}'",
            expected="one assignment of a version to __version__",
            found=f"{type(error).__name__}: {error}",
            fix="install TensorRT-LLM again, or name another --site",
        ) from error


def _is_version(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__version__"]


def _not_installed(found: str) -> PatchError:
    return PatchError(
        "TensorRT-LLM is not installed here",
        expected=f"a folder that holds the package {PACKAGE}",
        found=found,
        fix="run this in the environment that has TensorRT-LLM, or name its site-packages with --site",
    )
