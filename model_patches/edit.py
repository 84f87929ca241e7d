"""Edit: the lines that are inserted, and source text with and without them, byte for byte.

Nothing of the file is rewritten: whole lines are inserted between its lines, in its own indentation and line endings.
The first of them carries the hash of the file as it was, so that taking them out again can be proven.
"""

from __future__ import annotations

import ast
import hashlib
import re
import warnings
from dataclasses import dataclass
from typing import Literal

from packaging.version import Version

from model_patches.anchor import STATES, Anchor, Target, find_anchor, marks_beside
from tensorrt_llm_ext.errors import PatchError

ALL_ROWS = "final_post_all"  # [T, hidden]; the names are those of the taps' columns
LAST_ROWS = "final_post_last"  # [B, hidden]

_MARKER = "# trtllm-extract patch 1, original sha256:"
_KEPT = "trtllm_extract_rows"
_BEFORE = (
    f"{STATES}.mark_output('{ALL_ROWS}', self.config.dtype)",
    f"{_KEPT} = {STATES}",
)
_AFTER = (
    f"if {STATES} is not {_KEPT}:  # with gather_context_logits nothing is gathered: one tensor, marked once",
    f"    {STATES}.mark_output('{LAST_ROWS}', self.config.dtype)",
)
_MARKER_LINE = re.compile(rb"[ \t]*" + re.escape(_MARKER).encode() + rb"([0-9a-f]{64})[\r\n]+")

State = Literal["unpatched", "patched", "changed", "foreign"]
"""``changed``: patched, and then edited by someone; ``foreign``: marked by another patch."""


@dataclass(frozen=True)
class InsertedLine:
    """A line of ours, indented as it stands, and the number it has, or would have, in the patched file."""

    number: int
    text: str


def state_of(source: bytes, target: Target, version: Version) -> State:
    """Say whether ``source`` carries the patch. Raises PatchError for a file that is not understood."""
    tree = _parsed(source, target)
    if _MARKER_LINE.search(source):
        return "patched" if _is_ours(source, target, version) else "changed"
    names = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    if names & {ALL_ROWS, LAST_ROWS} or marks_beside(tree, target):
        return "foreign"
    find_anchor(tree, target, version)
    return "unpatched"


def patched(source: bytes, target: Target, version: Version) -> bytes:
    """Insert the lines into an unpatched file, and prove that nothing else changed. Raises PatchError."""
    anchor = find_anchor(_parsed(source, target), target, version)
    lines = _lines(source)
    first = lines[anchor.first_line - 1]
    indent, end = first[: len(first) - len(first.lstrip(b" \t"))], _line_end(first)
    before, after = (
        [indent + text.encode("ascii") + end for text in texts]
        for texts in ((_MARKER + hashlib.sha256(source).hexdigest(), *_BEFORE), _AFTER)
    )
    lines[anchor.last_line : anchor.last_line] = after
    lines[anchor.first_line - 1 : anchor.first_line - 1] = before
    result = b"".join(lines)
    _prove(source, result, target, anchor)
    return result


def restored(source: bytes, target: Target) -> bytes:
    """Take the lines out of a patched file; the bytes are those that were patched, by their hash. Raises PatchError."""
    match = _MARKER_LINE.search(source)
    own = {line.number for line in inserted(source)}
    original = b"".join(line for number, line in enumerate(_lines(source), 1) if number not in own)
    found = hashlib.sha256(original).hexdigest()
    if match is None or found != match[1].decode():
        raise PatchError(
            f"the file of {target.class_name} was changed after it was patched; nothing was changed now",
            expected=f"sha256:{match[1].decode()} without the patch's lines" if match else "the patch's first line",
            found=f"sha256:{found}",
            fix="undo the other change, or install this version of TensorRT-LLM again",
        )
    return original


def inserted(source: bytes) -> list[InsertedLine]:
    """List the lines of ours in a patched file."""
    texts = {*_BEFORE, *(text.strip() for text in _AFTER)}
    return [
        InsertedLine(number, line.decode("ascii").rstrip())
        for number, line in enumerate(_lines(source), 1)
        if _MARKER_LINE.fullmatch(line) or line.strip().decode("latin-1") in texts
    ]


def _is_ours(source: bytes, target: Target, version: Version) -> bool:
    try:
        return patched(restored(source, target), target, version) == source
    except PatchError:
        return False


def _prove(source: bytes, result: bytes, target: Target, anchor: Anchor) -> None:
    """Check an insertion: it compiles, our statements stand around the gather, and every other one is as it was."""
    try:
        tree = _parsed(result, target)
        ours = {
            anchor.first_line + 1: _BEFORE[0],
            anchor.first_line + 2: _BEFORE[1],
            anchor.last_line + 4: "\n".join(_AFTER),
        }
        taken = _TakenOut(set(ours))
        rest = taken.visit(tree)
        same = ast.dump(rest) == ast.dump(_parsed(source, target))
        right = [ast.unparse(node) for node in taken.nodes] == [ast.unparse(ast.parse(text)) for text in ours.values()]
        exact = restored(result, target) == source
    except PatchError as error:
        raise _unproven(target, error.found) from error
    if not (same and right and exact):
        raise _unproven(target, "other statements than these changed")


class _TakenOut(ast.NodeTransformer):
    """Takes the statements that begin on the given lines out of a tree, and keeps them in ``nodes``."""

    def __init__(self, lines: set[int]) -> None:
        self._lines = lines
        self.nodes: list[ast.stmt] = []

    def generic_visit(self, node: ast.AST) -> ast.AST | None:
        if isinstance(node, ast.stmt) and node.lineno in self._lines:
            self.nodes.append(node)
            return None
        return super().generic_visit(node)


def _parsed(source: bytes, target: Target) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about upstream's own lines
            compile(source, target.class_name, "exec", dont_inherit=True)
            return ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise PatchError(
            f"the file of {target.class_name} is not Python that can be read here",
            expected="Python source",
            found=error,
            fix="run this with the Python that TensorRT-LLM runs with, or install TensorRT-LLM again",
        ) from error


def _lines(source: bytes) -> list[bytes]:
    """Divide source as Python numbers its lines: at CR, LF or CR LF and nowhere else; ends are kept."""
    return re.findall(rb"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+", source)


def _line_end(line: bytes) -> bytes:
    return line[len(line.rstrip(b"\r\n")) :]


def _unproven(target: Target, found: object) -> PatchError:
    return PatchError(
        f"the lines cannot be inserted into {target.class_name} without changing something else; nothing was changed",
        expected="the gather on lines of its own, and Python's reading of all other statements unchanged",
        found=found,
        fix="install an unmodified TensorRT-LLM of a version that the patch serves; if it is one, report this text",
    )
