"""A stand-in for an installed TensorRT-LLM 0.16: a package that must not be imported, and its plugin library."""

from pathlib import Path

from stand_in import compile_shared

PLUGINS = """
extern "C" {
int strcmp(const char*, const char*);
static int count;  // static: the process may hold this library twice
int num_registered() { return count; }
bool initTrtLlmPlugins(void*, const char* name) { count += strcmp(name, "tensorrt_llm") == 0; return RESULT; }
}
"""


def write_upstream_site(site: Path) -> Path:
    """Write the package into ``site``; return the path of its plugin library."""
    package, info = site / "tensorrt_llm", site / "tensorrt_llm-0.16.0.dist-info"
    (package / "libs").mkdir(parents=True)
    info.mkdir()
    (package / "__init__.py").write_text("raise ImportError('it takes seconds to import, and nothing here needs it')")
    (info / "METADATA").write_text("Name: tensorrt_llm\nVersion: 0.16.0\n")
    plugins = package / "libs" / "libnvinfer_plugin_tensorrt_llm.so"
    write_plugins(plugins)
    return plugins


def write_plugins(path: Path, result: str = "true") -> None:
    """Compile a plugin library that counts registrations and answers ``result``."""
    source = path.with_name(f"plugins_{result}.cpp")
    source.write_text(PLUGINS.replace("RESULT", result))
    compile_shared(source, path.parent).replace(path)
