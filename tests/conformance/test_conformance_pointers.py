"""cuMemAlloc, pinned memory, copies, and the driver's answers about pointers."""

import ctypes

import pytest
from driver_calls import (
    ALREADY_REGISTERED,
    DEVICE,
    GRANULE,
    HOST_NUMA,
    INVALID_VALUE,
    NOT_FOUND,
    NOT_REGISTERED,
    OUT_OF_MEMORY,
    SUCCESS,
    Driver,
)

MEMORY_TYPE, IS_MANAGED, DEVICE_ORDINAL, RANGE_START, RANGE_SIZE, MAPPED = 2, 8, 9, 11, 12, 13
TYPE_HOST, TYPE_DEVICE = 1, 2


def attribute(driver: Driver, number: int, pointer: int, kind: type = ctypes.c_uint64) -> tuple[int, int]:
    value = kind(0)
    return driver.cuPointerGetAttribute(value, number, pointer), value.value


# --- cuMemAlloc ---


def test_linear_memory_checks_its_arguments(driver: Driver) -> None:
    assert driver.cuMemAlloc(ctypes.c_uint64(), 0) == INVALID_VALUE
    assert driver.cuMemAlloc(ctypes.c_uint64(), 1 << 42) == OUT_OF_MEMORY
    assert driver.cuMemAlloc(None, 4096) == INVALID_VALUE


def test_linear_memory_is_freed_at_its_start_once(driver: Driver) -> None:
    address = driver.allocate(4096)
    assert driver.cuMemFree(address + 256) == INVALID_VALUE
    assert driver.cuMemFree(address) == SUCCESS
    assert driver.cuMemFree(address) == INVALID_VALUE
    assert driver.cuMemFree(0) == SUCCESS
    assert driver.cuMemFree(0xDEAD000) == INVALID_VALUE


def test_linear_free_refuses_virtual_memory(driver: Driver) -> None:
    address, handle = driver.mapped(GRANULE)
    assert driver.cuMemFree(address) == INVALID_VALUE
    driver.free_mapped(address, handle, GRANULE)


def test_virtual_memory_calls_refuse_linear_memory(driver: Driver) -> None:
    address = driver.allocate(GRANULE)
    assert driver.cuMemUnmap(address, GRANULE) == INVALID_VALUE
    assert driver.cuMemAddressFree(address, GRANULE) == INVALID_VALUE
    assert driver.access(address, GRANULE) == INVALID_VALUE
    assert driver.cuMemFree(address) == SUCCESS


# --- pinned memory ---


def test_host_alloc_checks_its_arguments(driver: Driver) -> None:
    pointer = ctypes.c_void_p()
    assert driver.cuMemHostAlloc(pointer, 4096, 0x80) == INVALID_VALUE
    assert driver.cuMemHostAlloc(None, 4096, 0) == INVALID_VALUE


def test_host_alloc_of_nothing_is_nothing(driver: Driver) -> None:
    pointer = ctypes.c_void_p(77)
    assert driver.cuMemHostAlloc(pointer, 0, 0) == SUCCESS
    assert pointer.value is None


def test_host_free_wants_its_own_pointer_once(driver: Driver) -> None:
    address = driver.host_allocate(8192)
    assert driver.cuMemFreeHost(address + 4096) == INVALID_VALUE
    assert driver.cuMemFreeHost(address) == SUCCESS
    assert driver.cuMemFreeHost(address) == INVALID_VALUE
    assert driver.cuMemFreeHost(None) == SUCCESS


@pytest.fixture
def pages(driver: Driver):
    """Page-aligned ordinary memory of four pages."""
    import mmap

    memory = mmap.mmap(-1, 4 * 4096)
    view = (ctypes.c_char * (4 * 4096)).from_buffer(memory)
    yield ctypes.addressof(view)
    driver.cuMemHostUnregister(ctypes.addressof(view))


def test_register_refuses_registered_memory(driver: Driver, pages: int) -> None:
    assert driver.cuMemHostRegister(pages, 2 * 4096, 0) == SUCCESS
    assert driver.cuMemHostRegister(pages, 2 * 4096, 0) == ALREADY_REGISTERED
    assert driver.cuMemHostRegister(pages + 4096, 2 * 4096, 0) == ALREADY_REGISTERED
    assert driver.cuMemHostUnregister(pages) == SUCCESS
    assert driver.cuMemHostUnregister(pages) == NOT_REGISTERED


def test_register_checks_its_arguments(driver: Driver, pages: int) -> None:
    assert driver.cuMemHostRegister(None, 4096, 0) == INVALID_VALUE
    assert driver.cuMemHostRegister(pages, 0, 0) == INVALID_VALUE
    assert driver.cuMemHostRegister(pages, 4096, 0x80) == INVALID_VALUE
    assert driver.cuMemHostUnregister(None) == INVALID_VALUE


def test_unregister_wants_the_start_of_a_registered_range(driver: Driver, pages: int) -> None:
    assert driver.cuMemHostUnregister(pages) == NOT_REGISTERED
    assert driver.cuMemHostRegister(pages, 2 * 4096, 0) == SUCCESS
    assert driver.cuMemHostUnregister(pages + 4096) == INVALID_VALUE
    assert driver.cuMemFreeHost(pages) == INVALID_VALUE
    assert driver.cuMemHostUnregister(pages) == SUCCESS


def test_a_copy_that_begins_in_registered_memory_ends_there(driver: Driver) -> None:
    memory = ctypes.create_string_buffer(5 * GRANULE)
    pages = -(-ctypes.addressof(memory) // 4096) * 4096
    device = driver.mapped(4 * GRANULE)[0]
    stream = driver.stream()
    assert driver.cuMemHostRegister(pages + GRANULE, 2 * GRANULE, 0) == SUCCESS
    apart = [(first, count, SUCCESS) for first, count in ((0, 1), (1, 2), (1, 1), (3, 1), (0, 2))]
    across = [(first, count, INVALID_VALUE) for first, count in ((1, 3), (2, 2))]
    for first, count, answer in apart + across:
        host, size = pages + first * GRANULE, count * GRANULE
        assert driver.cuMemcpyDtoH(host, device, size) == answer, (first, count)
        assert driver.cuMemcpyHtoD(device, host, size) == answer, (first, count)
        assert driver.cuMemcpyDtoHAsync(host, device, size, stream) == answer, (first, count)
        assert driver.cuMemcpyHtoDAsync(device, host, size, stream) == answer, (first, count)
    assert driver.cuStreamSynchronize(stream) == SUCCESS
    assert driver.cuMemHostUnregister(pages + GRANULE) == SUCCESS
    assert driver.cuMemcpyDtoH(pages, device, 4 * GRANULE) == SUCCESS


def test_pinned_memory_of_the_driver_cannot_be_registered(driver: Driver) -> None:
    address = driver.host_allocate(8192)
    assert driver.cuMemHostRegister(address, 4096, 0) == INVALID_VALUE
    assert driver.cuMemHostUnregister(address) == INVALID_VALUE
    assert driver.cuMemFreeHost(address) == SUCCESS


def test_virtual_memory_cannot_be_registered(driver: Driver) -> None:
    address, handle = driver.mapped(GRANULE, HOST_NUMA)
    assert driver.cuMemHostRegister(address, GRANULE, 0) == INVALID_VALUE
    driver.free_mapped(address, handle, GRANULE)


# --- copies ---


def test_pinned_memory_counts_as_the_devices_own(driver: Driver) -> None:
    address, handle = driver.mapped(GRANULE)
    pinned = driver.host_allocate(64)
    memory = ctypes.create_string_buffer(b"through the pinned block", 24)
    assert driver.cuMemcpyHtoD(pinned, memory, 24) == SUCCESS
    assert driver.cuMemcpyDtoDAsync(address, pinned, 24, None) == SUCCESS
    assert driver.read(address, 24) == memory.raw
    assert driver.cuMemsetD8Async(pinned, 9, 4, None) == SUCCESS
    assert driver.read(pinned, 6) == b"\x09\x09\x09\x09ug"
    assert driver.cuMemFreeHost(pinned) == SUCCESS
    driver.free_mapped(address, handle, GRANULE)


def test_copies_move_bytes(driver: Driver) -> None:
    address, handle = driver.mapped(2 * GRANULE)
    pinned = driver.host_allocate(64)
    ctypes.memmove(pinned, bytes(range(64)), 64)
    assert driver.cuMemcpyHtoDAsync(address + 1, pinned, 64, None) == SUCCESS
    assert driver.cuMemcpyDtoDAsync(address + GRANULE + 7, address + 1, 64, None) == SUCCESS
    assert driver.cuMemsetD8Async(address + GRANULE + 8, 0xEE, 2, None) == SUCCESS
    assert driver.cuMemcpyDtoHAsync(pinned, address + GRANULE + 7, 64, None) == SUCCESS
    assert driver.cuStreamSynchronize(None) == SUCCESS
    assert ctypes.string_at(pinned, 64) == bytes([0, 0xEE, 0xEE, *range(3, 64)])
    assert driver.cuMemFreeHost(pinned) == SUCCESS
    driver.free_mapped(address, handle, 2 * GRANULE)


def test_copies_of_nothing_succeed(driver: Driver) -> None:
    memory = ctypes.create_string_buffer(8)
    assert driver.cuMemcpyHtoD(0xDEAD000, memory, 0) == SUCCESS
    assert driver.cuMemcpyHtoDAsync(0xDEAD000, memory, 0, None) == SUCCESS
    assert driver.cuMemsetD8Async(0xDEAD000, 0, 0, None) == SUCCESS


def test_copies_between_ordinary_memory_and_the_unknown_are_refused(driver: Driver) -> None:
    memory = ctypes.create_string_buffer(64)
    address = driver.reserve(2 * GRANULE)
    found = {
        "to reserved": driver.cuMemcpyHtoD(address, memory, 64),
        "from reserved": driver.cuMemcpyDtoH(memory, address, 64),
        "to reserved, later": driver.cuMemcpyHtoDAsync(address, memory, 64, None),
        "from reserved, later": driver.cuMemcpyDtoHAsync(memory, address, 64, None),
        "on the device": driver.cuMemcpyDtoDAsync(address, address + GRANULE, 64, None),
        "fill": driver.cuMemsetD8Async(address, 1, 64, None),
    }
    assert driver.cuMemAddressFree(address, 2 * GRANULE) == SUCCESS
    assert found == dict.fromkeys(found, INVALID_VALUE)


def test_copies_past_the_mapped_part_are_refused(driver: Driver) -> None:
    address, handle = driver.reserve(2 * GRANULE), driver.create(GRANULE)
    assert driver.cuMemMap(address, GRANULE, 0, handle, 0) == SUCCESS
    assert driver.access(address, GRANULE) == SUCCESS
    memory = ctypes.create_string_buffer(64)
    found = {
        "to": driver.cuMemcpyHtoD(address + GRANULE - 32, memory, 64),
        "from": driver.cuMemcpyDtoH(memory, address + GRANULE - 32, 64),
        "fill": driver.cuMemsetD8Async(address + GRANULE - 32, 1, 64, None),
    }
    assert driver.cuMemUnmap(address, GRANULE) == SUCCESS
    assert driver.cuMemRelease(handle) == SUCCESS
    assert driver.cuMemAddressFree(address, 2 * GRANULE) == SUCCESS
    assert found == dict.fromkeys(found, INVALID_VALUE)


def test_copies_without_access_are_refused(driver: Driver) -> None:
    address, handle = driver.reserve(GRANULE), driver.create(GRANULE)
    assert driver.cuMemMap(address, GRANULE, 0, handle, 0) == SUCCESS
    memory = ctypes.create_string_buffer(64)
    found = {
        "to": driver.cuMemcpyHtoD(address, memory, 64),
        "from": driver.cuMemcpyDtoH(memory, address, 64),
        "fill": driver.cuMemsetD8Async(address, 1, 64, None),
    }
    driver.free_mapped(address, handle, GRANULE)
    assert found == dict.fromkeys(found, INVALID_VALUE)


# --- pointers ---


@pytest.mark.parametrize(("location", "kind"), [(DEVICE, TYPE_DEVICE), (HOST_NUMA, TYPE_HOST)])
def test_virtual_memory_says_where_it_is(driver: Driver, location: int, kind: int) -> None:
    address, handle = driver.mapped(2 * GRANULE, location)
    inside = address + GRANULE + 3
    found = {
        "type": attribute(driver, MEMORY_TYPE, inside, ctypes.c_uint),
        "managed": attribute(driver, IS_MANAGED, inside, ctypes.c_uint),
        "ordinal": attribute(driver, DEVICE_ORDINAL, inside, ctypes.c_int)[0],
        "start": attribute(driver, RANGE_START, inside),
        "size": attribute(driver, RANGE_SIZE, inside),
    }
    driver.free_mapped(address, handle, 2 * GRANULE)
    assert found == {
        "type": (SUCCESS, kind),
        "managed": (SUCCESS, 0),
        "ordinal": SUCCESS,
        "start": (SUCCESS, address),
        "size": (SUCCESS, 2 * GRANULE),
    }


def test_linear_and_pinned_memory_say_what_they_are(driver: Driver) -> None:
    address, pinned = driver.allocate(10000), driver.host_allocate(10000)
    found = [
        attribute(driver, MEMORY_TYPE, address + 9, ctypes.c_uint),
        attribute(driver, MEMORY_TYPE, pinned + 9, ctypes.c_uint),
        attribute(driver, DEVICE_ORDINAL, address + 9, ctypes.c_int),
        attribute(driver, RANGE_START, address + 9),
        attribute(driver, RANGE_SIZE, address + 9),
        attribute(driver, RANGE_START, pinned + 9),
        attribute(driver, RANGE_SIZE, pinned + 9),
    ]
    assert driver.cuMemFree(address) == SUCCESS
    assert driver.cuMemFreeHost(pinned) == SUCCESS
    values = [TYPE_DEVICE, TYPE_HOST, 0, address, 10000, pinned, 10000]
    assert found == [(SUCCESS, value) for value in values]


def test_reserved_and_unknown_memory_have_no_type(driver: Driver) -> None:
    address = driver.reserve(GRANULE)
    memory = ctypes.create_string_buffer(64)
    pointers = (address, ctypes.addressof(memory), 0)
    types = [attribute(driver, MEMORY_TYPE, pointer)[0] for pointer in pointers]
    starts = [attribute(driver, RANGE_START, pointer)[0] for pointer in pointers]
    assert driver.cuMemAddressFree(address, GRANULE) == SUCCESS
    assert types == [INVALID_VALUE] * 3
    assert starts[1:] == [INVALID_VALUE] * 2


def test_address_range_of_linear_memory_is_the_allocation(driver: Driver) -> None:
    address = driver.allocate(10000)
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    found = driver.cuMemGetAddressRange(base, size, address + 77), base.value, size.value
    assert driver.cuMemFree(address) == SUCCESS
    assert found == (SUCCESS, address, 10000)
    assert driver.cuMemGetAddressRange(base, size, 0xDEAD000) == NOT_FOUND


def test_address_range_of_virtual_memory_is_one_mapping(driver: Driver) -> None:
    address = driver.reserve(2 * GRANULE)
    for index in range(2):
        handle = driver.create(GRANULE)
        assert driver.cuMemMap(address + index * GRANULE, GRANULE, 0, handle, 0) == SUCCESS
        assert driver.cuMemRelease(handle) == SUCCESS
    assert driver.access(address, 2 * GRANULE) == SUCCESS
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    found = driver.cuMemGetAddressRange(base, size, address + GRANULE + 77), base.value, size.value
    assert driver.cuMemUnmap(address, 2 * GRANULE) == SUCCESS
    assert driver.cuMemAddressFree(address, 2 * GRANULE) == SUCCESS
    assert found == (SUCCESS, address + GRANULE, GRANULE)


def test_address_range_of_host_chunk_has_base_zero(driver: Driver) -> None:
    address, handle = driver.mapped(GRANULE, HOST_NUMA)
    base, size = ctypes.c_uint64(77), ctypes.c_size_t()
    found = driver.cuMemGetAddressRange(base, size, address), base.value
    driver.free_mapped(address, handle, GRANULE)
    assert found == (SUCCESS, 0)
