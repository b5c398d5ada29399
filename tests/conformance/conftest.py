"""Conformance: one set of rules, run on the simulator and on the real driver, with the same codes expected from both.

EBBTIDE_TEST_DRIVER=sim|cuda|hip chooses; with EBBTIDE_SIM_HIP=1 the simulator is called by HIP's names. On a GPU these
tests are harmless: they take a few MiB, give everything back, and cause no error that stays. What harms a context runs
in a process of its own (`fresh`).
"""

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import hip_calls
import pytest
from driver_calls import SUCCESS, Driver
from other_process import OtherProcess

HERE = Path(__file__).resolve().parent
DRIVER = os.environ.get("EBBTIDE_TEST_DRIVER", "sim")
IS_SIMULATED = DRIVER == "sim"


def library_path() -> str:
    if not IS_SIMULATED:
        return hip_calls.find_hip() if DRIVER == "hip" else "libcuda.so.1"
    import ebbtide

    return str(Path(ebbtide.__file__ or "").parent / "libebbtide_sim.so")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    """The driver as loaded; nothing has been called. Of the simulator a copy, since each test resets it: ebbtide's own
    one serves other tests of this process."""
    path = library_path()
    if IS_SIMULATED:
        path = str(shutil.copy2(path, tmp_path_factory.mktemp("driver")))
    return Driver(path)


@pytest.fixture
def driver(library: Driver) -> Generator[Driver]:
    """An initialised driver with the primary context of device 0 current; checks afterwards that no error stayed."""
    if IS_SIMULATED:
        library.handle.ebbtide_sim_reset()
    assert library.cuInit(0) == SUCCESS
    context = library.make("cuDevicePrimaryCtxRetain", ctypes.c_void_p, 0)
    before = library.make("cuCtxGetCurrent", ctypes.c_void_p)
    assert library.cuCtxSetCurrent(context) == SUCCESS
    yield library
    assert library.cuCtxSynchronize() == SUCCESS, "the test left an error or a capture behind"
    assert library.cuCtxSetCurrent(before or None) == SUCCESS
    assert library.cuDevicePrimaryCtxRelease(0) == SUCCESS


@pytest.fixture
def fresh() -> Callable[[Callable[[Driver], object]], str]:
    """Runs a module-level function on a driver in a new process where nothing has been called; returns its output."""

    def run(function: Callable[[Driver], object]) -> str:
        code = (
            f"import sys; sys.path[:0] = [{str(HERE)!r}]; from driver_calls import Driver; "
            f"import {function.__module__} as module; module.{function.__name__}(Driver({library_path()!r}))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def other() -> Generator[Callable[..., OtherProcess]]:
    """Starts another process with the driver, and with these variables; it ends with the test."""
    started: list[OtherProcess] = []

    def start(**variables: str) -> OtherProcess:
        started.append(OtherProcess(library_path(), **variables))
        return started[-1]

    yield start
    for process in started:
        process.close()
