"""What plain programs of the driver API call and ebbtide does not: contexts of their own, copies, fills."""

import ctypes
from collections.abc import Callable, Generator

import pytest
from driver_calls import INVALID_CONTEXT, INVALID_DEVICE, INVALID_VALUE, SUCCESS, Driver

pytestmark = pytest.mark.cuda_only("plain programs call HIP by other names, and nothing stands between")
SIZE = 1 << 16
MakeContext = Callable[[], int]


def creator(driver: Driver) -> Callable[..., int]:
    """cuCtxCreate in the shape that it has had since CUDA 3.2, and that no version after 11.3 asks for."""
    code, _, address = driver.address_of("cuCtxCreate", 11030)
    assert code == SUCCESS
    function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint, ctypes.c_int)(address or 0)
    return lambda pointer, *arguments: function(ctypes.byref(pointer) if pointer is not None else None, *arguments)


@pytest.fixture
def make_context(driver: Driver) -> Generator[MakeContext]:
    """Makes contexts, which are current; those that are left are destroyed, and the stack is as before."""
    made: list[int] = []

    def make() -> int:
        context = ctypes.c_void_p()
        assert creator(driver)(context, 0, 0) == SUCCESS
        made.append(context.value or 0)
        return made[-1]

    before = driver.make("cuCtxGetCurrent", ctypes.c_void_p)
    yield make
    for context in made:
        driver.cuCtxDestroy(context)
    while driver.make("cuCtxGetCurrent", ctypes.c_void_p) not in (0, before):
        assert driver.cuCtxPopCurrent(None) == SUCCESS
    assert driver.cuCtxSetCurrent(before) == SUCCESS


def current(driver: Driver) -> int:
    return driver.make("cuCtxGetCurrent", ctypes.c_void_p)


def test_a_context_is_current_when_it_is_made(driver: Driver, make_context: MakeContext) -> None:
    before = current(driver)
    own = make_context()
    assert current(driver) == own != before
    assert driver.make("cuCtxGetDevice", ctypes.c_int) == 0
    assert driver.make("cuCtxPopCurrent", ctypes.c_void_p) == own
    assert current(driver) == before


def test_a_context_wants_a_device_and_a_pointer(driver: Driver) -> None:
    assert creator(driver)(ctypes.c_void_p(), 0, 99) == INVALID_DEVICE
    assert creator(driver)(None, 0, 0) == INVALID_VALUE


# What comes between the pointer and the flags, by the first CUDA version that asks for that shape.
PARAMETERS: dict[int, tuple[int | None, ...]] = {3020: (), 11040: (None, 0), 12050: (None,)}


@pytest.mark.parametrize("version", [3020, 11030, 11040, 12040, 12050, 13000])
def test_each_version_makes_contexts_in_its_own_shape(driver: Driver, version: int) -> None:
    """A function that took another shape's arguments would read the flags or the parameters as the device."""
    if driver.make("cuDriverGetVersion", ctypes.c_int) < version:
        return
    before = current(driver)
    code, status, address = driver.address_of("cuCtxCreate", version)
    assert (code, status) == (SUCCESS, 0) and address
    parameters = PARAMETERS[max(first for first in PARAMETERS if first <= version)]
    types = [ctypes.c_void_p, ctypes.c_int][: len(parameters)]
    create = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, *types, ctypes.c_uint, ctypes.c_int)(address)
    context = ctypes.c_void_p()
    assert create(ctypes.byref(context), *parameters, 0, 99) == INVALID_DEVICE
    assert create(ctypes.byref(context), *parameters, 0, 0) == SUCCESS
    assert current(driver) == context.value != before
    assert driver.cuCtxDestroy(context.value) == SUCCESS
    assert current(driver) == before


def test_setting_replaces_the_top_of_the_stack(driver: Driver, make_context: MakeContext) -> None:
    before, first, second = current(driver), make_context(), make_context()
    assert driver.cuCtxSetCurrent(first) == SUCCESS
    assert [driver.make("cuCtxPopCurrent", ctypes.c_void_p) for _ in range(2)] == [first, first]
    assert current(driver) == before
    assert driver.cuCtxPushCurrent(second) == SUCCESS
    assert driver.cuCtxSetCurrent(None) == SUCCESS
    assert current(driver) == before


def test_an_empty_stack_has_nothing_to_pop(driver: Driver) -> None:
    context = driver.make("cuCtxPopCurrent", ctypes.c_void_p)
    assert driver.cuCtxPopCurrent(ctypes.c_void_p()) == INVALID_CONTEXT
    assert driver.cuCtxPushCurrent(context) == SUCCESS


def test_destroying_the_current_context_pops_it(driver: Driver, make_context: MakeContext) -> None:
    before, own = current(driver), make_context()
    address = driver.allocate(SIZE)
    stream = driver.stream()
    assert driver.cuMemsetD8Async(address, 1, SIZE, stream) == SUCCESS
    assert driver.cuCtxDestroy(own) == SUCCESS
    assert current(driver) == before
    assert driver.cuPointerGetAttribute(ctypes.c_int(), 2, address) == INVALID_VALUE  # its memory is gone


@pytest.mark.parametrize(("name", "kind", "value"), [("D8", "B", 0x5A), ("D16", "H", 0x1234), ("D32", "I", 0x12345678)])
@pytest.mark.parametrize("variant", ["", "Async"])
def test_fills_write_their_value(driver: Driver, name: str, kind: str, value: int, variant: str) -> None:
    width = {"B": 1, "H": 2, "I": 4}[kind]
    address = driver.allocate(SIZE)
    driver.write(address, b"\xee" * SIZE)
    stream = (None,) if variant else ()
    fill = getattr(driver, f"cuMemset{name}{variant}")
    assert fill(address + 16, value, 64, *stream) == SUCCESS
    assert fill(address, value, 0, *stream) == SUCCESS
    expected = b"\xee" * 16 + value.to_bytes(width, "little") * 64
    assert driver.read(address, len(expected) + 8) == expected + b"\xee" * 8
    assert fill(address + SIZE - width, value, 2, *stream) == INVALID_VALUE
    assert driver.cuMemFree(address) == SUCCESS


@pytest.mark.parametrize(("name", "width"), [("D16", 2), ("D32", 4)])
def test_fills_want_aligned_addresses(driver: Driver, name: str, width: int) -> None:
    address = driver.allocate(SIZE)
    assert getattr(driver, f"cuMemset{name}")(address + width // 2, 0, 1) == INVALID_VALUE
    assert getattr(driver, f"cuMemset{name}Async")(address + width // 2, 0, 1, None) == INVALID_VALUE
    assert driver.cuMemFree(address) == SUCCESS


def test_a_copy_finds_out_where_its_ends_are(driver: Driver) -> None:
    """cuMemcpy and cuMemcpyAsync take device memory and host memory, pinned or not."""
    first, second, pinned = (
        driver.allocate(SIZE),
        driver.allocate(SIZE),
        driver.make("cuMemAllocHost", ctypes.c_void_p, SIZE),
    )
    plain, answer = ctypes.create_string_buffer(b"x" * SIZE, SIZE), ctypes.create_string_buffer(SIZE)
    assert driver.cuMemcpy(first, ctypes.addressof(plain), SIZE) == SUCCESS
    assert driver.cuMemcpyDtoD(second, first, SIZE) == SUCCESS
    assert driver.cuMemcpyAsync(pinned, second, SIZE, None) == SUCCESS
    assert driver.cuCtxSynchronize() == SUCCESS
    assert driver.cuMemcpy(ctypes.addressof(answer), pinned, SIZE) == SUCCESS
    assert answer.raw == plain.raw
    assert driver.cuMemFreeHost(pinned) == SUCCESS
    assert [driver.cuMemFree(address) for address in (first, second)] == [SUCCESS, SUCCESS]


def test_pinned_memory_has_an_address_on_the_device(driver: Driver) -> None:
    pinned = driver.make("cuMemAllocHost", ctypes.c_void_p, SIZE)
    assert driver.make("cuMemHostGetDevicePointer", ctypes.c_uint64, pinned, 0) == pinned
    assert driver.cuMemHostGetDevicePointer(ctypes.c_uint64(), pinned, 1) == INVALID_VALUE
    plain = ctypes.create_string_buffer(SIZE)
    assert driver.cuMemHostGetDevicePointer(ctypes.c_uint64(), ctypes.addressof(plain), 0) == INVALID_VALUE
    assert driver.cuMemFreeHost(pinned) == SUCCESS


def test_a_module_loads_with_options(driver: Driver) -> None:
    ptx = b".version 8.0\n.target sm_52\n.address_size 64\n.visible .entry k(){ret;}\n"
    module = driver.make("cuModuleLoadDataEx", ctypes.c_void_p, ctypes.create_string_buffer(ptx), 0, None, None)
    assert driver.make("cuModuleGetFunction", ctypes.c_void_p, module, ctypes.create_string_buffer(b"k")) != 0
    assert driver.cuModuleUnload(module) == SUCCESS
