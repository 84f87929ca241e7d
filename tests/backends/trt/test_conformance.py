"""Every attribute of TensorRT's that the backend uses, as it uses it, exists in the real bindings of both generations.

The uses are collected from the backend's own source, so that this cannot go stale: whatever is asked of a name that stands
for an object of the library (``trt``, ``runtime``, ``engine``, ``context``) or of the attribute that keeps one. The
bindings are imported, never called: creating a Runtime without a driver ends the process.
"""

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

from tensorrt_llm_ext.backends import trt as room

FOLDER = Path(room.__file__).parent

OBJECTS = {"runtime": "Runtime", "engine": "ICudaEngine", "context": "IExecutionContext"}


def classes_of(node):
    """The library's class that an expression stands for, by its name: ``engine``, ``self._engine``; ``trt`` is the module."""
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return "" if name == "trt" else OBJECTS.get(name.lstrip("_"))


def uses():
    """(dotted name in the library's module, number of arguments or None where it is not called), of the whole room."""
    found = set()
    for path in FOLDER.glob("*.py"):
        tree = ast.parse(path.read_text())
        called = {id(node.func): len(node.args) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load):
                continue
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                continue  # self._engine itself, not what is asked of it
            dotted, owner = node.attr, node.value
            while isinstance(owner, ast.Attribute) and classes_of(owner) is None:
                dotted, owner = f"{owner.attr}.{dotted}", owner.value
            owner = classes_of(owner)
            if owner is not None and id(node) not in inner:
                found.add((f"{owner}.{dotted}".lstrip("."), called.get(id(node))))
    return sorted(found, key=str)


USES = uses()
REQUIRED = {  # so that a collection that finds nothing cannot pass
    "Runtime", "Runtime.deserialize_cuda_engine", "ICudaEngine.create_execution_context", "ICudaEngine.get_tensor_name",
    "ICudaEngine.num_io_tensors", "ICudaEngine.get_tensor_profile_shape", "ICudaEngine.device_memory_size_v2",
    "IExecutionContext.set_optimization_profile_async", "IExecutionContext.set_input_shape",
    "IExecutionContext.set_tensor_address", "IExecutionContext.execute_async_v3", "IExecutionContext.get_tensor_shape",
    "DataType.BF16", "TensorIOMode.INPUT", "TensorLocation.HOST", "ExecutionContextAllocationStrategy.STATIC",
    "ILogger", "ILogger.__init__", "ILogger.ERROR", "ILogger.INTERNAL_ERROR",
}  # fmt: skip


@pytest.fixture(scope="module", params=["tensorrt_rtx_bindings", "tensorrt_lean_bindings"])
def bindings(request):
    return pytest.importorskip(request.param, reason="the runtime half of TensorRT is not installed")


def overloads(method):
    """The parameter lists of a bound method's signatures, without self, as pybind11 writes them into its docstring."""
    name = method.__name__
    signatures = re.findall(rf"^(?:\d+\. )?{name}\((.*)\) -> ", method.__doc__ or "", re.MULTILINE)
    kept = [signature for signature in signatures if not signature.startswith("*args")]
    return [[p for p in _split(signature) if not p.startswith("self")] for signature in kept]


def _split(signature):
    return [part.strip() for part in re.split(r",\s*(?=\w+:)", signature) if part.strip()]


def accepts(method, num_arguments):
    for parameters in overloads(method):
        num_optional = sum(" = " in parameter for parameter in parameters)
        if len(parameters) - num_optional <= num_arguments <= len(parameters):
            return True
    return False


def resolve(module, dotted):
    value = module
    for name in dotted.split("."):
        value = getattr(value, name)
    return value


def test_the_collection_finds_what_the_backend_is_known_to_use():
    assert REQUIRED <= {dotted for dotted, _ in USES}


@pytest.mark.parametrize(("dotted", "num_arguments"), USES, ids=[f"{dotted}({count})" for dotted, count in USES])
def test_what_the_backend_uses_exists_with_that_signature(dotted, num_arguments, bindings):
    value = resolve(bindings, dotted)
    if inspect.isclass(value):
        value = value.__init__
    if num_arguments is not None:
        num_arguments -= dotted.endswith(".__init__")  # a base class is initialised with self written out
        assert accepts(value, num_arguments), value.__doc__


def test_a_signature_that_is_not_there_is_seen(bindings):
    assert not accepts(bindings.IExecutionContext.set_tensor_address, 1)
    assert not accepts(bindings.IExecutionContext.execute_async_v3, 2)
    with pytest.raises(AttributeError):
        resolve(bindings, "IExecutionContext.execute_async_v2")


def test_a_refusal_is_none_or_false_and_sizes_come_as_lists(bindings):
    """What the backend takes from a call: by the bindings' own words and return types."""
    returns = {
        "Runtime.deserialize_cuda_engine": ("ICudaEngine", "None if it could not be deserialized"),
        "IExecutionContext.set_input_shape": ("bool", ""),
        "IExecutionContext.set_tensor_address": ("bool", ""),
        "IExecutionContext.set_optimization_profile_async": ("bool", ""),
        "IExecutionContext.execute_async_v3": ("bool", ""),
        "ICudaEngine.get_tensor_profile_shape": ("list[", "minimum/optimum/maximum"),
        "ICudaEngine.get_tensor_shape": ("Dims", ""),
    }
    for dotted, (kind, words) in returns.items():
        text = resolve(bindings, dotted).__doc__
        assert re.search(rf"-> .*{re.escape(kind)}", text) and words in text, text
    assert tuple(bindings.Dims([1, 2, -1])) == (1, 2, -1)


def test_a_logger_of_ours_is_one_of_the_librarys(bindings):
    from tensorrt_llm_ext.backends.trt.library import make_log

    log = make_log(bindings)
    severity = bindings.ILogger.Severity
    for kind, words in ((severity.WARNING, "w"), (severity.ERROR, "e "), (severity.INTERNAL_ERROR, "i")):
        log.log(kind, words)
    assert log.take() == "e; i" and log.take() == "no reason given"


def test_the_stand_in_has_what_the_backend_uses_and_nothing_that_the_bindings_lack(bindings):
    stand_in = import_module("stand_in_trt")
    for name, ours in (("Runtime", stand_in._Runtime), ("ICudaEngine", stand_in._Engine), ("IExecutionContext", stand_in._Context)):
        public = {method for method in vars(ours) if not method.startswith("_")}
        assert public and public <= set(dir(getattr(bindings, name)))
        for method in public:
            theirs = {re.match(r"\w+", p)[0] for parameters in overloads(getattr(getattr(bindings, name), method)) for p in parameters}
            assert set(inspect.signature(getattr(ours, method)).parameters) - {"self"} <= theirs, method
