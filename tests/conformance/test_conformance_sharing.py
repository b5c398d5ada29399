"""Memory that other processes may have: its descriptors, and who holds it."""

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from driver_calls import DEVICE, GRANULE, INVALID_VALUE, SUCCESS, UNKNOWN, AllocationProperties, Driver, properties
from other_process import Files, OtherProcess

POSIX_FILE = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def create_exportable(driver: Driver, size: int = GRANULE) -> int:
    wanted = properties(DEVICE, 0)
    wanted.requested_handle_types = POSIX_FILE
    return driver.make("cuMemCreate", ctypes.c_uint64, size, wanted, 0)


def export(driver: Driver, handle: int) -> int:
    return driver.make("cuMemExportToShareableHandle", ctypes.c_int, handle, POSIX_FILE, 0)


def import_file(driver: Driver, file: int) -> int:
    return driver.make("cuMemImportFromShareableHandle", ctypes.c_uint64, file, POSIX_FILE)


def map_handle(driver: Driver, handle: int, size: int = GRANULE) -> int:
    address = driver.reserve(size)
    assert driver.cuMemMap(address, size, 0, handle, 0) == SUCCESS
    assert driver.access(address, size) == SUCCESS
    return address


# --- what the other process does ---


def map_files(driver: Driver, files: list[int]) -> list[int]:
    """Imports and maps them, and lets go of descriptors and handles: the mappings hold the memory."""
    addresses = []
    for file in files:
        handle = import_file(driver, file)
        os.close(file)
        addresses.append(map_handle(driver, handle))
        assert driver.cuMemRelease(handle) == SUCCESS
    return addresses


def read(driver: Driver, address: int, size: int) -> bytes:
    return driver.read(address, size)


def write(driver: Driver, address: int, data: bytes) -> None:
    driver.write(address, data)


def make_exported(driver: Driver, data: bytes) -> Files:
    handle = create_exportable(driver)
    driver.write(map_handle(driver, handle), data)
    return Files([export(driver, handle)])


# --- the rules ---


def test_only_memory_that_was_made_for_it_is_exported(driver: Driver) -> None:
    plain = driver.create()
    file = ctypes.c_int(-1)
    assert driver.cuMemExportToShareableHandle(file, plain, POSIX_FILE, 0) == INVALID_VALUE
    handle = create_exportable(driver)
    assert driver.cuMemExportToShareableHandle(file, handle, POSIX_FILE, 1) == INVALID_VALUE
    assert file.value == -1
    assert driver.cuMemRelease(plain) == driver.cuMemRelease(handle) == SUCCESS


def test_two_processes_see_the_same_bytes(driver: Driver, other: Callable[..., OtherProcess]) -> None:
    handle = create_exportable(driver)
    address = map_handle(driver, handle)
    driver.write(address, b"here first")
    process = other()
    file = export(driver, handle)
    [theirs] = process.run(map_files, files=[file])
    os.close(file)
    assert process.run(read, theirs, 10) == b"here first"
    process.run(write, theirs, b"from there")
    assert driver.read(address, 10) == b"from there"
    driver.free_mapped(address, handle, GRANULE)


def test_memory_lives_as_long_as_another_process_maps_it(driver: Driver, other: Callable[..., OtherProcess]) -> None:
    process = other()
    [file] = process.run(make_exported, b"left behind")
    handle = import_file(driver, file)
    os.close(file)
    address = map_handle(driver, handle)
    process.kill()
    assert driver.read(address, 11) == b"left behind"
    driver.free_mapped(address, handle, GRANULE)


def test_a_descriptor_alone_keeps_the_bytes(driver: Driver) -> None:
    handle = create_exportable(driver)
    address = map_handle(driver, handle)
    driver.write(address, b"kept")
    file = export(driver, handle)
    driver.free_mapped(address, handle, GRANULE)
    handle = import_file(driver, file)
    os.close(file)
    address = map_handle(driver, handle)
    assert driver.read(address, 4) == b"kept"
    driver.free_mapped(address, handle, GRANULE)


def test_each_import_gives_a_handle_of_its_own(driver: Driver) -> None:
    handle = create_exportable(driver)
    own = map_handle(driver, handle)
    driver.write(own, b"one block")
    file = export(driver, handle)
    first, second = import_file(driver, file), import_file(driver, file)
    os.close(file)
    assert len({handle, first, second}) == 3
    assert driver.cuMemRelease(first) == SUCCESS
    address = map_handle(driver, second)
    assert driver.read(address, 9) == b"one block"
    driver.free_mapped(address, second, GRANULE)
    driver.free_mapped(own, handle, GRANULE)


def test_memory_lives_until_all_its_imports_are_released(driver: Driver, other: Callable[..., OtherProcess]) -> None:
    process = other()
    [file] = process.run(make_exported, b"left behind")
    handles = [import_file(driver, file) for _ in range(2)]
    os.close(file)
    process.kill()
    assert driver.cuMemRelease(handles[0]) == SUCCESS
    address = map_handle(driver, handles[1])
    assert driver.read(address, 11) == b"left behind"
    driver.free_mapped(address, handles[1], GRANULE)


@contextlib.contextmanager
def exported_and_imported(driver: Driver) -> Iterator[tuple[int, int, int]]:
    """A handle, its import, and what the driver retains for the address of that."""
    handle = create_exportable(driver)
    file = export(driver, handle)
    imported = import_file(driver, file)
    os.close(file)
    address = map_handle(driver, imported)
    retained = driver.make("cuMemRetainAllocationHandle", ctypes.c_uint64, address)
    yield handle, imported, retained
    assert driver.cuMemRelease(retained) == driver.cuMemRelease(handle) == SUCCESS
    driver.free_mapped(address, imported, GRANULE)


def test_what_was_imported_is_not_exported(driver: Driver) -> None:
    with exported_and_imported(driver) as (_, imported, retained):
        for one in (imported, retained):
            assert driver.cuMemExportToShareableHandle(ctypes.c_int(), one, POSIX_FILE, 0) == INVALID_VALUE


@pytest.mark.cuda_only("ebbtide asks CUDA alone for the properties of a handle")
def test_the_properties_of_a_handle_say_whether_it_is_exported(driver: Driver) -> None:
    with exported_and_imported(driver) as handles:
        assert [handle_types(driver, one) for one in handles] == [POSIX_FILE, 0, 0]


def handle_types(driver: Driver, handle: int) -> int:
    found = AllocationProperties()
    assert driver.cuMemGetAllocationPropertiesFromHandle(found, handle) == SUCCESS
    assert (found.type, found.location.type, found.location.id) == (1, DEVICE, 0)
    return found.requested_handle_types


def test_what_is_no_memory_is_refused(driver: Driver, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(8192))
    files = [os.open(tmp_path / "file", os.O_RDWR), os.open("/dev/null", os.O_RDWR), *os.pipe()]
    for file in [*files, 987654, -1]:
        assert driver.cuMemImportFromShareableHandle(ctypes.c_uint64(), file, POSIX_FILE) == UNKNOWN
    for file in files:
        os.close(file)
