"""Mappings and access: the driver's refusals."""

import ctypes

import pytest
from driver_calls import (
    DEVICE,
    GRANULE,
    HOST,
    HOST_NUMA,
    INVALID_DEVICE,
    INVALID_VALUE,
    NOT_SUPPORTED,
    PROT_NONE,
    PROT_READ,
    PROT_READWRITE,
    SUCCESS,
    AccessDescription,
    Driver,
    Location,
)

# --- mappings ---


@pytest.fixture
def place(driver: Driver):
    """A reservation of eight granules and a handle of two."""
    address, handle = driver.reserve(8 * GRANULE), driver.create(2 * GRANULE)
    yield address, handle
    assert driver.cuMemUnmap(address, 8 * GRANULE) == SUCCESS
    assert driver.cuMemRelease(handle) == SUCCESS
    assert driver.cuMemAddressFree(address, 8 * GRANULE) == SUCCESS


Place = tuple[int, int]


def test_map_wants_offset_zero(driver: Driver, place: Place) -> None:
    address, handle = place
    assert driver.cuMemMap(address, GRANULE, GRANULE, handle, 0) == NOT_SUPPORTED


@pytest.mark.parametrize("size", [4096, GRANULE, 3 * GRANULE, 4 * GRANULE])
def test_map_wants_all_of_the_handle(driver: Driver, place: Place, size: int) -> None:
    address, handle = place
    assert driver.cuMemMap(address, size, 0, handle, 0) == NOT_SUPPORTED


def test_map_checks_size_address_flags_and_handle(driver: Driver, place: Place) -> None:
    address, handle = place
    size = 2 * GRANULE
    found = {
        "size 0": driver.cuMemMap(address, 0, 0, handle, 0),
        "address unaligned": driver.cuMemMap(address + 4096, size, 0, handle, 0),
        "flags": driver.cuMemMap(address, size, 0, handle, 1),
        "not reserved": driver.cuMemMap(16 * GRANULE, size, 0, handle, 0),
    }
    assert found == dict.fromkeys(found, INVALID_VALUE)


def test_map_over_a_mapping_is_refused(driver: Driver, place: Place) -> None:
    address, handle = place
    assert driver.cuMemMap(address + GRANULE, 2 * GRANULE, 0, handle, 0) == SUCCESS
    for offset in (0, 1, 2):
        assert driver.cuMemMap(address + offset * GRANULE, 2 * GRANULE, 0, handle, 0) == INVALID_VALUE


def test_map_may_reach_from_one_reservation_into_the_next(driver: Driver) -> None:
    space = driver.reserve(4 * GRANULE)
    assert driver.cuMemAddressFree(space, 4 * GRANULE) == SUCCESS
    left, right = driver.reserve(2 * GRANULE, 0, space), driver.reserve(2 * GRANULE, 0, space + 2 * GRANULE)
    handle = driver.create(2 * GRANULE)
    assert right == left + 2 * GRANULE
    assert driver.cuMemMap(left + GRANULE, 2 * GRANULE, 0, handle, 0) == SUCCESS
    assert driver.access(left + GRANULE, 2 * GRANULE) == SUCCESS
    assert driver.cuMemAddressFree(left, 2 * GRANULE) == INVALID_VALUE
    assert driver.cuMemAddressFree(right, 2 * GRANULE) == INVALID_VALUE
    assert driver.cuMemUnmap(left + GRANULE, 2 * GRANULE) == SUCCESS
    assert driver.cuMemRelease(handle) == SUCCESS
    assert driver.cuMemAddressFree(left, 2 * GRANULE) == SUCCESS
    assert driver.cuMemAddressFree(right, 2 * GRANULE) == SUCCESS


def test_one_handle_at_two_addresses_is_one_memory(driver: Driver, place: Place) -> None:
    address, handle = place
    size = 2 * GRANULE
    for offset in (0, 4):
        assert driver.cuMemMap(address + offset * GRANULE, size, 0, handle, 0) == SUCCESS
        assert driver.access(address + offset * GRANULE, size) == SUCCESS
    driver.write(address + 17, b"alias")
    assert driver.read(address + 4 * GRANULE + 17, 5) == b"alias"
    assert driver.cuMemUnmap(address, size) == SUCCESS
    assert driver.read(address + 4 * GRANULE + 17, 5) == b"alias"


@pytest.fixture
def row(driver: Driver):
    """Three mappings of one granule in a row, the last granule of the reservation unmapped."""
    address = driver.reserve(4 * GRANULE)
    handles = [driver.create(GRANULE) for _ in range(3)]
    for index, handle in enumerate(handles):
        assert driver.cuMemMap(address + index * GRANULE, GRANULE, 0, handle, 0) == SUCCESS
        assert driver.cuMemRelease(handle) == SUCCESS
    yield address
    assert driver.cuMemUnmap(address, 4 * GRANULE) == SUCCESS
    assert driver.cuMemAddressFree(address, 4 * GRANULE) == SUCCESS


def test_one_unmap_takes_several_whole_mappings(driver: Driver, row: int) -> None:
    assert driver.cuMemUnmap(row, 3 * GRANULE) == SUCCESS


def test_unmap_passes_over_unmapped_ranges(driver: Driver, row: int) -> None:
    assert driver.cuMemUnmap(row + GRANULE, GRANULE) == SUCCESS
    assert driver.cuMemUnmap(row + GRANULE, GRANULE) == SUCCESS
    assert driver.cuMemUnmap(row, 4 * GRANULE) == SUCCESS
    assert driver.cuMemUnmap(row, 4 * GRANULE) == SUCCESS


def test_unmap_does_not_cut_mappings(driver: Driver, place: Place) -> None:
    address, handle = place
    assert driver.cuMemMap(address, 2 * GRANULE, 0, handle, 0) == SUCCESS
    found = {
        "first half": driver.cuMemUnmap(address, GRANULE),
        "second half": driver.cuMemUnmap(address + GRANULE, GRANULE),
        "end of one and more": driver.cuMemUnmap(address + GRANULE, 3 * GRANULE),
        "size 0": driver.cuMemUnmap(address, 0),
        "unaligned": driver.cuMemUnmap(address + 4096, GRANULE),
        "not reserved": driver.cuMemUnmap(16 * GRANULE, GRANULE),
    }
    assert found == dict.fromkeys(found, INVALID_VALUE)


# --- access ---


def test_one_set_access_takes_several_mappings(driver: Driver, row: int) -> None:
    assert driver.access(row, 3 * GRANULE) == SUCCESS
    assert [driver.get_access(row + index * GRANULE) for index in range(3)] == [(SUCCESS, PROT_READWRITE)] * 3


def test_set_access_stops_at_a_hole_and_says_nothing(driver: Driver, row: int) -> None:
    assert driver.cuMemUnmap(row + GRANULE, GRANULE) == SUCCESS
    assert driver.access(row, 3 * GRANULE) == SUCCESS
    assert driver.get_access(row) == (SUCCESS, PROT_READWRITE)
    assert driver.get_access(row + 2 * GRANULE) == (SUCCESS, PROT_NONE)


def test_set_access_wants_its_last_granule_mapped(driver: Driver, row: int) -> None:
    assert driver.access(row, 4 * GRANULE) == INVALID_VALUE


def test_set_access_wants_its_first_granule_mapped(driver: Driver, row: int) -> None:
    assert driver.cuMemUnmap(row, GRANULE) == SUCCESS
    assert driver.access(row, 3 * GRANULE) == INVALID_VALUE


def test_refused_access_changes_nothing(driver: Driver, row: int) -> None:
    assert driver.access(row, 4 * GRANULE) == INVALID_VALUE
    assert [driver.get_access(row + index * GRANULE) for index in range(3)] == [(SUCCESS, PROT_NONE)] * 3


def test_set_access_checks_its_arguments(driver: Driver, place: Place) -> None:
    address, handle = place
    size = 2 * GRANULE
    description = AccessDescription(Location(DEVICE, 0), PROT_READWRITE)
    assert driver.access(address, size) == INVALID_VALUE  # nothing is mapped
    assert driver.cuMemMap(address, size, 0, handle, 0) == SUCCESS
    found = {
        "half": driver.access(address, GRANULE),
        "other half": driver.access(address + GRANULE, GRANULE),
        "beyond": driver.access(address, 2 * size),
        "size 0": driver.access(address, 0),
        "size unaligned": driver.access(address, 4096),
        "count 0": driver.cuMemSetAccess(address, size, description, 0),
        "no description": driver.cuMemSetAccess(address, size, None, 1),
        "flags": driver.access(address, size, 2),
        "no location": driver.access(address, size, PROT_READWRITE, (0, 0)),
    }
    assert found == dict.fromkeys(found, INVALID_VALUE)
    assert driver.access(address, size, PROT_READWRITE, (DEVICE, 99)) == INVALID_VALUE
    assert driver.access(address, size, PROT_READWRITE, (HOST, 0)) == NOT_SUPPORTED
    assert driver.access(address, size, PROT_READWRITE, (HOST_NUMA, 0)) == NOT_SUPPORTED
    assert driver.access(address, size, PROT_READWRITE, (HOST_NUMA, 99)) == NOT_SUPPORTED
    assert driver.get_access(address) == (SUCCESS, PROT_NONE)


@pytest.mark.parametrize("flags", [PROT_NONE, PROT_READ, PROT_READWRITE])
def test_get_access_tells_what_was_set(driver: Driver, place: Place, flags: int) -> None:
    address, handle = place
    assert driver.cuMemMap(address, 2 * GRANULE, 0, handle, 0) == SUCCESS
    assert driver.get_access(address) == (SUCCESS, PROT_NONE)
    assert driver.access(address, 2 * GRANULE, flags) == SUCCESS
    assert driver.get_access(address) == (SUCCESS, flags)
    assert driver.get_access(address + GRANULE + 5) == (SUCCESS, flags)


def test_get_access_checks_its_arguments(driver: Driver, place: Place) -> None:
    address, handle = place
    assert driver.get_access(address)[0] == INVALID_VALUE  # nothing is mapped
    assert driver.cuMemMap(address, 2 * GRANULE, 0, handle, 0) == SUCCESS
    assert driver.get_access(address, (DEVICE, 99))[0] == INVALID_DEVICE
    assert driver.cuMemGetAccess(None, Location(DEVICE, 0), address) == INVALID_VALUE
    assert driver.cuMemGetAccess(ctypes.c_uint64(), None, address) == INVALID_VALUE


def test_access_can_be_taken_back(driver: Driver, place: Place) -> None:
    address, handle = place
    assert driver.cuMemMap(address, 2 * GRANULE, 0, handle, 0) == SUCCESS
    for flags in (PROT_READWRITE, PROT_READ, PROT_READWRITE, PROT_NONE):
        assert driver.access(address, 2 * GRANULE, flags) == SUCCESS
        assert driver.get_access(address) == (SUCCESS, flags)


def test_remapping_starts_without_access(driver: Driver, place: Place) -> None:
    address, handle = place
    assert driver.cuMemMap(address, 2 * GRANULE, 0, handle, 0) == SUCCESS
    assert driver.access(address, 2 * GRANULE) == SUCCESS
    assert driver.cuMemUnmap(address, 2 * GRANULE) == SUCCESS
    assert driver.cuMemMap(address, 2 * GRANULE, 0, handle, 0) == SUCCESS
    assert driver.get_access(address) == (SUCCESS, PROT_NONE)


@pytest.mark.parametrize("location", [HOST_NUMA, HOST])
def test_host_memory_serves_device_and_processor(driver: Driver, location: int) -> None:
    address, handle = driver.mapped(GRANULE, location)
    driver.write(address, b"from the device's side")
    assert driver.access(address, GRANULE, PROT_READWRITE, (location, 0)) == SUCCESS
    assert ctypes.string_at(address, 22) == b"from the device's side"
    ctypes.memmove(address, b"FROM", 4)
    assert driver.read(address, 8) == b"FROM the"
    assert driver.get_access(address, (location, 0)) == (SUCCESS, PROT_READWRITE)
    driver.free_mapped(address, handle, GRANULE)


def test_one_range_may_be_part_device_and_part_host(driver: Driver) -> None:
    address = driver.reserve(2 * GRANULE)
    for index, location in enumerate((DEVICE, HOST_NUMA)):
        handle = driver.create(GRANULE, location)
        assert driver.cuMemMap(address + index * GRANULE, GRANULE, 0, handle, 0) == SUCCESS
        assert driver.cuMemRelease(handle) == SUCCESS
    assert driver.access(address, 2 * GRANULE) == SUCCESS
    assert driver.cuMemsetD8Async(address, 3, 2 * GRANULE, None) == SUCCESS
    driver.write(address + GRANULE - 4, b"over the seam")
    assert driver.read(address + GRANULE - 6, 17) == b"\3\3over the seam\3\3"
    assert driver.cuMemUnmap(address, 2 * GRANULE) == SUCCESS
    assert driver.cuMemAddressFree(address, 2 * GRANULE) == SUCCESS
