"""The stand-in driver as tests see it: built with g++, controlled through ctypes."""

import ctypes
import subprocess
from pathlib import Path


def compile_shared(source: Path, folder: Path, *options: str) -> Path:
    """Compile one C++ file into a shared library in ``folder``; return its path."""
    library = folder / f"lib{source.stem}.so"
    command = ["g++", "-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-fPIC", "-shared", "-pthread", *options]
    subprocess.run([*command, str(source), "-o", str(library)], check=True, timeout=120)
    return library


KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

ILLEGAL_ADDRESS, OUT_OF_MEMORY, UNKNOWN = 700, 2, 999


class StandIn:
    """Control of the stand-in driver at ``path``: fail, break, delay, count, and launch kernels."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._library = library = ctypes.CDLL(self.path)
        library.stand_in_calls.restype = library.stand_in_live.restype = ctypes.c_long
        library.stand_in_failed_call.restype = ctypes.c_char_p
        library.stand_in_resolve.restype = ctypes.c_void_p
        library.stand_in_resolve.argtypes = [ctypes.c_ulonglong, ctypes.c_size_t]
        library.stand_in_launch.argtypes = [ctypes.c_void_p, KERNEL, ctypes.c_void_p]
        self._kernels = []  # alive for as long as the stream may call them

    def reset(self) -> None:
        self._library.stand_in_reset()
        self._kernels.clear()

    def fail(self, call: str, n: int = 1, code: int = UNKNOWN, *, is_sticky: bool = False) -> None:
        """The n-th call of ``call`` from now ("" for any) returns ``code``; sticky: so does every later one."""
        self._library.stand_in_fail(call.encode(), n, code, is_sticky)

    def forget(self) -> None:
        """Give up all that is live, as the end of a process would."""
        self._library.stand_in_forget()

    def break_device(self, code: int) -> None:
        self._library.stand_in_break(code)

    def delay(self, longest_us: int) -> None:
        self._library.stand_in_delay(longest_us)

    def lose_writes(self, count: int) -> None:
        self._library.stand_in_lose_writes(count)

    def lose_copies_out(self, count: int) -> None:
        self._library.stand_in_lose_copies_out(count)

    def refuse_memory_operations(self, is_refused: bool) -> None:
        self._library.stand_in_refuse_memory_operations(is_refused)

    def calls(self, name: str = "") -> int:
        return self._library.stand_in_calls(name.encode())

    def failed_call(self) -> str:
        """The call that failed last because a test asked for it; empty when none did."""
        return self._library.stand_in_failed_call().decode()

    def live(self) -> dict[str, int]:
        kinds = ("streams", "registered", "allocations")
        return {kind: self._library.stand_in_live(kind.encode()) for kind in kinds}

    def violations(self) -> str:
        text = ctypes.create_string_buffer(4096)
        self._library.stand_in_violations(text, len(text))
        return text.value.decode()

    def launch(self, stream: int, function) -> None:
        """Call ``function()`` on the stream, as a kernel."""
        kernel = KERNEL(lambda _: function())
        self._kernels.append(kernel)
        assert self._library.stand_in_launch(stream, kernel, None) == 0

    def resolve(self, address: int, num_bytes: int) -> int:
        """Where a kernel finds a device range."""
        found = self._library.stand_in_resolve(address, num_bytes)
        assert found is not None, f"a kernel was given a dead address: {address:#x}"
        return found
