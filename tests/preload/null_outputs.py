"""A program that gives each hooked driver call a null pointer in place of each output, one by one.

Prints JSON: for each call its result with all outputs, and with each of them null: the code, and what the others are
given. `null_outputs.py all` also makes the calls of which no documentation says what a null pointer does.
"""

import ctypes
import json
import sys
from collections.abc import Callable
from typing import Any

MIB = 1 << 20

# Each call and its arguments. "out" is an output, others are keys of `made()`, or numbers.
OPTIONAL: dict[str, list[Any]] = {
    "cuMemGetInfo_v2": ["out", "out"],
    "cuMemGetAddressRange_v2": ["out", "out", "memory"],
    "cuGetProcAddress_v2": ["name", "function", 12000, 0, "out"],
}
REQUIRED: dict[str, list[Any]] = {
    "cuMemAlloc_v2": ["out", MIB],
    "cuMemAllocPitch_v2": ["out", "out", 4096, 256, 4],
    "cuMemAllocAsync": ["out", MIB, "null"],
    "cuMemAllocManaged": ["out", MIB, 1],
    "cuMemCreate": ["out", 2 * MIB, "properties", 0],
    "cuDeviceTotalMem_v2": ["out", 0],
}
UNDOCUMENTED: dict[str, list[Any]] = {
    "cuGetProcAddress": ["name", "out", 11030, 0],
    "cuMemAllocAsync_ptsz": ["out", MIB, "null"],
    "cuMemAllocFromPoolAsync": ["out", MIB, "pool", "null"],
    "cuMemAllocFromPoolAsync_ptsz": ["out", MIB, "pool", "null"],
    "cuMemRetainAllocationHandle": ["out", "mapped"],
    "cuPointerGetAttribute": ["out", 11, "memory"],
    "cuPointerGetAttributes": [1, "attributes", "outputs", "memory"],
    "cuIpcGetMemHandle": ["out", "memory"],
    "cuStreamEndCapture": ["stream", "out"],
    "cuStreamEndCapture_ptsz": ["stream", "out"],
}
WITHOUT_OUTPUTS = {
    "cuMemFree_v2",
    "cuMemFreeAsync",
    "cuMemFreeAsync_ptsz",
    "cuMemRelease",
    "cuCtxEnablePeerAccess",
    "cuStreamBeginCapture_v2",
    "cuStreamBeginCapture_v2_ptsz",
    "cuStreamBeginCaptureToGraph",
    "cuStreamBeginCaptureToGraph_ptsz",
    "cuStreamDestroy_v2",
}

_SIZE = 64  # bytes of an output: as large as the largest, CUipcMemHandle


def made(cuda: Any) -> dict[str, Any]:
    """The arguments that are no outputs."""
    context, memory, pool, stream = (ctypes.c_uint64() for _ in range(4))
    assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert cuda.cuCtxSetCurrent(context) == 0
    assert cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(32 * MIB)) == 0
    assert cuda.cuDeviceGetDefaultMemPool(ctypes.byref(pool), 0) == 0
    assert cuda.cuStreamCreate(ctypes.byref(stream), 1) == 0
    properties = (ctypes.c_int * 8)(1, 0, 1, 0)  # pinned memory of device 0
    attributes = (ctypes.c_int * 1)(11)  # where the range begins
    return {
        "memory": memory,
        "mapped": memory,
        "pool": pool,
        "stream": stream,
        "null": None,
        "properties": properties,
        "attributes": attributes,
        "outputs": (ctypes.c_void_p * 1)(None),
        "name": b"cuMemAlloc",
        "function": ctypes.byref(ctypes.c_void_p()),
    }


def ask(function: Callable[..., int], arguments: list[Any], values: dict[str, Any], without: int | None) -> list[int]:
    """The code, and the first 8 bytes of each output that it was given.

    Args:
        without: the position of the output that is null.
    """
    outputs = {i: ctypes.create_string_buffer(_SIZE) for i, each in enumerate(arguments) if each == "out"}
    given: list[Any] = []
    for i, each in enumerate(arguments):
        if each == "out":
            given.append(None if i == without else outputs[i])
        else:
            given.append(values[each] if isinstance(each, str) else ctypes.c_size_t(each))
    code = function(*given)
    return [code, *(int.from_bytes(outputs[i].raw[:8], "little") for i in outputs if i != without)]


def main() -> None:
    """Prints the results."""
    cuda = ctypes.CDLL("libcuda.so.1")
    values = made(cuda)
    calls = OPTIONAL | REQUIRED | (UNDOCUMENTED if "all" in sys.argv else {})
    results = {}
    for name, arguments in calls.items():
        function = getattr(cuda, name, None)
        if function is None:  # the simulator has no variants of captures for per-thread streams
            continue
        outputs = [i for i, each in enumerate(arguments) if each == "out"]
        all_given = ask(function, arguments, values, None) if name in OPTIONAL else []
        results[name] = [all_given, *(ask(function, arguments, values, i) for i in outputs)]
    results["both"] = [[cuda.cuMemGetInfo_v2(None, None)], [cuda.cuMemGetAddressRange_v2(None, None, values["memory"])]]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
