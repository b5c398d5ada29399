"""cuGetProcAddress: which function is found by name, version and flags."""

import ctypes

import pytest
from checks.names import per_thread_versions
from checks.toolchain import find_cuda_include
from driver_calls import INVALID_VALUE, NOT_FOUND, SUCCESS, Driver, least_versions

pytestmark = pytest.mark.cuda_only("HIP's functions are found by dlsym")
PER_THREAD_DEFAULT_STREAM = 2


def test_every_listed_function_is_handed_out(driver: Driver) -> None:
    versions = least_versions()
    missing = {name: found for name, version in versions.items() if (found := driver.address_of(name, version))[0]}
    assert missing == {}


def test_resolver_answers_by_version(driver: Driver) -> None:
    assert driver.address_of("cuMemCreate", 10020)[:2] == (SUCCESS, 0)
    assert driver.address_of("cuMemCreate", 2000) == (SUCCESS, 2, None)  # "version not sufficient"
    assert driver.address_of("cuNoSuchFunction", 13000) == (SUCCESS, 1, None)  # "symbol not found"
    assert driver.address_of("cuMemCreate_v2", 13000) == (SUCCESS, 1, None)
    assert driver.address_of("cuMemCreate", 10020, flags=64)[0] == INVALID_VALUE


def test_variants_for_per_thread_streams_came_with_cuda_7(driver: Driver) -> None:
    """Who asks for one at an older version finds nothing; what knows no stream is found as ever."""
    versions = least_versions()
    came = per_thread_versions(set(versions), find_cuda_include())
    assert came["cuMemcpyHtoD"] == 7000
    wrong = {}
    for name, version in versions.items():
        first = max(version, came.get(name, 0))
        found = driver.address_of(name, first, PER_THREAD_DEFAULT_STREAM)
        # Which of the two reasons is given is not asked.
        older = (version, 6050) if first > version else ()
        before = [driver.address_of(name, at, PER_THREAD_DEFAULT_STREAM) for at in older]
        if found[:2] != (SUCCESS, 0) or any((code, address) != (SUCCESS, None) for code, _, address in before):
            wrong[name] = (found, before)
    assert wrong == {}


def test_resolver_has_two_shapes(driver: Driver) -> None:
    old, new = driver.address_of("cuGetProcAddress", 11030), driver.address_of("cuGetProcAddress", 12000)
    assert old[:2] == new[:2] == (SUCCESS, 0)
    assert old[2] != new[2]
    assert old[2] == ctypes.cast(driver.handle.cuGetProcAddress, ctypes.c_void_p).value
    assert new[2] == ctypes.cast(driver.handle.cuGetProcAddress_v2, ctypes.c_void_p).value


def test_an_unknown_name_is_an_error_of_the_old_shape_only(driver: Driver) -> None:
    old, new = driver.handle.cuGetProcAddress, driver.handle.cuGetProcAddress_v2
    address, flags = ctypes.c_void_p(), ctypes.c_uint64(0)
    for name, version, code in (
        (b"cuMemMap", 11030, SUCCESS),
        (b"cuNoSuchFunction", 13000, NOT_FOUND),
        (b"cuMemMap", 2000, NOT_FOUND),
    ):
        assert old(name, ctypes.byref(address), version, flags) == code
        assert new(name, ctypes.byref(address), version, flags, None) == SUCCESS
        assert (address.value is None) == (code != SUCCESS)


def test_resolver_and_symbols_agree(driver: Driver) -> None:
    symbol = ctypes.cast(driver.handle.cuMemMap, ctypes.c_void_p).value
    assert driver.address_of("cuMemMap", 10020)[2] == symbol
