"""Can this machine run the engine? Asked of the CUDA driver first: without a driver, TensorRT ends the process."""

from __future__ import annotations

import ctypes
import platform
import sys
from dataclasses import dataclass

from tensorrt_llm_ext.errors import IncompatibleEngine
from tensorrt_llm_ext.recipes.card import Card, load_card
from tensorrt_llm_ext.recipes.contract import Contract
from tensorrt_llm_ext.recipes.toml_file import DATA

DRIVER = "libcuda.so.1"

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
_NAME_BYTES = 256


class NoCard(Exception):
    """Why there is no card to ask."""


@dataclass(frozen=True)
class PresentCard:
    """The card that engines run on here: device 0 of the driver."""

    name: str
    compute_capability: str  # for example "12.0"
    cuda_version: str  # the newest that the driver speaks


def present_card() -> PresentCard:
    """Ask the driver for its first device. Raises NoCard with the reason."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError as error:
        raise NoCard(f"no NVIDIA driver ({error})") from error
    count, device, version = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    major, minor, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(_NAME_BYTES)
    _call(driver, "cuInit", 0)
    _call(driver, "cuDriverGetVersion", ctypes.byref(version))
    _call(driver, "cuDeviceGetCount", ctypes.byref(count))
    if not count.value:
        raise NoCard("a driver without a card")
    _call(driver, "cuDeviceGet", ctypes.byref(device), 0)
    _call(driver, "cuDeviceGetName", name, _NAME_BYTES, device)
    _call(driver, "cuDeviceGetAttribute", ctypes.byref(major), _MAJOR, device)
    _call(driver, "cuDeviceGetAttribute", ctypes.byref(minor), _MINOR, device)
    cuda_version = f"{version.value // 1000}.{version.value % 1000 // 10}"
    return PresentCard(name.value.decode(errors="replace"), f"{major.value}.{minor.value}", cuda_version)


def check_machine(contract: Contract, library: str) -> None:
    """Raise IncompatibleEngine unless host and card are what the engine was built for.

    ``library`` says which TensorRT is installed here, so that one error names all that must fit.
    """
    host = f"{sys.platform}-{platform.machine()}"
    try:
        card = present_card()
    except NoCard as reason:
        raise _cannot_run(contract, f"{reason}; host {host}, {library}", _elsewhere()) from reason
    present = f"{card.name}, compute capability {card.compute_capability}, CUDA {card.cuda_version}"
    found = f"{present}; host {host}, {library}"
    if card.compute_capability not in contract.compute_capabilities:
        raise _cannot_run(contract, found, _for_this_card(card))
    if contract.platform not in ("any", host):
        raise _cannot_run(contract, found, "build the engine on this machine: a plan belongs to one kind of host")


def _call(driver: ctypes.CDLL, name: str, *arguments: object) -> None:
    code = getattr(driver, name)(*arguments)
    if code != 0:
        raise NoCard(f"the NVIDIA driver refuses {name} with CUDA error {code}")


def _cannot_run(contract: Contract, found: str, fix: str) -> IncompatibleEngine:
    capabilities = ", ".join(contract.compute_capabilities)
    titles = " or ".join(card.title for card in _cards(contract.compute_capabilities))
    return IncompatibleEngine(
        f"this machine cannot run the engine of {contract.model_name}: it was built for another",
        expected=f"compute capability {capabilities}{f' ({titles})' if titles else ''}; host {contract.platform}, "
        f"{contract.accepted_runtime}",
        found=found,
        fix=fix,
    )


def _for_this_card(card: PresentCard) -> str:
    named = [known.name for known in _cards((card.compute_capability,))]
    if not named:
        return f"no card of this release has compute capability {card.compute_capability}; {_elsewhere()}"
    other = f" (or {', '.join(named[1:])})" if named[1:] else ""
    return f"build one for this card: `trtllm-extract build --checkpoint … --card {named[0]}`{other}"


def _elsewhere() -> str:
    return (
        "run it on a machine with such a card; `trtllm-extract show` reads its contract anywhere, and "
        "`trtllm-extract build --checkpoint … --card cpu` builds one for a machine without a card"
    )


def _cards(capabilities: tuple[str, ...]) -> list[Card]:
    """The cards of build_recipes/ with one of these compute capabilities."""
    known = (load_card(path) for path in sorted((DATA / "cards").glob("*.toml")))
    return [card for card in known if card.compute_capability in capabilities]
