"""Work that meets memory which has gone since it was queued. This harms a context: each test has its own process."""

import ctypes
import sys
import threading
from collections.abc import Callable

from driver_calls import GRANULE, ILLEGAL_ADDRESS, INVALID_VALUE, SUCCESS, Driver, properties

Fresh = Callable[[Callable[[Driver], object]], str]
PATIENCE_S = 20


def harmed(driver: Driver) -> int:
    """A driver whose context met a fault: a fill of memory that was unmapped before it ran. Returns the stream."""
    assert driver.cuInit(0) == SUCCESS
    context = driver.make("cuDevicePrimaryCtxRetain", ctypes.c_void_p, 0)
    assert driver.cuCtxSetCurrent(context) == SUCCESS
    stream, gate = driver.stream(1), threading.Event()
    address, _ = driver.mapped(GRANULE)
    assert driver.launch(stream, lambda: gate.wait(PATIENCE_S)) == SUCCESS
    assert driver.cuMemsetD8Async(address, 1, GRANULE, stream) == SUCCESS
    assert driver.cuMemUnmap(address, GRANULE) == SUCCESS
    gate.set()
    code = driver.cuStreamSynchronize(stream)
    if code != ILLEGAL_ADDRESS:
        sys.exit(f"the fault came as {code}")
    return stream


def call_everything_after_a_fault(driver: Driver) -> None:
    stream = harmed(driver)
    size, pointer, address, number = ctypes.c_size_t(), ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_int()
    memory = ctypes.create_string_buffer(64)
    calls = {
        "cuCtxSynchronize": driver.cuCtxSynchronize,
        "cuStreamQuery": lambda: driver.cuStreamQuery(stream),
        "cuStreamSynchronize": lambda: driver.cuStreamSynchronize(stream),
        "cuStreamCreate": lambda: driver.cuStreamCreate(pointer, 0),
        "cuEventCreate": lambda: driver.cuEventCreate(pointer, 0),
        "cuMemGetInfo": lambda: driver.cuMemGetInfo(size, size),
        "cuMemAlloc": lambda: driver.cuMemAlloc(address, 4096),
        "cuMemHostAlloc": lambda: driver.cuMemHostAlloc(pointer, 4096, 0),
        "cuMemcpyHtoD": lambda: driver.cuMemcpyHtoD(GRANULE, memory, 64),
        "cuCtxGetDevice": lambda: driver.cuCtxGetDevice(number),
        "cuStreamIsCapturing": lambda: driver.cuStreamIsCapturing(stream, number),
        "cuMemCreate": lambda: driver.cuMemCreate(address, GRANULE, properties(), 0),
        "cuMemAddressReserve": lambda: driver.cuMemAddressReserve(address, GRANULE, 0, 0, 0),
        "cuPointerGetAttribute": lambda: driver.cuPointerGetAttribute(number, 2, GRANULE),
        "cuDevicePrimaryCtxRetain": lambda: driver.cuDevicePrimaryCtxRetain(pointer, 0),
        "cuStreamDestroy": lambda: driver.cuStreamDestroy(stream),
        "cuDevicePrimaryCtxRelease": lambda: driver.cuDevicePrimaryCtxRelease(0),
    }
    unharmed = {
        "cuCtxGetDevice": SUCCESS,
        "cuMemCreate": SUCCESS,
        "cuMemAddressReserve": SUCCESS,
        "cuPointerGetAttribute": INVALID_VALUE,
        "cuDevicePrimaryCtxRetain": SUCCESS,
        "cuDevicePrimaryCtxRelease": SUCCESS,
    }
    found = {name: call() for name, call in calls.items()}
    wrong = {name: code for name, code in found.items() if code != unharmed.get(name, ILLEGAL_ADDRESS)}
    if wrong:
        sys.exit(f"unexpected: {wrong}")


def test_a_fault_stays_with_the_context(fresh: Fresh) -> None:
    fresh(call_everything_after_a_fault)


def use_virtual_memory_after_a_fault(driver: Driver) -> None:
    assert driver.cuInit(0) == SUCCESS
    mapped = driver.mapped(GRANULE)
    unmapped = driver.create(GRANULE)
    spare = driver.reserve(GRANULE)
    harmed(driver)
    driver.free_mapped(*mapped, GRANULE)
    assert driver.cuMemMap(spare, GRANULE, 0, unmapped, 0) == SUCCESS
    assert driver.access(spare, GRANULE) == SUCCESS


def test_virtual_memory_can_be_given_back_after_a_fault(fresh: Fresh) -> None:
    fresh(use_virtual_memory_after_a_fault)
