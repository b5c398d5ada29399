"""Starting the driver, its answers about itself, and contexts."""

import ctypes
import sys
import threading
from collections.abc import Callable

import pytest
from driver_calls import (
    GRANULE,
    INVALID_CONTEXT,
    INVALID_DEVICE,
    INVALID_VALUE,
    NOT_INITIALIZED,
    SUCCESS,
    Driver,
    properties,
)

needs_contexts = pytest.mark.cuda_only("a thread of HIP has a current device, and no context")
Fresh = Callable[[Callable[[Driver], object]], str]


def outcomes(calls: dict[str, Callable[[], int]]) -> dict[str, int]:
    return {name: call() for name, call in calls.items()}


def expect(found: dict[str, int], expected: dict[str, int]) -> None:
    wrong = {name: (code, expected[name]) for name, code in found.items() if code != expected[name]}
    if wrong:
        sys.exit(f"(found, expected): {wrong}")


def call_before_init(driver: Driver) -> None:
    number, flags, pointer = ctypes.c_int(), ctypes.c_uint(), ctypes.c_void_p()
    calls = {
        "cuDeviceGetCount": lambda: driver.cuDeviceGetCount(number),
        "cuDeviceGet": lambda: driver.cuDeviceGet(number, 0),
        "cuDevicePrimaryCtxRetain": lambda: driver.cuDevicePrimaryCtxRetain(pointer, 0),
        "cuDevicePrimaryCtxGetState": lambda: driver.cuDevicePrimaryCtxGetState(0, flags, number),
        "cuDeviceCanAccessPeer": lambda: driver.cuDeviceCanAccessPeer(number, 0, 0),
        "cuCtxGetCurrent": lambda: driver.cuCtxGetCurrent(pointer),
        "cuCtxSetCurrent": lambda: driver.cuCtxSetCurrent(None),
        "cuCtxSynchronize": lambda: driver.cuCtxSynchronize(),
        "cuMemGetInfo": lambda: driver.cuMemGetInfo(ctypes.c_size_t(), ctypes.c_size_t()),
        "cuMemAddressReserve": lambda: driver.cuMemAddressReserve(ctypes.c_uint64(), GRANULE, 0, 0, 0),
        "cuMemCreate": lambda: driver.cuMemCreate(ctypes.c_uint64(), GRANULE, properties(), 0),
        "cuMemHostAlloc": lambda: driver.cuMemHostAlloc(pointer, 4096, 0),
        "cuMemAlloc": lambda: driver.cuMemAlloc(ctypes.c_uint64(), 4096),
        "cuStreamSynchronize": lambda: driver.cuStreamSynchronize(None),
        "cuStreamCreate": lambda: driver.cuStreamCreate(pointer, 0),
        "cuEventCreate": lambda: driver.cuEventCreate(pointer, 0),
        "cuStreamIsCapturing": lambda: driver.cuStreamIsCapturing(None, number),
        "cuPointerGetAttribute": lambda: driver.cuPointerGetAttribute(number, 2, 4096),
    }
    expect(outcomes(calls), dict.fromkeys(calls, NOT_INITIALIZED))
    expect(
        outcomes(
            {
                "cuDriverGetVersion": lambda: driver.cuDriverGetVersion(number),
                "cuGetErrorName": lambda: driver.cuGetErrorName(1, pointer),
                "cuInit(0)": lambda: driver.cuInit(0),
                "cuInit(1)": lambda: driver.cuInit(1),
            }
        ),
        {"cuDriverGetVersion": SUCCESS, "cuGetErrorName": SUCCESS, "cuInit(0)": SUCCESS, "cuInit(1)": INVALID_VALUE},
    )


@pytest.mark.cuda_only("HIP starts at the first call")
def test_calls_before_init_are_refused(fresh: Fresh) -> None:
    fresh(call_before_init)


def call_without_context(driver: Driver) -> None:
    assert driver.cuInit(0) == SUCCESS
    number, pointer, size = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_size_t()
    memory = ctypes.create_string_buffer(4096)
    calls = {
        "cuCtxGetDevice": lambda: driver.cuCtxGetDevice(number),
        "cuCtxSynchronize": lambda: driver.cuCtxSynchronize(),
        "cuMemGetInfo": lambda: driver.cuMemGetInfo(size, size),
        "cuMemAlloc": lambda: driver.cuMemAlloc(ctypes.c_uint64(), 4096),
        "cuMemHostAlloc": lambda: driver.cuMemHostAlloc(pointer, 4096, 0),
        "cuMemHostRegister": lambda: driver.cuMemHostRegister(memory, 4096, 0),
        "cuMemGetAddressRange": lambda: driver.cuMemGetAddressRange(ctypes.c_uint64(), size, 4096),
        "cuMemcpyHtoD": lambda: driver.cuMemcpyHtoD(4096, memory, 16),
        "cuMemcpyDtoHAsync": lambda: driver.cuMemcpyDtoHAsync(memory, 4096, 16, None),
        "cuMemsetD8Async": lambda: driver.cuMemsetD8Async(4096, 0, 16, None),
        "cuStreamCreate": lambda: driver.cuStreamCreate(pointer, 0),
        "cuStreamSynchronize": lambda: driver.cuStreamSynchronize(None),
        "cuStreamQuery": lambda: driver.cuStreamQuery(None),
        "cuStreamIsCapturing": lambda: driver.cuStreamIsCapturing(None, number),
        "cuEventCreate": lambda: driver.cuEventCreate(pointer, 0),
    }
    expect(outcomes(calls), dict.fromkeys(calls, INVALID_CONTEXT))
    assert driver.make("cuCtxGetCurrent", ctypes.c_void_p) == 0


def free_without_context(driver: Driver) -> None:
    assert driver.cuInit(0) == SUCCESS
    context = driver.make("cuDevicePrimaryCtxRetain", ctypes.c_void_p, 0)
    memory = ctypes.create_string_buffer(3 * 4096)
    page = (ctypes.addressof(memory) + 4095) // 4096 * 4096
    assert driver.cuCtxSetCurrent(context) == SUCCESS
    linear, pinned = driver.allocate(4096), driver.host_allocate(4096)
    assert driver.cuMemHostRegister(page, 4096, 0) == SUCCESS
    assert driver.cuCtxSetCurrent(None) == SUCCESS
    found = {
        "cuMemFree": driver.cuMemFree(linear),
        "cuMemFreeHost": driver.cuMemFreeHost(pinned),
        "cuMemHostUnregister": driver.cuMemHostUnregister(page),
    }
    expect(found, dict.fromkeys(found, SUCCESS))


@needs_contexts
def test_what_frees_memory_needs_no_current_context(fresh: Fresh) -> None:
    fresh(free_without_context)


@needs_contexts
def test_calls_that_need_a_context_are_refused_without_one(fresh: Fresh) -> None:
    fresh(call_without_context)


def use_memory_management_without_context(driver: Driver) -> None:
    assert driver.cuInit(0) == SUCCESS
    granularity = driver.make("cuMemGetAllocationGranularity", ctypes.c_size_t, properties(), 0)
    assert granularity == GRANULE
    address, handle = driver.mapped(GRANULE)
    assert driver.get_access(address) == (SUCCESS, 3)
    driver.free_mapped(address, handle, GRANULE)
    assert driver.make("cuCtxGetCurrent", ctypes.c_void_p) == 0


@needs_contexts
def test_virtual_memory_needs_no_current_context(fresh: Fresh) -> None:
    fresh(use_memory_management_without_context)


def release_contexts(driver: Driver) -> None:
    assert driver.cuInit(0) == SUCCESS
    flags, active = ctypes.c_uint(), ctypes.c_int()
    assert driver.cuDevicePrimaryCtxGetState(0, flags, active) == SUCCESS
    assert active.value == 0
    expect({"release": driver.cuDevicePrimaryCtxRelease(0)}, {"release": INVALID_CONTEXT})
    first = driver.make("cuDevicePrimaryCtxRetain", ctypes.c_void_p, 0)
    second = driver.make("cuDevicePrimaryCtxRetain", ctypes.c_void_p, 0)
    assert first == second != 0
    assert driver.cuCtxSetCurrent(first) == SUCCESS
    assert driver.cuDevicePrimaryCtxRelease(0) == SUCCESS
    assert driver.cuCtxSynchronize() == SUCCESS
    assert driver.cuDevicePrimaryCtxRelease(0) == SUCCESS
    assert driver.cuDevicePrimaryCtxGetState(0, flags, active) == SUCCESS
    assert active.value == 0
    gone = {
        "synchronize": driver.cuCtxSynchronize(),
        "info": driver.cuMemGetInfo(ctypes.c_size_t(), ctypes.c_size_t()),
        "release": driver.cuDevicePrimaryCtxRelease(0),
    }
    expect(gone, {"synchronize": 709, "info": 709, "release": INVALID_CONTEXT})
    again = driver.make("cuDevicePrimaryCtxRetain", ctypes.c_void_p, 0)
    assert again == first
    assert driver.cuCtxSetCurrent(again) == SUCCESS
    assert driver.cuDevicePrimaryCtxRelease(0) == SUCCESS


@needs_contexts
def test_a_primary_context_lives_as_long_as_it_is_retained(fresh: Fresh) -> None:
    fresh(release_contexts)


def test_devices_answer_by_ordinal(driver: Driver) -> None:
    count = driver.make("cuDeviceGetCount", ctypes.c_int)
    assert count >= 1
    assert driver.make("cuDeviceGet", ctypes.c_int, count - 1) == count - 1
    assert driver.cuDeviceGet(ctypes.c_int(), count) == INVALID_DEVICE
    assert driver.cuDeviceGet(ctypes.c_int(), -1) == INVALID_DEVICE
    name = ctypes.create_string_buffer(64)
    assert driver.cuDeviceGetName(name, 64, 0) == SUCCESS
    assert name.value
    assert driver.cuDeviceGetName(name, 64, count) == INVALID_DEVICE
    uuid = ctypes.create_string_buffer(16)
    assert driver.cuDeviceGetUuid(uuid, 0) == SUCCESS and any(uuid.raw)
    assert driver.cuDeviceGetUuid(uuid, count) == INVALID_DEVICE
    assert driver.cuDeviceGetUuid(None, 0) == INVALID_VALUE
    assert driver.cuDeviceTotalMem(ctypes.c_size_t(), count) == INVALID_DEVICE
    assert driver.make("cuDeviceTotalMem", ctypes.c_size_t, 0) > 0
    assert driver.cuDevicePrimaryCtxRetain(ctypes.c_void_p(), count) == INVALID_DEVICE


def test_device_attributes_are_checked(driver: Driver) -> None:
    assert driver.cuDeviceGetAttribute(ctypes.c_int(), 102, 99) == INVALID_DEVICE
    assert driver.cuDeviceGetAttribute(ctypes.c_int(), 9999, 0) == INVALID_VALUE
    assert driver.cuDeviceGetAttribute(None, 102, 0) == INVALID_VALUE
    assert driver.attribute(102) == 1  # VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED


@pytest.mark.cuda_only("HIP has other numbers for attributes, of which ebbtide knows those that it uses")
def test_devices_have_attributes(driver: Driver) -> None:
    assert driver.attribute(41) == 1  # UNIFIED_ADDRESSING
    assert driver.attribute(16) >= 1  # MULTIPROCESSOR_COUNT


def test_memory_info_is_within_the_device(driver: Driver) -> None:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    assert driver.cuMemGetInfo(free, total) == SUCCESS
    assert 0 < free.value <= total.value
    assert total.value == driver.make("cuDeviceTotalMem", ctypes.c_size_t, 0)


@pytest.mark.cuda_only("HIP has names and texts of its own")
@pytest.mark.parametrize(
    ("code", "name", "text"),
    [
        (0, b"CUDA_SUCCESS", b"no error"),
        (1, b"CUDA_ERROR_INVALID_VALUE", b"invalid argument"),
        (2, b"CUDA_ERROR_OUT_OF_MEMORY", b"out of memory"),
        (3, b"CUDA_ERROR_NOT_INITIALIZED", b"initialization error"),
        (600, b"CUDA_ERROR_NOT_READY", b"device not ready"),
        (700, b"CUDA_ERROR_ILLEGAL_ADDRESS", b"an illegal memory access was encountered"),
        (801, b"CUDA_ERROR_NOT_SUPPORTED", b"operation not supported"),
        (900, b"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", b"operation not permitted when stream is capturing"),
    ],
)
def test_errors_have_names_and_texts(driver: Driver, code: int, name: bytes, text: bytes) -> None:
    found = ctypes.c_char_p()
    assert driver.cuGetErrorName(code, found) == SUCCESS
    assert found.value == name
    assert driver.cuGetErrorString(code, found) == SUCCESS
    assert found.value == text


def test_an_unknown_error_has_no_name(driver: Driver) -> None:
    found = ctypes.c_char_p(b"before")
    assert driver.cuGetErrorName(98765, found) == INVALID_VALUE
    assert found.value is None


@needs_contexts
def test_the_current_context_belongs_to_the_thread(driver: Driver) -> None:
    mine = driver.make("cuCtxGetCurrent", ctypes.c_void_p)
    assert mine != 0
    theirs = []
    thread = threading.Thread(target=lambda: theirs.append(driver.make("cuCtxGetCurrent", ctypes.c_void_p)))
    thread.start()
    thread.join()
    assert theirs == [0]
    assert driver.make("cuCtxGetDevice", ctypes.c_int) == 0


@needs_contexts
def test_setting_no_context_is_allowed(driver: Driver) -> None:
    mine = driver.make("cuCtxGetCurrent", ctypes.c_void_p)
    assert driver.cuCtxSetCurrent(None) == SUCCESS
    assert driver.cuCtxSynchronize() == INVALID_CONTEXT
    assert driver.cuCtxSetCurrent(mine) == SUCCESS
