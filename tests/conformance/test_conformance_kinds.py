"""The other kinds of memory: with a pitch, managed, in the order of a stream; and several attributes at once."""

import ctypes

import pytest
from driver_calls import GRANULE, INVALID_VALUE, NOT_SUPPORTED, OUT_OF_MEMORY, SUCCESS, Driver

ATTACH_GLOBAL, ATTACH_HOST = 1, 2
MEMORY_TYPE, HOST_POINTER, IS_MANAGED, DEVICE_ORDINAL, RANGE_SIZE = 2, 4, 8, 9, 12
TYPE_DEVICE = 2
IPC_HANDLE = ctypes.c_char * 64


# --- with a pitch ---


@pytest.mark.parametrize("width", [1, 512, 513, 4096])
def test_pitched_rows_begin_at_multiples_of_512(driver: Driver, width: int) -> None:
    address, pitch = ctypes.c_uint64(), ctypes.c_size_t()
    assert driver.cuMemAllocPitch(address, pitch, width, 3, 4) == SUCCESS
    assert pitch.value == (width + 511) // 512 * 512
    assert driver.cuMemFree(address.value) == SUCCESS


def test_pitched_memory_checks_its_arguments(driver: Driver) -> None:
    address, pitch = ctypes.c_uint64(), ctypes.c_size_t()
    found = {
        "element": driver.cuMemAllocPitch(address, pitch, 64, 3, 3),
        "width": driver.cuMemAllocPitch(address, pitch, 0, 3, 4),
        "height": driver.cuMemAllocPitch(address, pitch, 64, 0, 4),
    }
    assert found == dict.fromkeys(found, INVALID_VALUE)
    assert driver.cuMemAllocPitch(address, pitch, 1 << 21, 1 << 21, 4) == OUT_OF_MEMORY


# --- managed ---


def test_managed_memory_is_written_read_and_freed(driver: Driver) -> None:
    address = driver.make("cuMemAllocManaged", ctypes.c_uint64, GRANULE, ATTACH_GLOBAL)
    driver.write(address, b"managed")
    assert driver.read(address, 7) == b"managed"
    is_managed = ctypes.c_uint(9)
    assert driver.cuPointerGetAttribute(is_managed, IS_MANAGED, address) == SUCCESS
    assert is_managed.value == 1
    assert driver.cuMemFree(address) == SUCCESS


def test_managed_memory_checks_its_arguments(driver: Driver) -> None:
    address = ctypes.c_uint64()
    assert driver.cuMemAllocManaged(address, 0, ATTACH_GLOBAL) == INVALID_VALUE
    assert driver.cuMemAllocManaged(address, 4096, 0) == INVALID_VALUE
    assert driver.cuMemAllocManaged(address, 4096, ATTACH_GLOBAL | ATTACH_HOST) == INVALID_VALUE


# --- in the order of a stream ---


def test_memory_of_a_stream_is_used_and_freed_in_its_order(driver: Driver) -> None:
    stream = driver.stream(1)
    address = driver.make("cuMemAllocAsync", ctypes.c_uint64, GRANULE, stream)
    assert driver.cuMemsetD8Async(address, 7, GRANULE, stream) == SUCCESS
    assert driver.cuStreamSynchronize(stream) == SUCCESS
    assert driver.read(address, 4) == bytes([7]) * 4
    assert driver.cuMemFreeAsync(address, stream) == SUCCESS
    assert driver.cuStreamSynchronize(stream) == SUCCESS
    assert driver.cuStreamDestroy(stream) == SUCCESS


def test_memory_of_a_pool_may_be_freed_like_any_other(driver: Driver) -> None:
    pool = driver.make("cuDeviceGetDefaultMemPool", ctypes.c_void_p, 0)
    address = driver.make("cuMemAllocFromPoolAsync", ctypes.c_uint64, GRANULE, pool, None)
    assert driver.cuMemFree(address) == SUCCESS


def test_managed_memory_is_not_freed_in_the_order_of_a_stream(driver: Driver) -> None:
    address = driver.make("cuMemAllocManaged", ctypes.c_uint64, GRANULE, ATTACH_GLOBAL)
    assert driver.cuMemFreeAsync(address, None) == NOT_SUPPORTED
    assert driver.cuMemFree(address) == SUCCESS


def test_memory_of_a_stream_checks_its_arguments(driver: Driver) -> None:
    address = ctypes.c_uint64()
    assert driver.cuMemAllocAsync(address, 0, None) == SUCCESS  # whatever the address is then
    assert driver.cuMemAllocAsync(address, 1 << 42, None) == OUT_OF_MEMORY
    assert driver.cuMemAllocAsync(None, 4096, None) == INVALID_VALUE
    assert driver.cuMemFreeAsync(0xDEAD000, None) == INVALID_VALUE


# --- several attributes at once, and handles for other processes ---


def attributes(driver: Driver, pointer: int, *numbers: int) -> tuple[int, list[int]]:
    values = [ctypes.c_uint64(0) for _ in numbers]
    into = (ctypes.c_void_p * len(numbers))(*(ctypes.addressof(value) for value in values))
    asked = (ctypes.c_int * len(numbers))(*numbers)
    code = driver.cuPointerGetAttributes(len(numbers), asked, into, pointer)
    return code, [value.value for value in values]


def test_several_attributes_at_once(driver: Driver) -> None:
    address = driver.allocate(4096)
    code, values = attributes(driver, address, MEMORY_TYPE, RANGE_SIZE, HOST_POINTER, DEVICE_ORDINAL)
    assert (code, values) == (SUCCESS, [TYPE_DEVICE, 4096, 0, 0])
    assert driver.cuMemFree(address) == SUCCESS


def test_attributes_of_an_unknown_pointer_are_defaults(driver: Driver) -> None:
    ordinary = ctypes.create_string_buffer(64)
    code, (kind, device) = attributes(driver, ctypes.addressof(ordinary), MEMORY_TYPE, DEVICE_ORDINAL)
    assert (code, kind, ctypes.c_int(device & 0xFFFFFFFF).value) == (SUCCESS, 0, -2)


def test_virtual_memory_has_no_handle_for_other_processes(driver: Driver) -> None:
    handle = IPC_HANDLE()
    linear = driver.allocate(GRANULE)
    assert driver.cuIpcGetMemHandle(handle, linear) == SUCCESS
    assert driver.cuMemFree(linear) == SUCCESS
    address, physical = driver.mapped(GRANULE)
    assert driver.cuIpcGetMemHandle(handle, address) == INVALID_VALUE
    driver.free_mapped(address, physical, GRANULE)
