"""Publishing: an engine directory appears whole, or not at all.

It is built in a hidden sibling folder, synced and renamed. The builder holds a lock on the sibling, so one that a crash
left behind is known by having no holder; it is removed by the next build of the same engine.
"""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tensorrt_llm_ext.errors import BuildError, ContractError
from tensorrt_llm_ext.recipes.contract import FILE_NAME, Contract, contract_json, read_contract

_NAMES_SHOWN = 5


@contextmanager
def published(out: Path) -> Iterator[Path]:
    """Give an empty folder to build in; rename it to ``out`` when the block ends well, remove it when it raises.

    Raises BuildError, before and after the block, when ``out`` is a file or a folder that holds something.
    """
    out = Path(os.path.abspath(out))
    _refuse_occupied(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(out)
    sibling = Path(tempfile.mkdtemp(prefix=_prefix(out), dir=out.parent))
    lock = _locked(sibling)
    try:
        yield sibling
        sibling.chmod(0o755)  # mkdtemp gives 0700
        _sync(sibling)
        _refuse_occupied(out)
        os.rename(sibling, out)
        _sync_one(out.parent)
    except BaseException:
        shutil.rmtree(sibling, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def write_contract(folder: Path, contract: Contract) -> Path:
    """Write contract.json, whole: a reader sees the old one or the new one."""
    path = Path(folder) / FILE_NAME
    text = contract_json(contract)
    partial = path.with_suffix(".partial")
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    return path


def _prefix(out: Path) -> str:
    return f".{out.name}.building-"


def _refuse_occupied(out: Path) -> None:
    if not out.exists():
        return
    held = sorted(path.name for path in out.iterdir()) if out.is_dir() else None
    if held != []:
        raise BuildError(
            f"'{out}' exists already",
            expected="a path that does not exist, or an empty folder",
            found=_described(out, held),
            fix="name another --out, or remove it",
        )


def _described(out: Path, held: list[str] | None) -> str:
    if held is None:
        return "a file"
    try:
        contract = read_contract(out)
    except ContractError:
        more = f" and {len(held) - _NAMES_SHOWN} more" if len(held) > _NAMES_SHOWN else ""
        return f"a folder that holds {', '.join(held[:_NAMES_SHOWN])}{more}"
    return f"an engine of {contract.model_name}, backend {contract.backend}"


def _remove_abandoned(out: Path) -> None:
    """Remove half-built siblings that no process holds."""
    for sibling in out.parent.glob(f"{glob.escape(_prefix(out))}*"):
        try:
            lock = _locked(sibling)
        except BlockingIOError as error:
            raise BuildError(
                f"'{out}' is being built by another process",
                expected="one build of an engine at a time",
                found=f"'{sibling}', locked",
                fix="wait for that build, or name another --out",
            ) from error
        shutil.rmtree(sibling, ignore_errors=True)
        os.close(lock)


def _locked(folder: Path) -> int:
    """Open a folder and take its lock, which ends with the process. Raises BlockingIOError when another has it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _sync(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        _sync_one(path)
    _sync_one(folder)


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
