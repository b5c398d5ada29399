"""Modules and launches: ebbtide's own kernels, loaded from what it ships: PTX, and by HIP's names code objects."""

import ctypes
import importlib
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import hip_calls
import pytest
from driver_calls import (
    CAPTURE_GLOBAL,
    GRANULE,
    ILLEGAL_ADDRESS,
    INVALID_PTX,
    INVALID_VALUE,
    MISALIGNED_ADDRESS,
    NOT_FOUND,
    NOT_READY,
    SUCCESS,
    UNSUPPORTED_PTX_VERSION,
    Driver,
)

Fresh = Callable[[Callable[[Driver], object]], str]
ROOT = Path(__file__).resolve().parents[2]
PTX = ROOT / "csrc/kernels/blocks.ptx"
BLOCK = 2 << 20  # bytes that a kernel takes at a time
THREADS = 512
SEED = (0x0123456789ABCDEF, 0xFEDCBA9876543210)
# Of a block of zeros with this seed; tests/cpp/kernels_test.cpp has the same number for the processor.
DIGEST_OF_ZEROS = (0xBB0C0E60CD1AC300, 0x48AB75B2D72E6013)
NON_BLOCKING = 1


class Report(ctypes.Structure):
    """kernels::BlockReport."""

    _fields_ = (
        ("digest", ctypes.c_uint64 * 2),
        ("value", ctypes.c_uint64 * 2),
        ("is_constant", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


class Fill(ctypes.Structure):
    """kernels::BlockFill."""

    _fields_ = (("address", ctypes.c_uint64), ("value", ctypes.c_uint64 * 2))


def image(text: str | None = None) -> ctypes.Array[ctypes.c_char]:
    """PTX; without it, what the driver takes of the kernels."""
    if text is None and hip_calls.SPEAKS_HIP:
        sys.path.append(str(ROOT / "tools"))
        tool = importlib.import_module("make_code_objects")
        return ctypes.create_string_buffer(tool.read_directives((ROOT / "csrc/kernels/code_objects.s").read_text()))
    return ctypes.create_string_buffer((PTX.read_text() if text is None else text).encode())


def load(driver: Driver) -> int:
    return driver.make("cuModuleLoadData", ctypes.c_void_p, image())


def function(driver: Driver, module: int, name: str) -> int:
    return driver.make("cuModuleGetFunction", ctypes.c_void_p, module, ctypes.create_string_buffer(name.encode()))


def launch(driver: Driver, entry: int, stream: int, grid: int, block: int, *arguments: object) -> int:
    """cuLaunchKernel's code; the arguments are ctypes objects."""
    pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(each) for each in arguments))  # type: ignore
    return driver.cuLaunchKernel(entry, grid, 1, 1, block, 1, 1, 0, stream, pointers, None)


def digest(driver: Driver, entry: int, stream: int, addresses: int, reports: int, count: int) -> int:
    arguments = [ctypes.c_uint64(value) for value in (addresses, reports, *SEED)]
    return launch(driver, entry, stream, count, THREADS, *arguments, ctypes.c_uint32(count))


def fill(driver: Driver, entry: int, stream: int, fills: int, count: int) -> int:
    return launch(driver, entry, stream, count, THREADS, ctypes.c_uint64(fills), ctypes.c_uint32(count))


class Piece(ctypes.Structure):
    """kernels::Piece."""

    _fields_ = (
        ("target", ctypes.c_uint64),
        ("source", ctypes.c_uint64),
        ("size_bytes", ctypes.c_uint64),
        ("reserved", ctypes.c_uint64),
        ("value", ctypes.c_uint64 * 2),
    )


FROM_SLOT, FROM_VALUE = 0, 1
LANES, LANE_WORDS = 8, 32
GATE, DONE, BASE, FIRST_FILLED = 0, 1, 2, 4
PIECE = 64 << 10


class Delivery:
    """Pinned memory for a delivery: 64 pieces, two slots of a piece for each lane, and the board."""

    def __init__(self, driver: Driver) -> None:
        self.memory = driver.host_allocate(8192 + 2 * LANES * PIECE)
        ctypes.memset(self.memory, 0, 8192)
        self.pieces = (Piece * 64).from_address(self.memory)
        self.board = (ctypes.c_uint32 * (LANE_WORDS * (1 + LANES))).from_address(self.memory + 4096)
        self.slots = self.memory + 8192

    def at(self, lane: int, word: int) -> int:
        return LANE_WORDS * (1 + lane) + word

    def word(self, lane: int, word: int) -> int:
        return int(self.board[self.at(lane, word)])

    def fill_slot(self, lane: int, slot: int, number: int, byte: int) -> None:
        ctypes.memset(self.slots + (2 * lane + slot) * PIECE, byte, PIECE)
        self.board[self.at(lane, FIRST_FILLED + slot)] = number

    def launch(self, driver: Driver, module: int, stream: int, count: int) -> int:
        entry = function(driver, module, "ebbtide_deliver")
        arguments = [ctypes.c_uint64(at) for at in (self.memory, self.slots, ctypes.addressof(self.board), PIECE)]
        return launch(driver, entry, stream, LANES, THREADS, *arguments, ctypes.c_uint32(2), ctypes.c_uint32(count))


class Lists:
    """Pinned memory for lists of four: addresses, reports and fills."""

    def __init__(self, driver: Driver) -> None:
        self.memory = driver.host_allocate(4096)
        self.addresses = (ctypes.c_uint64 * 4).from_address(self.memory)
        self.reports = (Report * 4).from_address(self.memory + 1024)
        self.fills = (Fill * 4).from_address(self.memory + 2048)


def test_blocks_are_filled_and_digested(driver: Driver) -> None:
    address, handle = driver.mapped(3 * GRANULE)
    module, lists, stream = load(driver), Lists(driver), driver.stream(NON_BLOCKING)
    for index, value in enumerate([(0, 0), (1, 2), (0, 0)]):
        lists.addresses[index] = address + index * BLOCK
        lists.fills[index] = Fill(lists.addresses[index], value)
    entry = function(driver, module, "ebbtide_fill_blocks")
    assert fill(driver, entry, stream, ctypes.addressof(lists.fills), 3) == SUCCESS
    # All equal but the last byte.
    assert driver.cuMemsetD8Async(address + 3 * BLOCK - 1, 1, 1, stream) == SUCCESS
    entry = function(driver, module, "ebbtide_digest_blocks")
    lists_at = ctypes.addressof(lists.addresses), ctypes.addressof(lists.reports)
    assert digest(driver, entry, stream, *lists_at, 3) == SUCCESS
    assert driver.cuStreamSynchronize(stream) == SUCCESS
    zeros, ones, nearly = lists.reports[0:3]
    assert tuple(zeros.digest) == DIGEST_OF_ZEROS
    assert [report.is_constant for report in (zeros, ones, nearly)] == [1, 1, 0]
    assert [tuple(report.value) for report in (zeros, ones, nearly)] == [(0, 0), (1, 2), (0, 0)]
    assert len({tuple(report.digest) for report in (zeros, ones, nearly)}) == 3
    assert driver.read(address + BLOCK, 16) == bytes([1, *[0] * 7, 2, *[0] * 7])
    assert driver.read(address + 2 * BLOCK - 16, 16) == bytes([1, *[0] * 7, 2, *[0] * 7])
    assert driver.cuModuleUnload(module) == SUCCESS
    assert driver.cuStreamDestroy(stream) == SUCCESS
    assert driver.cuMemFreeHost(lists.memory) == SUCCESS
    driver.free_mapped(address, handle, 3 * GRANULE)


def test_a_delivery_takes_bytes_from_slots_from_host_memory_and_from_nowhere(driver: Driver) -> None:
    address, handle = driver.mapped(2 * GRANULE)
    module, delivery, stream = load(driver), Delivery(driver), driver.stream(NON_BLOCKING)
    reached = driver.host_allocate(PIECE)
    ctypes.memset(reached, 0x77, PIECE)
    # Each lane gets two pieces through its slots; then lane 0 one that it reaches by itself, lane 1 a value.
    for index in range(2 * LANES):
        delivery.pieces[index] = Piece(address + index * PIECE, FROM_SLOT, PIECE)
        delivery.fill_slot(index % LANES, index // LANES, index // LANES + 1, index + 1)
    delivery.pieces[2 * LANES] = Piece(address + 16 * PIECE, reached, PIECE)
    delivery.pieces[2 * LANES + 1] = Piece(address + 17 * PIECE, FROM_VALUE, 3 * PIECE, 0, (5, 6))
    for lane in range(LANES):
        delivery.board[delivery.at(lane, BASE)] = 0xFFFFFFFF  # gates run on beyond the end of the numbers
    assert delivery.launch(driver, module, stream, 2 * LANES + 2) == SUCCESS
    assert driver.cuStreamSynchronize(stream) == SUCCESS
    content = driver.read(address, 20 * PIECE)
    expected = b"".join(bytes([index + 1]) * PIECE for index in range(2 * LANES)) + b"\x77" * PIECE
    expected += bytes([5, *[0] * 7, 6, *[0] * 7]) * (3 * PIECE // 16)
    assert content == expected
    assert [delivery.word(lane, DONE) for lane in range(LANES)] == [3, 3, 2, 2, 2, 2, 2, 2]
    assert [delivery.word(lane, GATE) for lane in range(LANES)] == [2, 2, 1, 1, 1, 1, 1, 1]
    assert driver.cuModuleUnload(module) == SUCCESS
    assert driver.cuStreamDestroy(stream) == SUCCESS
    assert driver.cuMemFreeHost(reached) == SUCCESS
    assert driver.cuMemFreeHost(delivery.memory) == SUCCESS
    driver.free_mapped(address, handle, 2 * GRANULE)


def test_a_delivery_waits_for_its_slots_and_uses_them_again(driver: Driver) -> None:
    address, handle = driver.mapped(4 * GRANULE)
    module, delivery, stream = load(driver), Delivery(driver), driver.stream(NON_BLOCKING)
    count = 6 * LANES
    for index in range(count):
        delivery.pieces[index] = Piece(address + index * PIECE, FROM_SLOT, PIECE)
    assert delivery.launch(driver, module, stream, count) == SUCCESS
    context = driver.make("cuCtxGetCurrent", ctypes.c_void_p)
    codes: list[int] = []

    def wait() -> None:  # on the simulator this is what runs the kernel
        codes.extend((driver.cuCtxSetCurrent(context), driver.cuStreamSynchronize(stream)))

    waiting = threading.Thread(target=wait)
    waiting.start()
    for index in range(count):
        lane, number = index % LANES, index // LANES + 1
        while number > delivery.word(lane, DONE) + 2:
            time.sleep(0)
        delivery.fill_slot(lane, (number - 1) % 2, number, index + 1)
    waiting.join()
    assert codes == [SUCCESS, SUCCESS]
    content = driver.read(address, count * PIECE)
    assert content == b"".join(bytes([index + 1]) * PIECE for index in range(count))
    assert driver.cuModuleUnload(module) == SUCCESS
    assert driver.cuStreamDestroy(stream) == SUCCESS
    assert driver.cuMemFreeHost(delivery.memory) == SUCCESS
    driver.free_mapped(address, handle, 4 * GRANULE)


def test_a_delivery_that_is_given_up_ends_and_opens_its_gates(driver: Driver) -> None:
    address, handle = driver.mapped(GRANULE)
    module, delivery, stream = load(driver), Delivery(driver), driver.stream(NON_BLOCKING)
    for index in range(20):
        delivery.pieces[index] = Piece(address + index * PIECE, FROM_SLOT, PIECE)
    for lane in range(LANES):
        delivery.board[delivery.at(lane, BASE)] = 100
    assert delivery.launch(driver, module, stream, 20) == SUCCESS
    delivery.board[0] = 1
    assert driver.cuStreamSynchronize(stream) == SUCCESS
    assert [delivery.word(lane, DONE) for lane in range(LANES)] == [0] * LANES
    assert [delivery.word(lane, GATE) for lane in range(LANES)] == [103] * 4 + [102] * 4
    assert driver.cuModuleUnload(module) == SUCCESS
    assert driver.cuStreamDestroy(stream) == SUCCESS
    assert driver.cuMemFreeHost(delivery.memory) == SUCCESS
    driver.free_mapped(address, handle, GRANULE)


def test_a_count_below_the_grid_bounds_the_work(driver: Driver) -> None:
    address, handle = driver.mapped(GRANULE)
    module, lists = load(driver), Lists(driver)
    lists.fills[0] = Fill(address, (3, 3))  # the others name no memory
    entry = function(driver, module, "ebbtide_fill_blocks")
    arguments = ctypes.c_uint64(ctypes.addressof(lists.fills)), ctypes.c_uint32(1)
    assert launch(driver, entry, 0, 4, THREADS, *arguments) == SUCCESS
    assert driver.cuStreamSynchronize(None) == SUCCESS
    assert driver.read(address, 8) == bytes([3, *[0] * 7])
    assert driver.cuModuleUnload(module) == SUCCESS
    assert driver.cuMemFreeHost(lists.memory) == SUCCESS
    driver.free_mapped(address, handle, GRANULE)


def test_modules_check_their_arguments(driver: Driver) -> None:
    assert driver.cuModuleLoadData(ctypes.c_void_p(), None) == INVALID_VALUE
    assert driver.cuModuleLoadData(None, image()) == INVALID_VALUE
    module, found = load(driver), ctypes.c_void_p()
    name = ctypes.create_string_buffer(b"ebbtide_digest_block")
    assert driver.cuModuleGetFunction(found, module, name) == NOT_FOUND
    assert driver.cuModuleGetFunction(found, module, None) == INVALID_VALUE
    assert driver.cuModuleGetFunction(None, module, name) == INVALID_VALUE
    assert driver.cuModuleUnload(module) == SUCCESS


@pytest.mark.cuda_only("HIP loads no PTX")
@pytest.mark.parametrize(
    ("text", "code"),
    [
        (".version 7.0\n.address_size 64\n", INVALID_PTX),
        (".version 99.0\n.target sm_60\n.address_size 64\n", UNSUPPORTED_PTX_VERSION),
    ],
)
def test_ptx_that_the_driver_does_not_take(driver: Driver, text: str, code: int) -> None:
    assert driver.cuModuleLoadData(ctypes.c_void_p(), image(text)) == code


def test_a_kernel_of_no_size_or_of_too_many_threads_is_refused(driver: Driver) -> None:
    module = load(driver)
    entry = function(driver, module, "ebbtide_fill_blocks")
    arguments = ctypes.c_uint64(0), ctypes.c_uint32(0)
    for grid, block in ((0, THREADS), (1, 0), (1, 2048)):
        assert launch(driver, entry, 0, grid, block, *arguments) == INVALID_VALUE
    assert launch(driver, entry, 0, 1, THREADS, *arguments) == SUCCESS
    assert driver.cuStreamSynchronize(None) == SUCCESS
    assert driver.cuModuleUnload(module) == SUCCESS


def test_a_captured_launch_does_not_run(driver: Driver) -> None:
    address, handle = driver.mapped(GRANULE)
    module, lists, stream = load(driver), Lists(driver), driver.stream(NON_BLOCKING)
    assert driver.cuMemsetD8Async(address, 7, GRANULE, stream) == SUCCESS
    assert driver.cuStreamSynchronize(stream) == SUCCESS
    lists.fills[0] = Fill(address, (0, 0))
    entry = function(driver, module, "ebbtide_fill_blocks")
    assert driver.cuStreamBeginCapture(stream, CAPTURE_GLOBAL) == SUCCESS
    assert fill(driver, entry, stream, ctypes.addressof(lists.fills), 1) == SUCCESS
    graph = ctypes.c_void_p()
    assert driver.cuStreamEndCapture(stream, graph) == SUCCESS
    assert driver.cuStreamSynchronize(stream) == SUCCESS
    assert driver.read(address, 4) == b"\7\7\7\7"
    assert driver.cuGraphDestroy(graph.value) == SUCCESS
    assert driver.cuModuleUnload(module) == SUCCESS
    assert driver.cuStreamDestroy(stream) == SUCCESS
    assert driver.cuMemFreeHost(lists.memory) == SUCCESS
    driver.free_mapped(address, handle, GRANULE)


def run_over(driver: Driver, address: int, expected: int) -> None:
    """Digests memory that is no block; the answer comes from waiting, and stays."""
    stream, module, lists = driver.stream(NON_BLOCKING), load(driver), Lists(driver)
    lists.addresses[0] = address
    entry = function(driver, module, "ebbtide_digest_blocks")
    lists_at = ctypes.addressof(lists.addresses), ctypes.addressof(lists.reports)
    code = digest(driver, entry, stream, *lists_at, 1)
    found = [code, driver.cuStreamSynchronize(stream), driver.cuCtxSynchronize()]
    if found != [SUCCESS, expected, expected]:
        sys.exit(f"unexpected: {found}")


def start(driver: Driver) -> None:
    assert driver.cuInit(0) == SUCCESS
    assert driver.cuCtxSetCurrent(driver.make("cuDevicePrimaryCtxRetain", ctypes.c_void_p, 0)) == SUCCESS


def digest_an_unmapped_block(driver: Driver) -> None:
    start(driver)
    run_over(driver, driver.reserve(GRANULE), ILLEGAL_ADDRESS)


def digest_a_misaligned_block(driver: Driver) -> None:
    start(driver)
    run_over(driver, driver.mapped(2 * GRANULE)[0] + 8, MISALIGNED_ADDRESS)


@pytest.mark.parametrize("body", [digest_an_unmapped_block, digest_a_misaligned_block])
def test_a_bad_address_stays_with_the_context(fresh: Fresh, body: Callable[[Driver], None]) -> None:
    fresh(body)


def test_a_launch_is_work_of_its_stream(driver: Driver) -> None:
    """What polls the stream, or waits for an event behind the launch, finds it done."""
    address, handle = driver.mapped(GRANULE)
    module, lists, stream, event = load(driver), Lists(driver), driver.stream(NON_BLOCKING), driver.event()
    lists.fills[0] = Fill(address, (9, 9))
    entry = function(driver, module, "ebbtide_fill_blocks")
    assert fill(driver, entry, stream, ctypes.addressof(lists.fills), 1) == SUCCESS
    assert driver.cuEventRecord(event, stream) == SUCCESS
    assert driver.cuStreamQuery(stream) in (SUCCESS, NOT_READY)
    assert driver.cuEventSynchronize(event) == SUCCESS
    assert driver.read(address, 1) == b"\x09"
    assert driver.cuEventDestroy(event) == SUCCESS
    assert driver.cuModuleUnload(module) == SUCCESS
    assert driver.cuStreamDestroy(stream) == SUCCESS
    assert driver.cuMemFreeHost(lists.memory) == SUCCESS
    driver.free_mapped(address, handle, GRANULE)
