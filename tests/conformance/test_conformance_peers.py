"""Access between devices: a device's answers about itself and about devices that do not exist."""

import ctypes

import pytest
from driver_calls import INVALID_CONTEXT, INVALID_DEVICE, INVALID_VALUE, PEER_ACCESS_UNSUPPORTED, SUCCESS, Driver

NO_SUCH_DEVICE = 4711


def test_a_device_is_no_peer_of_its_own(driver: Driver) -> None:
    can = ctypes.c_int(-1)
    assert driver.cuDeviceCanAccessPeer(can, 0, 0) == SUCCESS
    assert can.value == 0


def test_who_is_asked_of_must_be_there(driver: Driver) -> None:
    can = ctypes.c_int()
    assert driver.cuDeviceCanAccessPeer(can, 0, NO_SUCH_DEVICE) == INVALID_DEVICE
    assert driver.cuDeviceCanAccessPeer(can, NO_SUCH_DEVICE, 0) == INVALID_DEVICE
    assert driver.cuDeviceCanAccessPeer(None, 0, 0) == INVALID_VALUE


@pytest.mark.cuda_only("a peer is a device of HIP, not a context")
def test_access_is_enabled_to_another_context(driver: Driver) -> None:
    own = driver.make("cuCtxGetCurrent", ctypes.c_void_p)
    assert driver.cuCtxEnablePeerAccess(own, 0) == PEER_ACCESS_UNSUPPORTED
    assert driver.cuCtxEnablePeerAccess(None, 0) == INVALID_CONTEXT
    assert driver.cuCtxEnablePeerAccess(own, 1) == INVALID_VALUE
