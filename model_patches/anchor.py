"""Anchor: the one statement of upstream's decoder definition beside which the outputs are marked, found by syntax tree.

It is the gather, ``hidden_states = gather_last_token_logits(hidden_states, …)``. Right before it ``hidden_states`` holds
the post-norm state of every row; right after it, of each sequence's last row. What stands around it is checked, because
the same statement in another place would mean another tensor:

* in ``forward`` of the class, directly in the branch of the last pipeline rank: elsewhere the state has no final norm;
* after the transformer's call, and after the context-parallel gather (from 0.16): before it, a rank holds only a part;
* before the output head, which takes the same name.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from packaging.version import Version

from tensorrt_llm_ext.errors import PatchError

STATES = "hidden_states"
GATHER = "gather_last_token_logits"
HEAD = "lm_head"

_ALL_STATES_FROM = Version("0.15.dev0")  # `all_hidden_states` is bound before the gather
_CONTEXT_PARALLEL_FROM = Version("0.16.dev0")


@dataclass(frozen=True)
class Target:
    """A class of upstream's whose ``forward`` is patched, in the first of ``files`` that a version has.

    ``has_versions``: its shape changes with the version as the decoder's does.
    """

    class_name: str
    files: tuple[str, ...]
    is_required: bool
    has_versions: bool


DECODER = Target("DecoderModelForCausalLM", ("models/modeling_utils.py",), is_required=True, has_versions=True)
DECILM = Target(  # a full copy of the decoder's tail: the decoder's patch does not reach it
    "DeciLMForCausalLM", ("models/nemotron_nas/model.py", "models/deci/model.py"), is_required=False, has_versions=False
)
TARGETS = (DECODER, DECILM)


@dataclass(frozen=True)
class Anchor:
    """Where the gather stands: its first and last line, from 1; no other statement shares them."""

    first_line: int
    last_line: int


def find_anchor(tree: ast.Module, target: Target, version: Version) -> Anchor:
    """Find the gather in a parsed file. Raises PatchError that says what was looked for and what was found."""
    look = _Look(target)
    forward = look.one("method forward", _methods(look.one(f"class {target.class_name}", _classes(tree, target))))
    call = look.one(f"call of {GATHER} in forward", _calls(forward.body, GATHER))
    gather = look.one(f"assignment {STATES} = {GATHER}({STATES}, …)", _gathers(forward, call))
    branches = [node for node in forward.body if isinstance(node, ast.If) and gather in node.body]
    branch = look.one("if around it, directly in forward", branches)
    look.true(
        _is_last_rank(branch.test), "if … .is_last_pp_rank(): around it", f"if {ast.unparse(branch.test)}", branch
    )
    before, after = _around(forward, branch, gather)
    look.true(
        bool(_calls(before, "forward", "transformer")), "call of self.transformer.forward before it", "none", branch
    )
    late = _calls(after, "forward", "transformer") + [node for s in after for node in _context_parallel(s)]
    look.true(not late, "nothing of the transformer or of context parallelism after it", _lines(late), gather)
    heads = [call for call in _calls(after, HEAD) if [ast.unparse(argument) for argument in call.args] == [STATES]]
    look.one(f"call self.{HEAD}({STATES}) after it", heads)
    look.true(not _calls(before, HEAD), f"no call of self.{HEAD} before it", "one", branch)
    if target.has_versions:
        _check_version(look, version, before, branch)
    sharing = [
        s for s in branch.body if s is not gather and s.lineno <= gather.end_lineno and s.end_lineno >= gather.lineno
    ]
    look.true(
        not sharing and branch.lineno < gather.lineno, "it on lines of its own", _lines(sharing or [branch]), gather
    )
    return Anchor(gather.lineno, gather.end_lineno)


def marks_beside(tree: ast.Module, target: Target) -> list[ast.Call]:
    """List the calls of ``mark_output`` in the class's ``forward`` that are not upstream's own."""
    calls = [
        call
        for cls in _classes(tree, target)
        for forward in _methods(cls)
        for call in _calls(forward.body, "mark_output")
    ]
    return [call for call in calls if not _is_upstreams_mark(call)]


def _is_upstreams_mark(call: ast.Call) -> bool:
    name = call.args[0] if call.args else None
    if isinstance(name, ast.Constant):
        return name.value in ("logits", "hidden_states_output")
    return isinstance(name, ast.JoinedStr) and "present_key_value_" in ast.unparse(name)


class _Look:
    """Says what was looked for when it is not there."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def one(self, looked_for: str, nodes: list[ast.AST]) -> ast.AST:
        if len(nodes) != 1:
            found = f"{len(nodes)} of them, {_lines(nodes)}" if nodes else "none"
            raise self._refused(f"one {looked_for}", found)
        return nodes[0]

    def true(self, is_right: bool, looked_for: str, found: str, near: ast.AST) -> None:
        if not is_right:
            raise self._refused(looked_for, f"{found} (near line {near.lineno})")

    def _refused(self, looked_for: str, found: str) -> PatchError:
        return PatchError(
            f"{self._target.class_name} is not written as the patch knows it; nothing was changed",
            expected=looked_for,
            found=found,
            fix="install an unmodified TensorRT-LLM of a version that the patch serves; if it is one, report this text",
        )


def _check_version(look: _Look, version: Version, before: list[ast.stmt], branch: ast.If) -> None:
    """The file must have the shape of the version beside it: a mixed installation is not understood."""
    transformer = next(i for i, statement in enumerate(before) if _calls([statement], "forward", "transformer"))
    is_gathered = any(_context_parallel(statement) for statement in before[transformer + 1 :])
    has_all = any(
        isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "all_hidden_states" for node in before
    )
    for wanted, found, what in (
        (version >= _CONTEXT_PARALLEL_FROM, is_gathered, "a context-parallel gather between the transformer and it"),
        (version >= _ALL_STATES_FROM, has_all, "all_hidden_states bound before it"),
    ):
        look.true(wanted == found, f"{what if wanted else 'not ' + what}, as in {version}", "the other form", branch)


def _classes(tree: ast.Module, target: Target) -> list[ast.ClassDef]:
    return [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == target.class_name]


def _methods(cls: ast.ClassDef) -> list[ast.FunctionDef]:
    return [node for node in cls.body if isinstance(node, ast.FunctionDef) and node.name == "forward"]


def _gathers(forward: ast.FunctionDef, call: ast.Call) -> list[ast.Assign]:
    """The assignment that ``call`` is the value of, if it takes the states and gives them the same name again."""
    return [
        node
        for node in ast.walk(forward)
        if isinstance(node, ast.Assign)
        and node.value is call
        and [ast.unparse(target) for target in node.targets] == [STATES]
        and [ast.unparse(argument) for argument in call.args[:1]] == [STATES]
    ]


def _around(forward: ast.FunctionDef, branch: ast.If, gather: ast.stmt) -> tuple[list[ast.stmt], list[ast.stmt]]:
    """The statements that run before and after the gather on the last rank, in order."""
    outer, inner = forward.body.index(branch), branch.body.index(gather)
    return (
        [*forward.body[:outer], *branch.body[:inner]],
        [*branch.body[inner + 1 :], *forward.body[outer + 1 :]],
    )


def _is_last_rank(test: ast.expr) -> bool:
    return isinstance(test, ast.Call) and isinstance(test.func, ast.Attribute) and test.func.attr == "is_last_pp_rank"


def _calls(statements: list[ast.stmt], name: str, receiver: str | None = None) -> list[ast.Call]:
    """Calls of a function or method by name; with ``receiver``, of the method of an attribute of that name."""
    return [
        node
        for statement in statements
        for node in ast.walk(statement)
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", getattr(node.func, "id", None)) == name
        and (receiver is None or getattr(getattr(node.func, "value", None), "attr", None) == receiver)
    ]


def _context_parallel(statement: ast.stmt) -> list[ast.AST]:
    return [node for node in ast.walk(statement) if getattr(node, "attr", None) == "cp_size"]


def _lines(nodes: list[ast.AST]) -> str:
    return "lines " + ", ".join(str(node.lineno) for node in nodes)
