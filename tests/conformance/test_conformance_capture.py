"""Stream capture: the calls that it allows, the calls that it forbids, and those that break it."""

import ctypes
import threading
from collections.abc import Callable

import pytest
from driver_calls import (
    CAPTURE_GLOBAL,
    CAPTURE_IMPLICIT,
    CAPTURE_INVALIDATED,
    CAPTURE_ISOLATION,
    CAPTURE_MERGE,
    CAPTURE_RELAXED,
    CAPTURE_THREAD_LOCAL,
    CAPTURE_UNJOINED,
    CAPTURE_UNMATCHED,
    CAPTURE_UNSUPPORTED,
    CAPTURE_WRONG_THREAD,
    CAPTURED_EVENT,
    GRANULE,
    ILLEGAL_STATE,
    INVALID_VALUE,
    SUCCESS,
    Driver,
)

MODES = [CAPTURE_GLOBAL, CAPTURE_THREAD_LOCAL, CAPTURE_RELAXED]
NON_BLOCKING = 1
NONE, ACTIVE, INVALIDATED = 0, 1, 2


def begin(driver: Driver, mode: int = CAPTURE_GLOBAL, flags: int = NON_BLOCKING) -> int:
    stream = driver.stream(flags)
    assert driver.cuStreamBeginCapture(stream, mode) == SUCCESS
    return stream


def end(driver: Driver, stream: int) -> int:
    """Ends the capture, gives graph and stream back, and returns how the capture ended."""
    graph = ctypes.c_void_p(77)
    code = driver.cuStreamEndCapture(stream, graph)
    if code == SUCCESS:
        assert driver.cuGraphDestroy(graph.value) == SUCCESS
    else:
        assert graph.value is None
    assert driver.cuStreamDestroy(stream) == SUCCESS
    return code


def elsewhere(driver: Driver, call: Callable[[], int]) -> int:
    """The call's answer in another thread with the same context."""
    context = driver.make("cuCtxGetCurrent", ctypes.c_void_p)
    found = []

    def body() -> None:
        assert driver.cuCtxSetCurrent(context) == SUCCESS
        found.append(call())

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    return found[0]


def during(driver: Driver, mode: int, call: Callable[[], int], in_other_thread: bool = False, flags: int = 1):
    """(answer of the call, how the capture ended)."""
    stream = begin(driver, mode, flags)
    answer = elsewhere(driver, call) if in_other_thread else call()
    return answer, end(driver, stream)


# --- beginning and ending ---


@pytest.mark.parametrize("mode", MODES)
def test_captured_work_does_not_run(driver: Driver, mode: int) -> None:
    address, handle = driver.mapped(GRANULE)
    driver.write(address, b"old")
    ran = []
    stream = begin(driver, mode)
    assert driver.cuMemsetD8Async(address, 1, 3, stream) == SUCCESS
    assert driver.launch(stream, lambda: ran.append(1)) == SUCCESS
    assert end(driver, stream) == SUCCESS
    assert driver.cuCtxSynchronize() == SUCCESS
    assert (driver.read(address, 3), ran) == (b"old", [])
    driver.free_mapped(address, handle, GRANULE)


def test_status_follows_the_capture(driver: Driver) -> None:
    stream, other, status = driver.stream(NON_BLOCKING), driver.stream(NON_BLOCKING), ctypes.c_int(9)

    def status_of(each: int) -> int:
        assert driver.cuStreamIsCapturing(each, status) == SUCCESS
        return status.value

    assert status_of(stream) == NONE
    assert driver.cuStreamBeginCapture(stream, CAPTURE_RELAXED) == SUCCESS
    assert (status_of(stream), status_of(other), status_of(0)) == (ACTIVE, NONE, NONE)
    assert driver.cuCtxSynchronize() == CAPTURE_UNSUPPORTED
    assert status_of(stream) == INVALIDATED
    assert driver.cuStreamEndCapture(stream, ctypes.c_void_p()) == CAPTURE_INVALIDATED
    assert status_of(stream) == NONE
    assert [driver.cuStreamDestroy(each) for each in (stream, other)] == [SUCCESS] * 2


def test_capture_checks_its_stream_and_mode(driver: Driver) -> None:
    stream = driver.stream()
    assert driver.cuStreamBeginCapture(None, CAPTURE_RELAXED) == CAPTURE_UNSUPPORTED
    assert driver.cuStreamBeginCapture(stream, 7) == INVALID_VALUE
    assert driver.cuStreamEndCapture(stream, ctypes.c_void_p()) == ILLEGAL_STATE
    assert driver.cuStreamBeginCapture(stream, CAPTURE_RELAXED) == SUCCESS
    assert driver.cuStreamBeginCapture(stream, CAPTURE_RELAXED) == ILLEGAL_STATE
    assert end(driver, stream) == SUCCESS


@pytest.mark.parametrize(("mode", "code"), [(CAPTURE_GLOBAL, CAPTURE_WRONG_THREAD), (CAPTURE_RELAXED, SUCCESS)])
def test_only_a_relaxed_capture_ends_well_in_another_thread(driver: Driver, mode: int, code: int) -> None:
    stream, graph = begin(driver, mode), ctypes.c_void_p()
    assert elsewhere(driver, lambda: driver.cuStreamEndCapture(stream, graph)) == code
    if code == SUCCESS:
        assert driver.cuGraphDestroy(graph.value) == SUCCESS
    assert end(driver, stream) == ILLEGAL_STATE  # it is over either way


def test_graph_destroy_wants_a_graph(driver: Driver) -> None:
    assert driver.cuGraphDestroy(None) == INVALID_VALUE


# --- what any capture forbids ---


@pytest.mark.parametrize("in_other_thread", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_synchronising_the_context_breaks_every_capture(driver: Driver, mode: int, in_other_thread: bool) -> None:
    found = during(driver, mode, driver.cuCtxSynchronize, in_other_thread=in_other_thread)
    assert found == (CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED)


@pytest.mark.parametrize("in_other_thread", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_virtual_memory_calls_are_fine_during_capture(driver: Driver, mode: int, in_other_thread: bool) -> None:
    def calls() -> int:
        address, handle = driver.mapped(GRANULE)
        driver.free_mapped(address, handle, GRANULE)
        return SUCCESS

    assert during(driver, mode, calls, in_other_thread=in_other_thread) == (SUCCESS, SUCCESS)


def test_waiting_for_a_capturing_stream_breaks_it(driver: Driver) -> None:
    for call in (driver.cuStreamSynchronize, driver.cuStreamQuery):
        stream = begin(driver)
        assert call(stream) == CAPTURE_UNSUPPORTED
        assert end(driver, stream) == CAPTURE_INVALIDATED


def test_work_for_a_broken_capture_is_refused(driver: Driver) -> None:
    stream = begin(driver)
    assert driver.cuStreamSynchronize(stream) == CAPTURE_UNSUPPORTED
    assert driver.launch(stream, lambda: None) == CAPTURE_INVALIDATED
    assert end(driver, stream) == CAPTURE_INVALIDATED


def test_the_legacy_stream_may_not_meet_a_blocking_capture(driver: Driver) -> None:
    address, handle = driver.mapped(GRANULE)
    memory = ctypes.create_string_buffer(16)
    calls = {
        "memset": lambda: driver.cuMemsetD8Async(address, 1, 16, None),
        "copy": lambda: driver.cuMemcpyHtoD(address, memory, 16),
        "launch": lambda: driver.launch(0, lambda: None),
        "synchronize": lambda: driver.cuStreamSynchronize(None),
    }
    found = {name: during(driver, CAPTURE_RELAXED, call, flags=0) for name, call in calls.items()}
    driver.free_mapped(address, handle, GRANULE)
    assert found == dict.fromkeys(found, (CAPTURE_IMPLICIT, CAPTURE_INVALIDATED))


@pytest.mark.parametrize("mode", MODES)
def test_asking_the_legacy_stream_during_a_blocking_capture_is_refused(driver: Driver, mode: int) -> None:
    found = during(driver, mode, lambda: driver.cuStreamIsCapturing(None, ctypes.c_int()), flags=0)
    assert found == (CAPTURE_IMPLICIT, SUCCESS)


def test_asking_the_legacy_stream_during_a_non_blocking_capture_is_fine(driver: Driver) -> None:
    assert during(driver, CAPTURE_GLOBAL, lambda: driver.cuStreamIsCapturing(None, ctypes.c_int())) == (
        SUCCESS,
        SUCCESS,
    )


# --- what depends on the mode ---

REFUSED = (CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED)
FINE = (SUCCESS, SUCCESS)
UNSAFE = [
    "cuMemAlloc",
    "cuMemFree",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemHostRegister",
    "cuMemHostUnregister",
    "cuStreamSynchronize",
    "cuStreamQuery",
    "cuEventSynchronize",
    "cuEventQuery",
]
SAFE = [
    "cuStreamCreate",
    "cuStreamDestroy",
    "cuStreamWaitEvent",
    "cuEventCreate",
    "cuEventDestroy",
    "cuEventRecord",
    "cuMemGetInfo",
    "cuMemsetD8Async",
    "cuMemcpyHtoD",
    "cuMemcpyDtoH",
    "cuMemcpyHtoDAsync",
    "cuLaunchHostFunc",
    "cuPointerGetAttribute",
    "cuDevicePrimaryCtxGetState",
    "cuDeviceCanAccessPeer",
]


class Objects:
    """The objects of the calls below, made before the capture begins."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.linear, self.pinned = driver.allocate(4096), driver.host_allocate(4096)
        self.spare_linear, self.spare_pinned = driver.allocate(4096), driver.host_allocate(4096)
        self.idle, self.spare_stream = driver.stream(NON_BLOCKING), driver.stream(NON_BLOCKING)
        self.event, self.spare_event = driver.event(), driver.event()
        self.buffer = ctypes.create_string_buffer(3 * 4096)
        self.page = (ctypes.addressof(self.buffer) + 4095) // 4096 * 4096
        assert driver.cuMemHostRegister(self.page, 4096, 0) == SUCCESS
        assert driver.cuEventRecord(self.event, self.idle) == SUCCESS
        assert driver.cuStreamSynchronize(self.idle) == SUCCESS

    def close(self) -> None:
        """Gives everything back; a second free is refused, harmlessly."""
        driver = self.driver
        assert driver.cuCtxSynchronize() == SUCCESS
        for offset in (0, 4096):
            driver.cuMemHostUnregister(self.page + offset)
        for address in (self.linear, self.spare_linear):
            driver.cuMemFree(address)
        for address in (self.pinned, self.spare_pinned):
            driver.cuMemFreeHost(address)
        assert driver.cuStreamDestroy(self.idle) == driver.cuEventDestroy(self.event) == SUCCESS

    def call(self, name: str) -> int:
        driver = self.driver
        number, pointer, address = ctypes.c_size_t(), ctypes.c_void_p(), ctypes.c_uint64()
        arguments = {
            "cuMemAlloc": (address, 4096),
            "cuMemFree": (self.spare_linear,),
            "cuMemHostAlloc": (pointer, 4096, 0),
            "cuMemFreeHost": (self.spare_pinned,),
            "cuMemHostRegister": (self.page + 4096, 4096, 0),
            "cuMemHostUnregister": (self.page,),
            "cuStreamSynchronize": (self.idle,),
            "cuStreamQuery": (self.idle,),
            "cuEventSynchronize": (self.event,),
            "cuEventQuery": (self.event,),
            "cuStreamCreate": (pointer, 0),
            "cuStreamDestroy": (self.spare_stream,),
            "cuStreamWaitEvent": (self.idle, self.event, 0),
            "cuEventCreate": (pointer, 0),
            "cuEventDestroy": (self.spare_event,),
            "cuEventRecord": (self.event, self.idle),
            "cuMemGetInfo": (number, number),
            "cuMemsetD8Async": (self.linear, 1, 16, self.idle),
            "cuMemcpyHtoD": (self.linear, self.buffer, 16),
            "cuMemcpyDtoH": (self.buffer, self.linear, 16),
            "cuMemcpyHtoDAsync": (self.linear, self.pinned, 16, self.idle),
            "cuPointerGetAttribute": (number, 2, self.linear),
            "cuDevicePrimaryCtxGetState": (0, number, pointer),
            "cuDeviceCanAccessPeer": (number, 0, 0),
        }
        if name == "cuLaunchHostFunc":
            return driver.launch(self.idle, lambda: None)
        return getattr(driver, name)(*arguments[name])


@pytest.mark.parametrize("in_other_thread", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", UNSAFE + SAFE)
def test_what_a_capture_forbids(driver: Driver, name: str, mode: int, in_other_thread: bool) -> None:
    """Unsafe calls: forbidden to every thread by a global capture, to its own thread by a thread-local one."""
    is_forbidden = name in UNSAFE and (mode == CAPTURE_GLOBAL or (mode == CAPTURE_THREAD_LOCAL and not in_other_thread))
    objects = Objects(driver)
    found = during(driver, mode, lambda: objects.call(name), in_other_thread=in_other_thread)
    objects.close()
    assert found == (REFUSED if is_forbidden else FINE)


@pytest.mark.parametrize("mode", MODES)
def test_a_relaxed_thread_may_do_what_a_capture_forbids(driver: Driver, mode: int) -> None:
    relaxed = ctypes.c_int(CAPTURE_RELAXED)
    assert driver.cuThreadExchangeStreamCaptureMode(relaxed) == SUCCESS
    objects = Objects(driver)
    found = {name: during(driver, mode, lambda name=name: objects.call(name)) for name in UNSAFE}
    assert driver.cuThreadExchangeStreamCaptureMode(relaxed) == SUCCESS
    objects.close()
    assert found == dict.fromkeys(found, FINE)


def test_a_thread_local_thread_minds_its_own_captures_only(driver: Driver) -> None:
    stream = begin(driver, CAPTURE_GLOBAL)

    def allocate() -> int:
        mode, address = ctypes.c_int(CAPTURE_THREAD_LOCAL), ctypes.c_uint64()
        assert driver.cuThreadExchangeStreamCaptureMode(mode) == SUCCESS
        code = driver.cuMemAlloc(address, 4096)
        if code == SUCCESS:
            assert driver.cuMemFree(address.value) == SUCCESS
        return code

    assert (elsewhere(driver, allocate), end(driver, stream)) == FINE


# --- streams that join a capture ---


def test_a_forked_stream_must_be_joined(driver: Driver) -> None:
    for is_joined in (True, False):
        origin, side = begin(driver), driver.stream(NON_BLOCKING)
        fork, join, status = driver.event(), driver.event(), ctypes.c_int()
        assert driver.cuEventRecord(fork, origin) == SUCCESS
        assert driver.cuStreamWaitEvent(side, fork, 0) == SUCCESS
        assert driver.cuStreamIsCapturing(side, status) == SUCCESS
        assert status.value == ACTIVE
        assert driver.launch(side, lambda: None) == SUCCESS
        if is_joined:
            assert driver.cuEventRecord(join, side) == SUCCESS
            assert driver.cuStreamWaitEvent(origin, join, 0) == SUCCESS
        assert end(driver, origin) == (SUCCESS if is_joined else CAPTURE_UNJOINED)
        assert driver.cuStreamIsCapturing(side, status) == SUCCESS
        assert status.value == NONE
        assert driver.cuStreamDestroy(side) == SUCCESS
        assert [driver.cuEventDestroy(event) for event in (fork, join)] == [SUCCESS] * 2


def test_a_capture_ends_in_the_stream_where_it_began(driver: Driver) -> None:
    origin, side, fork = begin(driver), driver.stream(NON_BLOCKING), driver.event()
    assert driver.cuEventRecord(fork, origin) == SUCCESS
    assert driver.cuStreamWaitEvent(side, fork, 0) == SUCCESS
    assert driver.cuStreamEndCapture(side, ctypes.c_void_p()) == CAPTURE_UNMATCHED
    assert end(driver, origin) == CAPTURE_INVALIDATED
    assert driver.cuStreamDestroy(side) == SUCCESS
    assert driver.cuEventDestroy(fork) == SUCCESS


def test_two_captures_do_not_merge(driver: Driver) -> None:
    first, second, event = begin(driver), begin(driver), driver.event()
    assert driver.cuEventRecord(event, first) == SUCCESS
    assert driver.cuStreamWaitEvent(second, event, 0) == CAPTURE_MERGE
    assert (end(driver, first), end(driver, second)) == (CAPTURE_INVALIDATED, CAPTURE_INVALIDATED)
    assert driver.cuEventDestroy(event) == SUCCESS


def test_a_capture_may_not_wait_for_work_outside(driver: Driver) -> None:
    outside, event = driver.stream(NON_BLOCKING), driver.event()
    assert driver.cuEventRecord(event, outside) == SUCCESS
    stream = begin(driver)
    assert driver.cuStreamWaitEvent(stream, event, 0) == CAPTURE_ISOLATION
    assert end(driver, stream) == CAPTURE_INVALIDATED
    assert driver.cuEventDestroy(event) == SUCCESS
    assert driver.cuStreamDestroy(outside) == SUCCESS


def test_a_captured_event_cannot_be_waited_for(driver: Driver) -> None:
    for call in (driver.cuEventQuery, driver.cuEventSynchronize):
        stream, event = begin(driver), driver.event()
        assert driver.cuEventRecord(event, stream) == SUCCESS
        assert call(event) == CAPTURED_EVENT
        assert end(driver, stream) == CAPTURE_INVALIDATED
        assert driver.cuEventDestroy(event) == SUCCESS


def test_destroying_the_origin_ends_its_capture(driver: Driver) -> None:
    stream = begin(driver)
    assert driver.cuStreamDestroy(stream) == SUCCESS
    assert driver.cuCtxSynchronize() == SUCCESS


def test_the_threads_mode_is_exchanged(driver: Driver) -> None:
    mode = ctypes.c_int(CAPTURE_RELAXED)
    assert driver.cuThreadExchangeStreamCaptureMode(mode) == SUCCESS
    assert mode.value == CAPTURE_GLOBAL
    assert driver.cuThreadExchangeStreamCaptureMode(mode) == SUCCESS
    assert mode.value == CAPTURE_RELAXED
