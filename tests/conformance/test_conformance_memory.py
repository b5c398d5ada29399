"""Physical memory and address ranges: the driver's refusals."""

import ctypes

import pytest
from driver_calls import (
    DEVICE,
    GRANULE,
    HOST,
    HOST_NUMA,
    HOST_NUMA_CURRENT,
    INVALID_DEVICE,
    INVALID_VALUE,
    OUT_OF_MEMORY,
    SUCCESS,
    Driver,
    properties,
)

# --- how much there is ---


def test_each_number_of_the_memory_info_is_optional(driver: Driver) -> None:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    alone_free, alone_total = ctypes.c_size_t(), ctypes.c_size_t()
    assert driver.cuMemGetInfo(free, total) == SUCCESS
    assert driver.cuMemGetInfo(alone_free, None) == SUCCESS
    assert driver.cuMemGetInfo(None, alone_total) == SUCCESS
    assert driver.cuMemGetInfo(None, None) == SUCCESS
    assert alone_total.value == total.value
    assert 0 < alone_free.value <= total.value  # another program may have taken some meanwhile


# --- physical memory ---


@pytest.mark.parametrize("size", [0, 1, 4096, GRANULE + 4096])
def test_create_wants_whole_granules(driver: Driver, size: int) -> None:
    assert driver.cuMemCreate(ctypes.c_uint64(), size, properties(), 0) == INVALID_VALUE


@pytest.mark.parametrize(
    ("location", "code"),
    [
        ((DEVICE, 99), INVALID_DEVICE),
        ((DEVICE, -1), INVALID_DEVICE),
        ((0, 0), INVALID_VALUE),
        ((HOST_NUMA, 99), INVALID_VALUE),
        ((HOST_NUMA_CURRENT, 0), INVALID_VALUE),
        ((77, 0), INVALID_VALUE),
    ],
)
def test_create_checks_its_location(driver: Driver, location: tuple[int, int], code: int) -> None:
    assert driver.cuMemCreate(ctypes.c_uint64(), GRANULE, properties(*location), 0) == code


def test_create_checks_type_flags_and_pointers(driver: Driver) -> None:
    found = {
        "type": driver.cuMemCreate(ctypes.c_uint64(), GRANULE, properties(allocation_type=0), 0),
        "flags": driver.cuMemCreate(ctypes.c_uint64(), GRANULE, properties(), 1),
        "no properties": driver.cuMemCreate(ctypes.c_uint64(), GRANULE, None, 0),
        "no handle": driver.cuMemCreate(None, GRANULE, properties(), 0),
    }
    assert found == dict.fromkeys(found, INVALID_VALUE)


def test_create_beyond_the_device_is_out_of_memory(driver: Driver) -> None:
    handle = ctypes.c_uint64(7)
    assert driver.cuMemCreate(handle, 1 << 42, properties(), 0) == OUT_OF_MEMORY
    assert handle.value == 7


@pytest.mark.device_memory
@pytest.mark.parametrize("location", [HOST_NUMA, HOST])
def test_create_on_the_host_takes_nothing_of_the_device(driver: Driver, location: int) -> None:
    free, total, later = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_size_t()
    assert driver.cuMemGetInfo(free, total) == SUCCESS
    handle = driver.create(8 * GRANULE, location)
    assert driver.cuMemGetInfo(later, total) == SUCCESS
    assert abs(later.value - free.value) < 8 * GRANULE
    assert driver.cuMemRelease(handle) == SUCCESS


@pytest.mark.parametrize("option", [0, 1])
@pytest.mark.parametrize("location", [DEVICE, HOST_NUMA, HOST])
def test_granularity_is_two_mebibytes(driver: Driver, location: int, option: int) -> None:
    assert driver.make("cuMemGetAllocationGranularity", ctypes.c_size_t, properties(location), option) == GRANULE


def test_granularity_checks_its_arguments(driver: Driver) -> None:
    size = ctypes.c_size_t()
    assert driver.cuMemGetAllocationGranularity(size, properties(), 0) == SUCCESS
    assert driver.cuMemGetAllocationGranularity(size, properties(), 9) == INVALID_VALUE
    assert driver.cuMemGetAllocationGranularity(None, properties(), 0) == INVALID_VALUE
    assert driver.cuMemGetAllocationGranularity(size, None, 0) == INVALID_VALUE


def test_release_wants_a_live_handle(driver: Driver) -> None:
    handle = driver.create()
    assert driver.cuMemRelease(handle) == SUCCESS
    assert driver.cuMemRelease(handle) == INVALID_VALUE
    assert driver.cuMemRelease(0) == INVALID_VALUE


def test_released_memory_stays_until_it_is_unmapped(driver: Driver) -> None:
    address, handle = driver.mapped(GRANULE)
    driver.write(address, b"kept")
    assert driver.cuMemRelease(handle) == SUCCESS
    assert driver.read(address, 4) == b"kept"
    assert driver.cuMemMap(address, GRANULE, 0, handle, 0) == INVALID_VALUE
    assert driver.cuMemUnmap(address, GRANULE) == SUCCESS
    assert driver.cuMemAddressFree(address, GRANULE) == SUCCESS


def test_a_mapped_address_gives_its_handle_back(driver: Driver) -> None:
    address, handle = driver.mapped(2 * GRANULE)
    again = driver.make("cuMemRetainAllocationHandle", ctypes.c_uint64, address)
    middle = driver.make("cuMemRetainAllocationHandle", ctypes.c_uint64, address + GRANULE + 5)
    assert again == middle == handle
    assert [driver.cuMemRelease(handle) for _ in range(3)] == [SUCCESS] * 3
    assert driver.cuMemRelease(handle) == INVALID_VALUE
    revived = driver.make("cuMemRetainAllocationHandle", ctypes.c_uint64, address)
    driver.free_mapped(address, revived, 2 * GRANULE)


def test_an_unmapped_address_has_no_handle(driver: Driver) -> None:
    address = driver.reserve(GRANULE)
    memory = driver.allocate(4096)
    assert driver.cuMemRetainAllocationHandle(ctypes.c_uint64(), address) == INVALID_VALUE
    assert driver.cuMemRetainAllocationHandle(ctypes.c_uint64(), memory) == INVALID_VALUE
    assert driver.cuMemFree(memory) == SUCCESS
    assert driver.cuMemAddressFree(address, GRANULE) == SUCCESS


# Invariant 2 (no tag sees another's old bytes) rests on this.
def test_fresh_memory_reads_zeros(driver: Driver) -> None:
    for _ in range(3):
        address, handle = driver.mapped(4 * GRANULE)
        assert driver.read(address, 4 * GRANULE) == bytes(4 * GRANULE)
        assert driver.cuMemsetD8Async(address, 0xA5, 4 * GRANULE, None) == SUCCESS
        assert driver.cuCtxSynchronize() == SUCCESS
        driver.free_mapped(address, handle, 4 * GRANULE)


def test_fresh_host_memory_reads_zeros(driver: Driver) -> None:
    """Also right after the same process gave such memory back full of other bytes."""
    for _ in range(3):
        address, handle = driver.mapped(4 * GRANULE, HOST_NUMA)
        assert driver.read(address, 4 * GRANULE) == bytes(4 * GRANULE)
        assert driver.cuMemsetD8Async(address, 0xA5, 4 * GRANULE, None) == SUCCESS
        assert driver.cuCtxSynchronize() == SUCCESS
        driver.free_mapped(address, handle, 4 * GRANULE)


# --- address ranges ---


@pytest.mark.parametrize(
    ("size", "alignment", "flags"),
    [(0, 0, 0), (4096, 0, 0), (GRANULE + 4096, 0, 0), (GRANULE, 3, 0), (GRANULE, 3 * GRANULE, 0), (GRANULE, 0, 1)],
)
def test_reserve_checks_its_arguments(driver: Driver, size: int, alignment: int, flags: int) -> None:
    assert driver.cuMemAddressReserve(ctypes.c_uint64(), size, alignment, 0, flags) == INVALID_VALUE


@pytest.mark.parametrize("alignment", [0, 4096, GRANULE, 2 * GRANULE, 64 * GRANULE, 1 << 30])
def test_reserve_keeps_the_alignment(driver: Driver, alignment: int) -> None:
    addresses = [driver.reserve(GRANULE, alignment) for _ in range(3)]
    assert [address % max(alignment, GRANULE) for address in addresses] == [0, 0, 0]
    assert [driver.cuMemAddressFree(address, GRANULE) for address in addresses] == [SUCCESS] * 3


def test_reserve_takes_a_free_hint(driver: Driver) -> None:
    address = driver.reserve(8 * GRANULE)
    assert driver.cuMemAddressFree(address, 8 * GRANULE) == SUCCESS
    assert driver.reserve(8 * GRANULE, 0, address) == address
    elsewhere = driver.reserve(8 * GRANULE, 0, address)
    assert elsewhere not in (0, address)
    assert driver.cuMemAddressFree(address, 8 * GRANULE) == SUCCESS
    assert driver.cuMemAddressFree(elsewhere, 8 * GRANULE) == SUCCESS


def test_reserve_takes_sixteen_tebibytes(driver: Driver) -> None:
    address = driver.reserve(1 << 44)
    assert driver.cuMemAddressFree(address, 1 << 44) == SUCCESS


def test_address_free_wants_the_exact_range(driver: Driver) -> None:
    address = driver.reserve(4 * GRANULE)
    assert driver.cuMemAddressFree(address, GRANULE) == INVALID_VALUE
    assert driver.cuMemAddressFree(address, 8 * GRANULE) == INVALID_VALUE
    assert driver.cuMemAddressFree(address + GRANULE, GRANULE) == INVALID_VALUE
    assert driver.cuMemAddressFree(address, 0) == INVALID_VALUE
    assert driver.cuMemAddressFree(address, 4 * GRANULE) == SUCCESS
    assert driver.cuMemAddressFree(address, 4 * GRANULE) == INVALID_VALUE


def test_address_free_wants_no_mapping_inside(driver: Driver) -> None:
    address, handle = driver.mapped(GRANULE)
    assert driver.cuMemAddressFree(address, GRANULE) == INVALID_VALUE
    driver.free_mapped(address, handle, GRANULE)
