"""Patch: the files of an installed TensorRT-LLM, with the outputs marked and without.

A file is replaced by rename: a sibling is written, synced and renamed, so that a build that reads it sees the old one or
the new one, and a package cache that shares the old one by hard link keeps it.
"""

from __future__ import annotations

import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from model_patches import edit
from model_patches.anchor import TARGETS, Target
from model_patches.edit import InsertedLine
from model_patches.site import PACKAGE, Site
from tensorrt_llm_ext.errors import PatchError

FileState = Literal["unpatched", "patched", "changed", "foreign", "not_understood", "absent"]


@dataclass(frozen=True)
class FileStatus:
    """What the patch finds, or did, in one file; ``lines`` are ours, as they stand in it or would."""

    target: Target
    path: Path | None  # None where this version has no such class
    state: FileState
    lines: tuple[InsertedLine, ...] = ()
    reason: PatchError | None = None  # why the file is left alone


def status(site: Site) -> list[FileStatus]:
    """Look at every file that the patch knows, and change none. Raises PatchError for a file that cannot be read."""
    return [_status(site, target) for target in TARGETS]


def apply(site: Site) -> list[FileStatus]:
    """Patch every file that is not patched yet; return the status after it. Doing it twice is doing it once.

    Raises PatchError, with nothing written, when the decoder's file is not understood, changed or patched by another.
    Files of other classes are then left alone, with the reason in their status.
    """
    found = status(site)
    _refuse(found)
    for file in found:
        if file.state == "unpatched":
            source = file.path.read_bytes()
            _replace(file.path, edit.patched(source, file.target, site.version))
    return status(site)


def revert(site: Site) -> list[FileStatus]:
    """Give every patched file its original bytes back, proven by their hash; return the status after it.

    Raises PatchError, with nothing written, for a file that was changed after it was patched or patched by another.
    """
    found = status(site)
    _refuse(found)
    for file in found:
        if file.state == "patched":
            _replace(file.path, edit.restored(file.path.read_bytes(), file.target))
    return status(site)


def _status(site: Site, target: Target) -> FileStatus:
    path = next((path for name in target.files if (path := site.folder / PACKAGE / name).exists()), None)
    if path is None:
        return FileStatus(target, None, "absent", reason=_absent(target))
    source = _read(path)
    try:
        state = edit.state_of(source, target, site.version)
        result = edit.patched(source, target, site.version) if state == "unpatched" else source
    except PatchError as error:
        return FileStatus(target, path, "not_understood", reason=_about(path, error))
    reason = None if state in ("patched", "unpatched") else _not_ours(path, state, target)
    return FileStatus(target, path, state, tuple(edit.inserted(result)), reason)


def _refuse(found: list[FileStatus]) -> None:
    """Raise the reason why a required file is left alone, or why any was changed after it was patched."""
    for file in found:
        if file.reason is not None and (file.target.is_required or file.state == "changed"):
            raise file.reason


def _not_ours(path: Path, state: FileState, target: Target) -> PatchError:
    if state == "changed":
        return PatchError(
            f"'{path}' was changed after it was patched, or patched by another release; it is left as it is",
            expected="the lines this release inserts, and every other byte as it was",
            found="its first line, and other text around it",
            fix="undo the other change, revert with the release that patched it, or install TensorRT-LLM again",
        )
    return PatchError(
        f"'{path}' is patched by someone else; it is left as it is",
        expected=f"no output marked in {target.class_name}.forward but upstream's own, and no tensor of our names",
        found=f"another mark_output there, or the name {edit.ALL_ROWS} or {edit.LAST_ROWS}",
        fix="revert the other patch, or install TensorRT-LLM again, then apply this one",
    )


def _absent(target: Target) -> PatchError:
    return PatchError(
        f"{target.class_name}: no file of it is installed",
        expected=f"one of {', '.join(target.files)} in the package",
        found="none of them",
        fix="engines of this class cannot be built here; if there should be one, install TensorRT-LLM again",
    )


def _about(path: Path, error: PatchError) -> PatchError:
    return PatchError(f"'{path}': {error.what}", expected=error.expected, found=error.found, fix=error.fix)


def _read(path: Path) -> bytes:
    if path.is_symlink():
        raise PatchError(
            f"'{path}' is a symbolic link, which a rename would replace",
            expected="a file",
            found=f"a link to '{os.readlink(path)}'",
            fix="install TensorRT-LLM with copied files, or name the --site that the link points into",
        )
    try:
        return path.read_bytes()
    except OSError as error:
        raise _file_error(path, error) from error


def _replace(path: Path, content: bytes) -> None:
    sibling = None
    try:
        before = path.stat()
        descriptor, sibling = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
        with open(descriptor, "wb") as file:
            file.write(content)
            os.fchmod(file.fileno(), stat.S_IMODE(before.st_mode))
            if os.geteuid() == 0:
                os.fchown(file.fileno(), before.st_uid, before.st_gid)
            file.flush()
            os.fsync(file.fileno())
        os.replace(sibling, path)
        sibling = None
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise _file_error(path, error) from error
    finally:
        if sibling is not None:
            os.unlink(sibling)


def _file_error(path: Path, error: OSError) -> PatchError:
    return PatchError(
        f"'{path}' cannot be read or replaced; it is as it was",
        expected="a file in a folder that can be written to, with space for one more file",
        found=error,
        fix="run this as the user who installed TensorRT-LLM, and check the disk",
    )
