"""The output folder: one dataset in it, one writer at it, and nothing that another run or another person has put there."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from tensorrt_llm_ext.errors import ForeignDataset, StoreError
from tensorrt_llm_ext.store.disk import disk_errors

VECTORS_NAME = "vectors.lance"
STATES_NAME = "states"
PART_PREFIX = ".part-"
"""What is being written, or what a writer that died has left behind."""


def holds_dataset(folder: Path) -> bool:
    """Say whether an output folder has a dataset, ours or not, that a resumed run would go on with."""
    return any((Path(folder) / name).exists() for name in (VECTORS_NAME, STATES_NAME))


def check_new(folder: Path) -> None:
    """Raise ForeignDataset, before anything costs time, when a new dataset would find the folder occupied."""
    if Path(folder).is_dir():
        check_empty(Path(folder))


def check_empty(folder: Path) -> None:
    """Only what a creation that died has left behind may lie there."""
    if any(not path.name.startswith(PART_PREFIX) for path in folder.iterdir()):
        is_ours = holds_dataset(folder)
        raise ForeignDataset(
            f"'{folder}' already holds {'a dataset' if is_ours else 'something else'}",
            expected="a new or empty folder",
            found=listing(folder),
            fix="go on with --resume, or name another folder" if is_ours else "name another folder",
        )


def listing(folder: Path) -> str:
    """What is in a folder, in words: a few names, and how many more."""
    names = sorted(path.name for path in folder.iterdir())
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") or "an empty folder"


class FolderLock:
    """Keeps other writers out of a folder until ``release``, or until the process ends, however it ends."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    def release(self) -> None:
        """Let other writers in. Idempotent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def created(folder: Path, name: str, write: Callable[[Path], None]) -> FolderLock:
    """Make the dataset ``name`` in a new or empty folder: ``write`` makes it beside its place, and a rename puts it there.

    Returns the folder's lock (``locked``). Raises ForeignDataset when the folder holds anything, DiskFull, and StoreError when
    another run is writing there.
    """
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    lock = locked(folder)
    try:
        check_empty(folder)
        for leftover in folder.glob(f"{PART_PREFIX}*"):
            shutil.rmtree(leftover)
        with disk_errors(folder), tempfile.TemporaryDirectory(prefix=PART_PREFIX, dir=folder) as part:
            write(Path(part) / name)
            (Path(part) / name).rename(folder / name)
            synced(folder)
    except BaseException:
        lock.release()
        raise
    return lock


def locked(folder: Path) -> FolderLock:
    """Hold the folder for this process. Raises StoreError when another holds it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with disk_errors(folder):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except StoreError as error:
        os.close(descriptor)
        if not isinstance(error.__cause__, BlockingIOError):
            raise
        raise StoreError(
            f"another run is writing to '{folder}'",
            expected="one writer",
            found=error.__cause__,
            fix="wait for it, or stop it",
        ) from error
    return FolderLock(descriptor)


def synced(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
