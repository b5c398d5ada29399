"""The amount of memory that a program sees (EBBTIDE_REPORT), within EBBTIDE_DEVICE_LIMIT, from the driver and from
NVML."""

import json
import sys

import pytest
from preload_clients import MIB, Clients

LIMIT = {"EBBTIDE_DEVICE_LIMIT": str(24 * MIB), "EBBTIDE_RESERVE": "0"}
HOST = {"EBBTIDE_HOST_LIMIT": str(16 * MIB), "EBBTIDE_HOST_MARGIN": "0"}

NVML = """
import ctypes, json, sys
class Memory(ctypes.Structure):
    _fields_ = [(n, ctypes.c_ulonglong) for n in ("total", "free", "used")]
class Memory2(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint)] + [(n, ctypes.c_ulonglong) for n in ("total", "reserved", "free", "used")]
nvml = ctypes.CDLL("libnvidia-ml.so.1")
device = ctypes.c_void_p()
if hasattr(nvml, "nvmlInit_v2"):
    assert nvml.nvmlInit_v2() == 0 and nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)) == 0
def told():
    one, two = Memory(), Memory2()
    two.version = ctypes.sizeof(Memory2) | 2 << 24
    assert nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(one)) == 0
    assert nvml.nvmlDeviceGetMemoryInfo_v2(device, ctypes.byref(two)) == 0
    assert one.used == one.total - one.free and two.used + two.free <= two.total
    assert (one.total, one.free) == (two.total, two.free)
    return one.total >> 20, one.free >> 20
answers = [told()]
if "take" in sys.argv:
    cuda = ctypes.CDLL("libcuda.so.1")
    context, address = ctypes.c_void_p(), ctypes.c_uint64()
    assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert cuda.cuCtxSetCurrent(context) == 0
    assert cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(6 << 20)) == 0
    answers.append(told())
print(json.dumps(answers))
"""


@pytest.mark.parametrize(
    ("report", "free", "total"), [("device", 24, 24), ("free", 24, 24), ("total", 40, 40)], ids=lambda value: str(value)
)
def test_what_a_program_is_told(clients: Clients, report: str, free: int, total: int) -> None:
    done = clients.run("cudart12", "info", EBBTIDE_REPORT=report, **LIMIT, **HOST)
    assert [int(word) // MIB for word in done.stdout.split()] == [free, total, total]


@pytest.mark.parametrize("report", ["free", "total"])
def test_what_never_spills_is_not_told_of_the_host(clients: Clients, report: str) -> None:
    done = clients.run("cudart12", "info", EBBTIDE_REPORT=report, EBBTIDE_OVERFLOW="none", **LIMIT, **HOST)
    assert [int(word) // MIB for word in done.stdout.split()] == [24, 24, 24]


@pytest.mark.sim_only
def test_the_reserve_of_a_spill_is_not_free(clients: Clients) -> None:
    settings = {"EBBTIDE_REPORT": "total", "EBBTIDE_RESERVE": str(4 * MIB)}
    done = clients.run("cudart12", "info", **(LIMIT | settings), **HOST)
    assert [int(word) // MIB for word in done.stdout.split()] == [36, 40, 40]


@pytest.mark.parametrize(("report", "with_it"), [("device", 6), ("free", 22), ("total", 22)])
def test_free_grows_by_what_the_host_has_left(clients: Clients, report: str, with_it: int) -> None:
    done = clients.run("cudart12", "take", "alloc", 18 * MIB, EBBTIDE_REPORT=report, **LIMIT, **HOST)
    before, at_most, after = (int(word) // MIB for word in done.stdout.split())
    assert at_most == with_it
    assert before == after


@pytest.mark.parametrize(("report", "with_it"), [("device", 0), ("free", 8), ("total", 8)])
def test_a_spill_is_no_more_free(clients: Clients, report: str, with_it: int) -> None:
    """32 MiB on a device of 24 MiB: the 8 MiB on the host are subtracted from the host's 16."""
    done = clients.run("cudart12", "take", "alloc", 32 * MIB, EBBTIDE_REPORT=report, **LIMIT, **HOST)
    assert [int(word) // MIB for word in done.stdout.split()][1] == with_it, done.stderr


@pytest.mark.device_memory
@pytest.mark.parametrize("report", ["device", "free", "total"])
def test_free_is_never_above_the_total(clients: Clients, report: str) -> None:
    done = clients.run("cudart12", "info", EBBTIDE_REPORT=report)
    free, total, of_device = (int(word) for word in done.stdout.split())
    assert free <= total == of_device


def ask_nvml(clients: Clients, *words: str, preload: str | None = "ours", **settings: str) -> list[list[int]]:
    # NVML numbers all devices of the machine in the order of their buses.
    same_device = {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    done = clients.start([sys.executable, "-c", NVML, *words], preload, **same_device, **settings)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_nvml_tells_the_same(clients: Clients) -> None:
    assert ask_nvml(clients, **LIMIT) == [[24, 24]]
    assert ask_nvml(clients, EBBTIDE_REPORT="total", **LIMIT, **HOST) == [[40, 40]]


def test_nvml_knows_what_the_program_took(clients: Clients) -> None:
    assert ask_nvml(clients, "take", **LIMIT) == [[24, 24], [24, 18]]


@pytest.mark.sim_only  # checks the numbers of the stand-in for NVML
def test_nvml_without_a_limit_tells_the_truth(clients: Clients) -> None:
    assert ask_nvml(clients) == ask_nvml(clients, preload=None) == [[1024, 600]]


# The driver documents no rounding. Small allocations count in units of 512 bytes, others in units of 2 MiB.
@pytest.mark.parametrize(
    ("size", "counted"), [(1, 512), (513, 1024), (2 * MIB - 1, 2 * MIB), (2 * MIB, 2 * MIB), (2 * MIB + 1, 4 * MIB)]
)
def test_an_allocation_counts_as_the_driver_cuts_it(clients: Clients, size: int, counted: int) -> None:
    done = clients.run("linked", "take", "alloc", size, **LIMIT)
    assert [int(word) for word in done.stdout.split()] == [24 * MIB, 24 * MIB - counted, 24 * MIB], done.stderr


# 8 MiB in rows of 1024 bytes, and 32 MiB that do not fit.
@pytest.mark.parametrize(("height", "took"), [(8 << 10, 8), (32 << 10, 24)])
def test_rows_are_as_wide_as_the_driver_makes_them(clients: Clients, height: int, took: int) -> None:
    done = clients.run("linked", "pitch", 1000, height, **LIMIT)
    assert (done.returncode, done.stdout) == (0, f"pitch 1024, took {took * MIB}\n"), done.stderr


@pytest.mark.sim_only
@pytest.mark.parametrize("call", ["alloc", "pitch", "async", "pool", "managed", "mapped"])
def test_what_the_driver_does_not_free_is_taken_still(clients: Clients, call: str) -> None:
    done = clients.run("cudart12", "free-fails", call, 6 * MIB, **LIMIT)
    assert done.returncode == 0, done.stderr


EACH_DEVICE = """
answers = []
for index in range(3):
    device = ctypes.c_void_p(index)
    answers.append(told())
print(json.dumps(answers))
"""


@pytest.mark.sim_only  # the stand-in for NVML has as many devices as the test wants
@pytest.mark.parametrize(("device", "free"), [(0, [[24, 18], [24, 24], [24, 24]]), (1, [[24, 24], [24, 18], [24, 24]])])
def test_nvml_tells_of_the_device_that_it_is_asked_about(clients: Clients, device: int, free: list[list[int]]) -> None:
    """6 MiB are taken on one of two devices. The third is no device of this process."""
    program = NVML.replace("(ctypes.byref(context), 0)", f"(ctypes.byref(context), {device})") + EACH_DEVICE
    done = clients.start([sys.executable, "-c", program, "take"], EBBTIDE_SIM_DEVICES="2", **LIMIT)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == free
