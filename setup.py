"""Builds cpp/ into tensorrt_llm_ext._runtime with any C++17 compiler; CUDA is found at run time, not at build time."""

from glob import glob

from pybind11.setup_helpers import Pybind11Extension
from setuptools import setup

setup(
    ext_modules=[
        Pybind11Extension(
            "tensorrt_llm_ext._runtime",
            sorted(glob("cpp/*.cpp")),
            include_dirs=["cpp"],
            depends=sorted(glob("cpp/*.h")),
            cxx_std=17,
            libraries=["dl", "pthread"],
        )
    ]
)
