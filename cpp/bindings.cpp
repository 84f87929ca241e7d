// The Python door of the C++ runtime: pybind11 appears in this file alone.
#include <pybind11/pybind11.h>

PYBIND11_MODULE(_runtime, module) { module.doc() = "The C++ runtime: pinned arena, stream, doorbell, packer."; }
