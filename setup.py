"""Builds cpp/ into tensorrt_llm_ext._runtime with any C++17 compiler; CUDA is found at run time, not at build time."""

from glob import glob

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup

ParallelCompile().install()  # one compiler a core

setup(
    ext_modules=[
        Pybind11Extension(
            "tensorrt_llm_ext._runtime",
            sorted(glob("cpp/*.cpp")),
            include_dirs=["cpp"],
            depends=sorted(glob("cpp/*.h")),
            cxx_std=17,
            extra_compile_args=["-O3"],
            libraries=["dl", "pthread"],
            extra_link_args=["-Wl,--exclude-libs,ALL"],  # a static libstdc++ stays private: torch brings another copy
        )
    ]
)
