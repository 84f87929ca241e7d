"""Which TensorRT compiles for a card: TensorRT-RTX, which needs no GPU, or the full TensorRT on a GPU of the card's kind."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

from tensorrt_llm_ext.errors import BuildError, MissingExtra

RTX_CAPABILITIES = ("8.0", "8.6", "8.9", "12.0", "12.1")  # of TensorRT-RTX 1.7; 7.5 lacks bfloat16
FULL_CAPABILITIES = ("9.0", "10.0")
FIRST_WITH_FP8 = (8, 9)
FIRST_STREAMING = "10.13"  # of the full TensorRT: 10.12 cannot hand a plan over piece by piece

_CAPABILITY_ATTRIBUTES = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR


@dataclass(frozen=True)
class Library:
    """A TensorRT that compiles plans, by the name that contracts use; both have the same API."""

    name: str
    module: ModuleType
    names_targets: bool
    """Whether the card is a setting of the builder, and not the GPU that is present."""

    @property
    def version(self) -> str:
        return self.module.__version__


def library_for(compute_capabilities: tuple[str, ...]) -> Library:
    """Import the TensorRT that compiles for these cards.

    Raises BuildError for cards that no TensorRT served here compiles for, or not together, and MissingExtra for a
    library that is not installed.
    """
    wanted = set(compute_capabilities)
    if wanted and wanted <= set(RTX_CAPABILITIES):
        return Library("tensorrt_rtx", _imported("tensorrt_rtx_bindings", "pip install 'tensorrt_llm_ext[trt-rtx]'"), True)
    if len(wanted) == 1 and wanted <= set(FULL_CAPABILITIES):
        fix = "install tensorrt from NVIDIA on a machine with such a GPU, or build for a card with backend torch (h200)"
        module = _imported("tensorrt", fix)
        _check_streams(module)
        _check_present(compute_capabilities[0])
        return Library("tensorrt", module, False)
    raise BuildError(
        "no TensorRT builds one plan for these compute capabilities",
        expected=f"any of {', '.join(RTX_CAPABILITIES)}, or one of {', '.join(FULL_CAPABILITIES)}",
        found=", ".join(compute_capabilities) or "none: a card without a compute capability",
        fix="choose another card, or build once for each",
    )


def check_fp8(compute_capabilities: tuple[str, ...]) -> None:
    """Raise BuildError for a card that has no FP8, before a builder is asked."""
    lacking = [text for text in compute_capabilities if tuple(map(int, text.split("."))) < FIRST_WITH_FP8]
    if lacking:
        raise BuildError(
            f"compute capability {', '.join(lacking)} has no FP8",
            expected="compute capability 8.9 or higher for precision fp8",
            found=", ".join(lacking),
            fix="build with --precision bfloat16, or for another card",
        )


def _check_streams(module: ModuleType) -> None:
    """Raise BuildError for a TensorRT that would hold the whole plan in memory, and has no call to write it otherwise."""
    if not hasattr(module.Builder, "build_serialized_network_to_stream"):
        raise BuildError(
            "this TensorRT cannot write a plan to disk piece by piece",
            expected=f"tensorrt {FIRST_STREAMING} or later",
            found=f"tensorrt {module.__version__}",
            fix="install a later one; its plans run with that version alone",
        )


def _check_present(wanted: str) -> None:
    """Raise BuildError unless the first GPU here is of this kind: the full TensorRT compiles for it, whatever is asked."""
    found = present_capability()
    if found != wanted:
        raise BuildError(
            f"TensorRT builds for the GPU that is present, and this one is not of compute capability {wanted}",
            expected=f"a GPU of compute capability {wanted}",
            found=f"compute capability {found}" if found else "no GPU, or no driver",
            fix="build on a machine that has this card",
        )


def present_capability() -> str | None:
    """Ask the driver for the compute capability of the first GPU; None without a driver or a GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, numbers = ctypes.c_int(), (ctypes.c_int(), ctypes.c_int())
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
        return None
    for number, attribute in zip(numbers, _CAPABILITY_ATTRIBUTES, strict=True):
        if driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device):
            return None
    return ".".join(str(number.value) for number in numbers)


def _imported(module: str, fix: str) -> ModuleType:
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingExtra(
            f"building for this card needs '{module}', which is not installed",
            expected=f"the module '{module}'",
            found=error,
            fix=fix,
        ) from error
