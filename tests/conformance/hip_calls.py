"""HIP's functions in the place of CUDA's: those of another shape are adapted, as in csrc/driver/hip.cpp.

A context is a device's number plus one there: HIP has no contexts, and each thread has a current device.
"""

import ctypes
import os
import re
from collections.abc import Callable
from pathlib import Path

Call = Callable[..., int]

FUNCTION_LIST = Path(__file__).resolve().parents[2] / "csrc/driver/functions.def"
# Whether the driver under test is HIP's library, or the simulator by HIP's names.
_DRIVER = os.environ.get("EBBTIDE_TEST_DRIVER", "sim")
SPEAKS_HIP = _DRIVER == "hip" or (_DRIVER == "sim" and os.environ.get("EBBTIDE_SIM_HIP") == "1")

# By CUDA's number, HIP's: VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED.
ATTRIBUTES = {102: 89}
NO_ATTRIBUTE = -1
# Of HIP's functions, in the letters of driver_calls.SIGNATURES.
SIGNATURES = {
    "cuDeviceGetAttribute": "pii",
    "cuDevicePrimaryCtxRetain": "pi",
    "cuCtxGetCurrent": "p",
    "cuCtxSetCurrent": "i",
    "cuCtxEnablePeerAccess": "iI",
    "cuStreamWaitValue32": "pdIII",
}


def hip_names() -> dict[str, str]:
    """CUDA's name of each function in the list, and HIP's."""
    rows = re.findall(r"^EBBTIDE_FUNCTION\((\w+), \d+, \w+, (\w+), \w+\)", FUNCTION_LIST.read_text(), re.MULTILINE)
    return dict(rows)


def adapt(name: str, hip: Call) -> Call:
    """A call of CUDA's shape by HIP's function `hip`."""

    def get_current(context: ctypes.c_void_p) -> int:
        device = ctypes.c_int()
        code = hip(device)
        context.value = device.value + 1
        return code

    def retain(context: ctypes.c_void_p, device: int) -> int:
        code = hip(ctypes.c_void_p(), device)
        context.value = device + 1
        return code

    adapters: dict[str, Call] = {
        "cuDeviceGetAttribute": lambda value, which, device: hip(value, ATTRIBUTES.get(which, NO_ATTRIBUTE), device),
        "cuDevicePrimaryCtxRetain": retain,
        "cuCtxGetCurrent": get_current,
        "cuCtxSetCurrent": lambda context: hip(context - 1) if context else 0,
        "cuCtxEnablePeerAccess": lambda context, flags: hip(context - 1, flags),
        "cuStreamWaitValue32": lambda stream, address, value, flags: hip(stream, address, value, flags, 0xFFFFFFFF),
    }
    return adapters.get(name, hip)


def find_hip() -> str:
    """libamdhip64: the one that this process has loaded, as torch has its own, or the system's."""
    loaded = re.search(r"/\S*/libamdhip64\S*$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    return loaded.group() if loaded else "libamdhip64.so"
