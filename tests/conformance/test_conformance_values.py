"""Streams that wait for a number in memory, and write one."""

import ctypes
import threading
import time
from collections.abc import Generator

import pytest
from driver_calls import CAPTURE_GLOBAL, NOT_READY, SUCCESS, Driver

NON_BLOCKING = 1
GEQ, EQ = 0, 1


@pytest.fixture
def number(driver: Driver) -> Generator[ctypes.c_uint32]:
    """A pinned number, 0 at first."""
    memory = driver.host_allocate(4096)
    made = ctypes.c_uint32.from_address(memory)
    made.value = 0
    yield made
    assert driver.cuMemFreeHost(memory) == SUCCESS


def wait(driver: Driver, stream: int, number: ctypes.c_uint32, value: int, flags: int = GEQ) -> None:
    assert driver.cuStreamWaitValue32(stream, ctypes.addressof(number), value, flags) == SUCCESS


def write(driver: Driver, stream: int, number: ctypes.c_uint32, value: int) -> None:
    assert driver.cuStreamWriteValue32(stream, ctypes.addressof(number), value, 0) == SUCCESS


def test_a_number_that_is_there_is_not_waited_for(driver: Driver, number: ctypes.c_uint32) -> None:
    stream = driver.stream(NON_BLOCKING)
    number.value = 5
    wait(driver, stream, number, 5, EQ)
    wait(driver, stream, number, 4, GEQ)
    assert driver.cuStreamSynchronize(stream) == SUCCESS
    assert driver.cuStreamDestroy(stream) == SUCCESS


@pytest.mark.parametrize(("flags", "value"), [(GEQ, 1), (GEQ, 2), (EQ, 1)])
def test_the_processor_lets_a_stream_go(driver: Driver, number: ctypes.c_uint32, flags: int, value: int) -> None:
    stream = driver.stream(NON_BLOCKING)
    wait(driver, stream, number, 1, flags)
    for _ in range(3):
        assert driver.cuStreamQuery(stream) == NOT_READY
    number.value = value
    assert driver.cuStreamSynchronize(stream) == SUCCESS
    assert driver.cuStreamQuery(stream) == SUCCESS
    assert driver.cuStreamDestroy(stream) == SUCCESS


def test_counting_goes_round(driver: Driver, number: ctypes.c_uint32) -> None:
    """GEQ compares as (int32)(number - value) >= 0."""
    stream = driver.stream(NON_BLOCKING)
    number.value = 3
    wait(driver, stream, number, 0xFFFFFFF0)
    assert driver.cuStreamSynchronize(stream) == SUCCESS
    assert driver.cuStreamDestroy(stream) == SUCCESS


def test_another_thread_lets_a_waiting_thread_go(driver: Driver, number: ctypes.c_uint32) -> None:
    stream = driver.stream(NON_BLOCKING)
    wait(driver, stream, number, 1)

    def store() -> None:
        time.sleep(0.02)
        number.value = 1

    thread = threading.Thread(target=store)
    thread.start()
    assert driver.cuStreamSynchronize(stream) == SUCCESS
    assert number.value == 1
    thread.join()
    assert driver.cuStreamDestroy(stream) == SUCCESS


def test_another_stream_lets_a_stream_go(driver: Driver, number: ctypes.c_uint32) -> None:
    waiting, writing = driver.stream(NON_BLOCKING), driver.stream(NON_BLOCKING)
    wait(driver, waiting, number, 1)
    write(driver, writing, number, 1)
    assert driver.cuStreamSynchronize(waiting) == SUCCESS
    assert number.value == 1
    assert [driver.cuStreamDestroy(stream) for stream in (waiting, writing)] == [SUCCESS] * 2


def test_a_stream_that_waits_holds_up_no_other(driver: Driver, number: ctypes.c_uint32) -> None:
    waiting, other, ran = driver.stream(NON_BLOCKING), driver.stream(NON_BLOCKING), []
    wait(driver, waiting, number, 1)
    assert driver.launch(other, lambda: ran.append(1)) == SUCCESS
    assert driver.cuStreamSynchronize(other) == SUCCESS
    assert ran == [1]
    assert driver.cuStreamQuery(waiting) == NOT_READY
    number.value = 1
    assert driver.cuStreamSynchronize(waiting) == SUCCESS
    assert [driver.cuStreamDestroy(stream) for stream in (waiting, other)] == [SUCCESS] * 2


def test_what_follows_in_the_stream_waits_too(driver: Driver, number: ctypes.c_uint32) -> None:
    stream, event, address = driver.stream(NON_BLOCKING), driver.event(), driver.allocate(4096)
    assert driver.cuMemsetD8Async(address, 1, 4096, stream) == SUCCESS
    assert driver.cuStreamSynchronize(stream) == SUCCESS
    wait(driver, stream, number, 1)
    assert driver.cuMemsetD8Async(address, 2, 4096, stream) == SUCCESS
    assert driver.cuEventRecord(event, stream) == SUCCESS
    assert driver.cuEventQuery(event) == NOT_READY
    assert driver.read(address, 1) == b"\1"
    number.value = 1
    assert driver.cuEventSynchronize(event) == SUCCESS
    assert driver.read(address, 1) == b"\2"
    assert driver.cuEventDestroy(event) == SUCCESS
    assert driver.cuStreamDestroy(stream) == SUCCESS
    assert driver.cuMemFree(address) == SUCCESS


def test_a_number_may_lie_in_device_memory(driver: Driver) -> None:
    address, stream = driver.allocate(4096), driver.stream(NON_BLOCKING)
    assert driver.cuMemsetD8Async(address, 0, 4096, stream) == SUCCESS
    assert driver.cuStreamWriteValue32(stream, address + 4, 0x01020304, 0) == SUCCESS
    assert driver.cuStreamWaitValue32(stream, address + 4, 0x01020304, EQ) == SUCCESS
    assert driver.cuStreamSynchronize(stream) == SUCCESS
    assert driver.read(address, 12) == bytes([0, 0, 0, 0, 4, 3, 2, 1, 0, 0, 0, 0])
    assert driver.cuStreamDestroy(stream) == SUCCESS
    assert driver.cuMemFree(address) == SUCCESS


@pytest.mark.sim_only  # whether a capture takes these is not documented
def test_a_captured_wait_waits_for_nothing(driver: Driver, number: ctypes.c_uint32) -> None:
    stream, graph = driver.stream(NON_BLOCKING), ctypes.c_void_p()
    assert driver.cuStreamBeginCapture(stream, CAPTURE_GLOBAL) == SUCCESS
    wait(driver, stream, number, 1)
    write(driver, stream, number, 2)
    assert driver.cuStreamEndCapture(stream, graph) == SUCCESS
    assert driver.cuStreamSynchronize(stream) == SUCCESS
    assert number.value == 0
    assert driver.cuGraphDestroy(graph.value) == SUCCESS
    assert driver.cuStreamDestroy(stream) == SUCCESS
