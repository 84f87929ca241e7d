"""The plan on disk, checked before TensorRT sees it: is it there, whole, and a plan at all?"""

from __future__ import annotations

from pathlib import Path

from tensorrt_llm_ext.errors import ContractError, EngineError
from tensorrt_llm_ext.fingerprint import file_fingerprint
from tensorrt_llm_ext.recipes.contract import Contract, EngineFile

_SUFFIXES = (".plan", ".engine")
_MAGIC = b"trt"  # bytes 1 to 3 of every plan: TensorRT-RTX 1.7 writes vtrt, TensorRT 11 reads ftrt
_COPY_AGAIN = "copy the engine directory again, or build it again"


def find_plan(folder: Path, contract: Contract) -> tuple[Path, EngineFile]:
    """Find the plan, as whole as the contract says, by its size and its first bytes.

    Raises ContractError when the contract lists no plan, EngineError for a file that cannot be the one it lists.
    """
    plans = [file for file in contract.files if file.name.endswith(_SUFFIXES)]
    if len(plans) != 1:
        raise ContractError(
            f"the contract of '{folder}' does not list one plan",
            expected=f"one file whose name ends with {' or '.join(_SUFFIXES)}",
            found=", ".join(file.name for file in contract.files) or "no file",
            fix="build the engine again",
        )
    (file,) = plans
    path = folder / file.name
    try:
        size, start = path.stat().st_size, foreign_start(path)
    except OSError as error:
        raise _damaged(path, "a plan that can be read", error) from error
    if start is not None:
        found = f"a file of another type, which begins with {start!r}"
        raise _damaged(path, "a TensorRT plan, which begins with ?trt", found)
    if size != file.size:
        raise _damaged(path, f"{file.size:,} bytes", f"{size:,} bytes")
    return path, file


def foreign_start(path: Path) -> bytes | None:
    """The first bytes of a file that is no plan of any TensorRT; None for a plan. Raises OSError."""
    with open(path, "rb") as content:
        start = content.read(4)
    return None if start[1:] == _MAGIC else start


def check_hash(path: Path, file: EngineFile) -> None:
    """Raise EngineError unless the plan has the hash it was published with: asked once TensorRT has refused it."""
    if (found := file_fingerprint(path)) != file.sha256:
        raise _damaged(path, file.sha256, found)


def _damaged(path: Path, expected: str, found: object) -> EngineError:
    return EngineError(
        f"'{path}' is not the plan that was published", expected=expected, found=found, fix=_COPY_AGAIN
    )
