"""Streams, events and host functions: order, waiting, polling, and refusals."""

import ctypes
import threading
import time

import pytest
from driver_calls import (
    GRANULE,
    HOST_NUMA,
    INVALID_HANDLE,
    INVALID_VALUE,
    NOT_PERMITTED,
    NOT_READY,
    SUCCESS,
    Driver,
)

NON_BLOCKING = 1
PATIENCE_S = 20


def wait_until_ready(poll) -> None:
    """Polls until the answer is SUCCESS; nothing but NOT_READY may come before it."""
    end = time.monotonic() + PATIENCE_S
    while (code := poll()) != SUCCESS:
        assert code == NOT_READY
        assert time.monotonic() < end
        time.sleep(0.001)


def test_streams_check_their_arguments(driver: Driver) -> None:
    assert driver.cuStreamCreate(ctypes.c_void_p(), 2) == INVALID_VALUE
    assert driver.cuStreamCreate(None, 0) == INVALID_VALUE
    assert driver.cuStreamDestroy(None) == INVALID_HANDLE


def test_events_check_their_arguments(driver: Driver) -> None:
    assert driver.cuEventCreate(ctypes.c_void_p(), 0x100) == INVALID_VALUE
    assert driver.cuEventCreate(None, 0) == INVALID_VALUE
    assert driver.cuEventDestroy(None) == INVALID_HANDLE
    assert driver.cuEventRecord(None, None) == INVALID_HANDLE
    assert driver.cuEventQuery(None) == INVALID_HANDLE
    assert driver.cuEventSynchronize(None) == INVALID_HANDLE
    assert driver.cuStreamWaitEvent(None, None, 0) == INVALID_HANDLE


def test_an_event_that_was_never_recorded_is_done(driver: Driver) -> None:
    event, stream = driver.event(), driver.stream()
    assert driver.cuEventQuery(event) == SUCCESS
    assert driver.cuEventSynchronize(event) == SUCCESS
    assert driver.cuStreamWaitEvent(stream, event, 0) == SUCCESS
    assert driver.cuStreamWaitEvent(stream, event, 4) == INVALID_VALUE
    assert driver.cuStreamSynchronize(stream) == SUCCESS
    assert driver.cuEventDestroy(event) == SUCCESS
    assert driver.cuStreamDestroy(stream) == SUCCESS


def test_an_idle_stream_is_ready(driver: Driver) -> None:
    stream = driver.stream(NON_BLOCKING)
    assert driver.cuStreamQuery(stream) == SUCCESS
    assert driver.cuStreamSynchronize(stream) == SUCCESS
    assert driver.cuStreamQuery(None) == SUCCESS
    assert driver.cuStreamDestroy(stream) == SUCCESS


def test_a_stream_keeps_its_order(driver: Driver) -> None:
    stream, ran = driver.stream(), []
    for index in range(5):
        assert driver.launch(stream, lambda index=index: ran.append(index)) == SUCCESS
    assert driver.cuStreamSynchronize(stream) == SUCCESS
    assert ran == [0, 1, 2, 3, 4]
    assert driver.cuStreamDestroy(stream) == SUCCESS


def test_a_launch_needs_a_function(driver: Driver) -> None:
    assert driver.cuLaunchHostFunc(None, None, None) == INVALID_VALUE


def test_polling_gets_there(driver: Driver) -> None:
    stream, event, ran = driver.stream(), driver.event(), []
    assert driver.launch(stream, lambda: ran.append(1)) == SUCCESS
    assert driver.cuEventRecord(event, stream) == SUCCESS
    wait_until_ready(lambda: driver.cuEventQuery(event))
    assert ran == [1]
    wait_until_ready(lambda: driver.cuStreamQuery(stream))
    assert driver.cuEventDestroy(event) == SUCCESS
    assert driver.cuStreamDestroy(stream) == SUCCESS


@pytest.mark.parametrize("flags", [0, NON_BLOCKING])
def test_a_stream_waits_for_an_event_of_another(driver: Driver, flags: int) -> None:
    first, second, event, ran = driver.stream(flags), driver.stream(flags), driver.event(), []
    assert driver.launch(first, lambda: (time.sleep(0.05), ran.append("first"))) == SUCCESS
    assert driver.cuEventRecord(event, first) == SUCCESS
    assert driver.cuStreamWaitEvent(second, event, 0) == SUCCESS
    assert driver.launch(second, lambda: ran.append("second")) == SUCCESS
    assert driver.cuStreamSynchronize(second) == SUCCESS
    assert ran == ["first", "second"]
    assert driver.cuEventDestroy(event) == SUCCESS
    assert [driver.cuStreamDestroy(stream) for stream in (first, second)] == [SUCCESS] * 2


def test_a_wait_means_the_event_as_it_was_recorded_then(driver: Driver) -> None:
    first, second, event, ran = driver.stream(NON_BLOCKING), driver.stream(NON_BLOCKING), driver.event(), []
    assert driver.launch(first, lambda: ran.append("before")) == SUCCESS
    assert driver.cuEventRecord(event, first) == SUCCESS
    assert driver.cuStreamWaitEvent(second, event, 0) == SUCCESS
    # A later record, of work that waits for `second`, must not turn the wait into a circle.
    other = driver.event()
    assert driver.cuEventRecord(other, second) == SUCCESS
    assert driver.cuStreamWaitEvent(first, other, 0) == SUCCESS
    assert driver.launch(first, lambda: ran.append("after")) == SUCCESS
    assert driver.cuEventRecord(event, first) == SUCCESS
    assert driver.cuStreamSynchronize(second) == SUCCESS
    assert "before" in ran
    assert driver.cuEventSynchronize(event) == SUCCESS
    assert ran == ["before", "after"]
    assert [driver.cuEventDestroy(each) for each in (event, other)] == [SUCCESS] * 2
    assert [driver.cuStreamDestroy(stream) for stream in (first, second)] == [SUCCESS] * 2


def test_two_events_with_timing_measure_the_work_between_them(driver: Driver) -> None:
    stream, begin, end, untimed = driver.stream(NON_BLOCKING), driver.event(0), driver.event(0), driver.event()
    milliseconds = ctypes.c_float(-1)
    assert driver.cuEventElapsedTime(milliseconds, begin, end) == INVALID_HANDLE  # never recorded
    for event in (begin, untimed):
        assert driver.cuEventRecord(event, stream) == SUCCESS
    assert driver.launch(stream, lambda: time.sleep(0.05)) == SUCCESS
    assert driver.cuEventRecord(end, stream) == SUCCESS
    assert driver.cuEventElapsedTime(milliseconds, begin, end) == NOT_READY
    assert driver.cuStreamSynchronize(stream) == SUCCESS
    assert driver.cuEventElapsedTime(milliseconds, begin, end) == SUCCESS
    assert 45 < milliseconds.value < 1000 * PATIENCE_S
    assert driver.cuEventElapsedTime(milliseconds, begin, begin) == SUCCESS
    assert milliseconds.value == 0
    assert driver.cuEventElapsedTime(milliseconds, untimed, end) == INVALID_HANDLE
    assert driver.cuEventElapsedTime(None, begin, end) == INVALID_HANDLE
    assert [driver.cuEventDestroy(event) for event in (begin, end, untimed)] == [SUCCESS] * 3
    assert driver.cuStreamDestroy(stream) == SUCCESS


def test_the_legacy_stream_orders_blocking_streams(driver: Driver) -> None:
    blocking, ran = driver.stream(), []
    assert driver.launch(blocking, lambda: (time.sleep(0.05), ran.append("blocking"))) == SUCCESS
    assert driver.launch(0, lambda: ran.append("legacy")) == SUCCESS
    assert driver.launch(blocking, lambda: ran.append("blocking again")) == SUCCESS
    assert driver.cuStreamSynchronize(blocking) == SUCCESS
    assert ran == ["blocking", "legacy", "blocking again"]
    assert driver.cuStreamDestroy(blocking) == SUCCESS


def test_waiting_for_the_legacy_stream_waits_for_blocking_streams(driver: Driver) -> None:
    blocking, ran = driver.stream(), []
    assert driver.launch(blocking, lambda: (time.sleep(0.05), ran.append(1))) == SUCCESS
    assert driver.cuStreamSynchronize(None) == SUCCESS
    assert ran == [1]
    assert driver.cuStreamDestroy(blocking) == SUCCESS


def test_a_synchronous_copy_comes_after_blocking_streams(driver: Driver) -> None:
    address, handle = driver.mapped(GRANULE)
    stream = driver.stream()
    assert driver.launch(stream, lambda: time.sleep(0.05)) == SUCCESS
    assert driver.cuMemsetD8Async(address, 5, 16, stream) == SUCCESS
    assert driver.read(address, 4) == b"\5\5\5\5"
    assert driver.cuStreamDestroy(stream) == SUCCESS
    driver.free_mapped(address, handle, GRANULE)


def test_synchronising_the_context_waits_for_every_stream(driver: Driver) -> None:
    streams, ran = [driver.stream(), driver.stream(NON_BLOCKING)], []
    for index, stream in enumerate(streams):
        assert driver.launch(stream, lambda index=index: (time.sleep(0.02), ran.append(index))) == SUCCESS
    assert driver.cuCtxSynchronize() == SUCCESS
    assert sorted(ran) == [0, 1]
    assert [driver.cuStreamDestroy(stream) for stream in streams] == [SUCCESS] * 2


def test_freeing_memory_waits_for_queued_work(driver: Driver) -> None:
    address, stream, ran = driver.allocate(GRANULE), driver.stream(), []
    assert driver.launch(stream, lambda: (time.sleep(0.05), ran.append(1))) == SUCCESS
    assert driver.cuMemFree(address) == SUCCESS
    assert ran == [1]
    assert driver.cuStreamDestroy(stream) == SUCCESS


def test_freeing_pinned_memory_waits_for_queued_work(driver: Driver) -> None:
    address, stream, ran = driver.host_allocate(GRANULE), driver.stream(), []
    assert driver.launch(stream, lambda: (time.sleep(0.05), ran.append(1))) == SUCCESS
    assert driver.cuMemFreeHost(address) == SUCCESS
    assert ran == [1]
    assert driver.cuStreamDestroy(stream) == SUCCESS


def test_virtual_memory_calls_do_not_wait_for_queued_work(driver: Driver) -> None:
    stream, gate = driver.stream(NON_BLOCKING), threading.Event()
    assert driver.launch(stream, lambda: gate.wait(PATIENCE_S)) == SUCCESS
    address, handle = driver.mapped(GRANULE)
    driver.free_mapped(address, handle, GRANULE)
    assert not gate.is_set()
    gate.set()
    assert driver.cuStreamSynchronize(stream) == SUCCESS
    assert driver.cuStreamDestroy(stream) == SUCCESS


def test_access_is_granted_beside_work_that_uses_the_memory(driver: Driver) -> None:
    stream, gate = driver.stream(NON_BLOCKING), threading.Event()
    address, handle = driver.mapped(GRANULE, HOST_NUMA)
    assert driver.launch(stream, lambda: gate.wait(PATIENCE_S)) == SUCCESS
    assert driver.cuMemsetD8Async(address, 7, GRANULE, stream) == SUCCESS
    assert driver.access(address, GRANULE, location=(HOST_NUMA, 0)) == SUCCESS
    assert not gate.is_set()
    gate.set()
    assert driver.cuStreamSynchronize(stream) == SUCCESS
    assert driver.read(address, GRANULE) == ctypes.string_at(address, GRANULE) == bytes([7]) * GRANULE
    assert driver.cuStreamDestroy(stream) == SUCCESS
    driver.free_mapped(address, handle, GRANULE)


def test_host_functions_may_not_call_the_driver(driver: Driver) -> None:
    found = {}

    def calls() -> None:
        size = ctypes.c_size_t()
        found["info"] = driver.cuMemGetInfo(size, size)
        found["allocate"] = driver.cuMemAlloc(ctypes.c_uint64(), 4096)
        found["synchronize"] = driver.cuCtxSynchronize()
        found["stream"] = driver.cuStreamCreate(ctypes.c_void_p(), 0)
        found["create"] = driver.cuMemCreate(ctypes.c_uint64(), 0, None, 0)
        found["query"] = driver.cuStreamQuery(None)

    stream = driver.stream()
    assert driver.launch(stream, calls) == SUCCESS
    assert driver.cuStreamSynchronize(stream) == SUCCESS
    assert driver.cuStreamDestroy(stream) == SUCCESS
    assert found == dict.fromkeys(found, NOT_PERMITTED)


def test_streams_and_events_work_where_no_context_is_current(driver: Driver) -> None:
    stream, event, found = driver.stream(), driver.event(), {}
    address, handle = driver.mapped(GRANULE)
    pinned = driver.host_allocate(4096)

    def elsewhere() -> None:
        status = ctypes.c_int()
        found["memset"] = driver.cuMemsetD8Async(address, 9, 4096, stream)
        found["copy"] = driver.cuMemcpyDtoHAsync(pinned, address, 4096, stream)
        found["record"] = driver.cuEventRecord(event, stream)
        found["wait"] = driver.cuStreamWaitEvent(stream, event, 0)
        found["launch"] = driver.launch(stream, lambda: None)
        found["capturing"] = driver.cuStreamIsCapturing(stream, status)
        found["event synchronize"] = driver.cuEventSynchronize(event)
        found["event query"] = driver.cuEventQuery(event)
        found["stream synchronize"] = driver.cuStreamSynchronize(stream)
        found["stream query"] = driver.cuStreamQuery(stream)
        found["destroy event"] = driver.cuEventDestroy(event)
        found["destroy stream"] = driver.cuStreamDestroy(stream)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    driver.free_mapped(address, handle, GRANULE)
    assert driver.cuMemFreeHost(pinned) == SUCCESS
    assert found == dict.fromkeys(found, SUCCESS)
