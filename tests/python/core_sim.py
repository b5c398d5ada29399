"""The core (`ebbtide._core`) on the simulator: the control interface, device memory through plain pointers, and a
model of an allocation."""

import ctypes
import functools
import random
import re
from pathlib import Path

from ebbtide import _core

MIB = 1 << 20
CHUNK = 2 * MIB

OUT_OF_MEMORY = 2
UNKNOWN = 999


def set_limit(setting: str, size_bytes: int) -> None:
    _core.configure(setting, None if size_bytes == _core.UNLIMITED else str(size_bytes).encode())


@functools.cache
def _functions() -> frozenset[str]:
    sources = Path(__file__).parents[2] / "csrc"
    lists = (sources / "driver/functions.def", sources / "sim/program_functions.def", sources / "kernels/blocks.cu")
    return frozenset(re.findall(r"\b(?:cu[A-Z]|ebbtide_)\w+", "".join(each.read_text() for each in lists)))


def _known(function: str) -> bytes:
    """The simulator takes any name, and one that it does not have delays nothing."""
    assert function in _functions(), function
    return function.encode()


class Live(ctypes.Structure):
    """The struct ebbtide_sim_counts."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            "reservations",
            "handles",
            "mappings",
            "streams",
            "events",
            "pinned_blocks",
            "registered_ranges",
            "contexts_retained",
            "queued_items",
            "modules",
            "device_bytes",
            "pinned_bytes",
        )
    ]


class Sim:
    """The simulator that the core has opened or will open."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(Path(_core.loaded_library()).with_name("libebbtide_sim.so")))

    def fail(self, function: str | None, k: int, code: int, times: int = 1) -> None:
        name = None if function is None else _known(function)
        self._library.ebbtide_sim_fail(name, ctypes.c_uint64(k), code, ctypes.c_uint64(times))

    def clear_failures(self) -> None:
        self._library.ebbtide_sim_clear_failures()

    def delay(self, function: str, seconds: float) -> None:
        self._library.ebbtide_sim_set_delay(_known(function), ctypes.c_uint64(int(seconds * 1e6)))

    def set_async(self, mode: int, seed: int = 0) -> None:
        self._library.ebbtide_sim_set_async(mode, ctypes.c_uint64(seed))

    def calls(self, function: str) -> int:
        self._library.ebbtide_sim_calls.restype = ctypes.c_uint64
        return self._library.ebbtide_sim_calls(_known(function))

    def live(self) -> Live:
        counts = Live()
        self._library.ebbtide_sim_live(ctypes.byref(counts))
        return counts


@functools.lru_cache(maxsize=300)
def _pattern(value: int) -> bytes:
    """The content of one chunk for `value`. Except for 0, none of its blocks is one repeated value."""
    return bytes(CHUNK) if value == 0 else random.Random(value).randbytes(CHUNK)


def content(size_bytes: int, value: int) -> bytes:
    whole, rest = divmod(size_bytes, CHUNK)
    return _pattern(value) * whole + _pattern(value)[:rest]


def fill(address: int, size_bytes: int, value: int) -> None:
    ctypes.memmove(address, content(size_bytes, value), size_bytes)


def is_filled(address: int, size_bytes: int, value: int) -> bool:
    return ctypes.string_at(address, size_bytes) == content(size_bytes, value)


class Block:
    """One allocation in the model."""

    def __init__(self, address: int, tag: str, size: int, backup: int) -> None:
        self.address, self.tag, self.size, self.backup = address, tag, size, backup
        self.value = 0  # the pattern that it holds, or held when it was stored
        self.place = "device"
        self.was_seen = False  # through a view, since it was stored
        self.is_trimmed = False

    @property
    def copied_bytes(self) -> int:
        """Zeros are constant blocks, so they are not copied. Once a view has been given out they are, since its holder
        may have written."""
        return self.size if self.value or self.was_seen else 0
