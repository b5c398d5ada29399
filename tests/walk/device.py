"""The device under the walk: its bytes, its faults, and the resources of the process."""

import ctypes
import gc
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ebbtide import _core, saver

MIB = 1 << 20
GRANULE = 2 * MIB
PAGE = 4096
CAPACITY = 80 * MIB  # less than a walk holds at its height: the size of the simulated device, or device_limit
LARGE_CAPACITY = 64 * CAPACITY  # enough for all that a walk holds

ANONYMOUS = "anonymous memory"
SLACK = {ANONYMOUS: 512 * MIB}  # torch and CUDA allocate memory of their own at first use
IS_SIM = os.environ.get("EBBTIDE_DRIVER") == "sim"

_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

_NOISE = np.frombuffer(
    np.random.Generator(np.random.PCG64(1)).bytes(52 * MIB), dtype=np.uint8
)  # the largest tensor and 16 MiB


def pattern(kind: str, value: int, size_bytes: int) -> np.ndarray:
    """The bytes for `value`: "noise", "constant" (one byte), or "blocks" (both, alternating by granule)."""
    if kind == "constant":
        return np.full(size_bytes, value % 256, dtype=np.uint8)
    start = (value * 4099) % (16 * MIB)
    made = _NOISE[start : start + size_bytes].copy()
    if kind == "blocks":
        for begin in range(0, size_bytes, 2 * GRANULE):
            made[begin : begin + GRANULE] = value % 256
    return made


def read(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of a contiguous resident tensor of bytes. On the simulated device, torch is not used, because reading
    must leave no trace in the storage."""
    if not IS_SIM:
        return tensor.cpu().numpy()
    return np.frombuffer((ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr()), dtype=np.uint8)


def holds(tensor: torch.Tensor, expected: np.ndarray, thorough: bool = True) -> bool:
    """Whether the tensor contains these bytes. If the check need not be thorough, compares a page at each end of a
    large one."""
    size = len(expected)
    if not thorough and size > 16 * PAGE:
        return holds(tensor[:PAGE], expected[:PAGE]) and holds(tensor[size - PAGE :], expected[size - PAGE :])
    if IS_SIM:
        return _libc.memcmp(tensor.data_ptr(), expected.ctypes.data, size) == 0
    return bool(np.array_equal(read(tensor), expected))


def write(tensor: torch.Tensor, data: np.ndarray) -> None:
    """Writes through torch, as a program does."""
    tensor.copy_(torch.from_numpy(data))


class _Live(ctypes.Structure):
    """The struct ebbtide_sim_counts."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            *("reservations", "handles", "mappings", "streams", "events", "pinned_blocks", "registered_ranges"),
            *("contexts_retained", "queued_items", "modules", "device_bytes", "pinned_bytes"),
        )
    ]


class Simulator:
    """The control interface (csrc/sim/control.h)."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(Path(_core.loaded_library()).with_name("libebbtide_sim.so")))

    def fail(self, function: str | None, k: int, code: int, times: int) -> None:
        name = None if function is None else function.encode()
        self._library.ebbtide_sim_fail(name, ctypes.c_uint64(k), code, ctypes.c_uint64(times))

    def clear_failures(self) -> None:
        self._library.ebbtide_sim_clear_failures()

    def set_foreign_bytes(self, size_bytes: int) -> None:
        self._library.ebbtide_sim_set_foreign_bytes(0, ctypes.c_uint64(size_bytes))

    def set_capacity(self, size_bytes: int) -> None:
        self._library.ebbtide_sim_set_capacity(0, ctypes.c_uint64(size_bytes))

    def live(self) -> dict[str, int]:
        counts = _Live()
        self._library.ebbtide_sim_live(ctypes.byref(counts))
        return {name: getattr(counts, name) for name, _ in _Live._fields_}


def room_bytes(spills: bool = False) -> int:
    """The bytes that ebbtide may still take on the device. `spills`: for a region that overflows, which leaves a
    reserve free."""
    info = _core.query_device(0)
    if spills:
        return info.room_bytes
    room = info.free_bytes
    if info.limit_bytes != _core.UNLIMITED:
        room = min(room, max(0, info.limit_bytes - info.held_bytes))
    return room


def segment_bytes(size_bytes: int) -> int:
    """The size that torch requests if it has no free block."""
    if size_bytes <= MIB:
        return 2 * MIB
    if size_bytes < 10 * MIB:
        return 20 * MIB
    return -(-size_bytes // (2 * MIB)) * 2 * MIB


def _anonymous_bytes() -> int:
    gc.collect()
    _libc.malloc_trim(0)  # memory that malloc keeps is no leak
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def resources() -> dict[str, Any]:
    """The resources that must not grow."""
    stats = saver.stats()
    return {
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "threads": threading.active_count(),
        "host bytes": stats["host_held_bytes"] - stats["staging_bytes"] - stats["host_pool_bytes"],
        "device bytes": stats["device_bytes"],
        "stored bytes": stats["stored_bytes"],
        ANONYMOUS: _anonymous_bytes(),
    }
