"""Build: run upstream's trtllm-build, when the version is the recipe's and the outputs are marked."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from model_patches.patch import status
from model_patches.site import find_site
from tensorrt_llm_ext.errors import BuildError, PatchError

_STANDARD_ERROR = 2  # upstream's words go there: standard output is ours


def run_build(command: list[str], version: str, site: Path | None = None) -> None:
    """Run a ``trtllm-build`` command to its end; its output goes to standard error.

    Raises PatchError when TensorRT-LLM is missing, of another version than ``version`` (as 0.16) or not patched: an
    engine without the outputs would cost an hour and be of no use. Raises BuildError when the build fails.
    """
    found = find_site(site)
    if f"{found.version.major}.{found.version.minor}" != version:
        raise PatchError(
            "the recipe is for another version of TensorRT-LLM than the one installed",
            expected=version,
            found=f"{found.version} in '{found.folder}'",
            fix="name the recipe of the installed version",
        )
    decoder = status(found)[0]
    if decoder.state != "patched":
        raise PatchError(
            f"TensorRT-LLM in '{found.folder}' does not mark the hidden states as outputs",
            expected=f"{decoder.target.class_name} patched",
            found=decoder.state,
            fix="run `trtllm-extract patch apply` there first",
        )
    program = shutil.which(command[0])
    if program is None:
        raise PatchError(
            f"'{command[0]}' is not on the path",
            expected="the program that TensorRT-LLM installs",
            found="no such program",
            fix="activate the environment of TensorRT-LLM, or run the printed command there (--print)",
        )
    result = subprocess.run([program, *command[1:]], stdout=_STANDARD_ERROR, check=False)
    if result.returncode:
        raise BuildError(
            "trtllm-build failed",
            expected="exit code 0",
            found=f"exit code {result.returncode}",
            fix="read its words above",
        )
