"""What the disk says: errors of files and of Lance become errors of the store."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tensorrt_llm_ext.errors import DiskFull, StoreError

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def damage_errors(path: Path | str) -> Iterator[None]:
    """Map what is said of a file that is missing or damaged, while ``path`` is read, to StoreError."""
    try:
        yield
    except (OSError, ValueError, KeyError) as error:  # Arrow's errors are one of the first two; a header may lack a name
        raise StoreError(
            f"'{path}' is damaged",
            expected="the files of every commit, as they were written",
            found=f"no {error}" if isinstance(error, KeyError) else error,
            fix="restore it from a copy, or extract again into another folder",
        ) from error


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Map an OSError while ``path`` is written: DiskFull where there is no room, StoreError otherwise."""
    try:
        yield
    except OSError as error:
        # Lance has no errno: it carries Rust's text
        if error.errno in _DISK_FULL or any(f"(os error {number})" in str(error) for number in _DISK_FULL):
            raise DiskFull(
                f"no space is left for '{path}'",
                expected="room for the next commit",
                found=error,
                fix="free some space, then go on with --resume: every earlier commit is whole",
            ) from error
        raise StoreError(
            f"'{path}' cannot be written", expected="a folder that takes files", found=error, fix="check the folder's rights"
        ) from error
