"""Two simulated devices that access each other's memory, with `ebbtide._core` alone. One of them may start late."""

import pytest

pytestmark = pytest.mark.sim_only

PREAMBLE = """
import ctypes, os, sys
sys.path.insert(0, os.environ["CORE_TESTS"])
from ebbtide import _core
from core_sim import CHUNK, Sim, fill, is_filled
_core.use_driver("sim")
sim = Sim()
driver = sim._library
REFUSED = 1  # CUDA_ERROR_INVALID_VALUE

def wake(device):
    context = ctypes.c_void_p()
    assert driver.cuInit(0) == 0
    assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
    return context

def copy(to, source, context):
    # In the order of that device's legacy stream, and waited for.
    before = ctypes.c_void_p()
    assert driver.cuCtxGetCurrent(ctypes.byref(before)) == 0 and driver.cuCtxSetCurrent(context) == 0
    size, to, source = ctypes.c_size_t(CHUNK), ctypes.c_uint64(to), ctypes.c_uint64(source)
    code = driver.cuMemcpyDtoDAsync_v2(to, source, size, None)
    assert driver.cuCtxSynchronize() == 0 and driver.cuCtxSetCurrent(before) == 0
    return code

def native(context):
    address, before = ctypes.c_uint64(), ctypes.c_void_p()
    assert driver.cuCtxGetCurrent(ctypes.byref(before)) == 0 and driver.cuCtxSetCurrent(context) == 0
    assert driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(CHUNK)) == 0
    assert driver.cuCtxSetCurrent(before) == 0
    return address.value
"""


@pytest.fixture
def run(run_python, request):
    """Runs a program after the preamble. It must end with status 0 and write nothing to stderr."""

    def run_program(code, **environment):
        settings = {"EBBTIDE_DRIVER": "sim", "EBBTIDE_SIM_DEVICES": "2"} | environment
        done = run_python(PREAMBLE + code, CORE_TESTS=str(request.path.parent), **settings)
        assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr

    return run_program


LATE = """
here = _core.alloc("w", CHUNK)
second = wake(1)
there = native(second)
fill(there, CHUNK, 3)
assert copy(here, there, second) == REFUSED  # the gap
"""


@pytest.mark.parametrize(
    "occasion",
    [
        '_core.alloc("other", CHUNK)',
        '_core.alloc("other", CHUNK, device=1)',
        '_core.Frame().open_lease("other", "a test")',
        '_core.resume(["w"])',
    ],
)
def test_a_late_device_is_caught_up_with(run, occasion):
    run(f"""{LATE}
{occasion}
assert copy(here, there, second) == 0 and is_filled(here, CHUNK, 3)
""")


def test_access_outlives_pause_and_resume_in_both_directions(run):
    run("""
second = wake(1)
here, there = _core.alloc("a", CHUNK), _core.alloc("b", CHUNK, device=1)
first = wake(0)
for round in range(3):
    fill(there, CHUNK, 10 + round)
    assert copy(here, there, second) == 0 and is_filled(here, CHUNK, 10 + round)
    _core.pause(["a", "b"])
    _core.resume(["a", "b"])
    assert is_filled(here, CHUNK, 10 + round) and is_filled(there, CHUNK, 10 + round)
    fill(here, CHUNK, 20 + round)
    assert copy(there, here, first) == 0 and is_filled(there, CHUNK, 20 + round)
""")


def test_a_device_that_does_not_reach_the_memory_gets_no_access(run):
    run("""
driver.ebbtide_sim_set_peers(1, 0, 0)
second = wake(1)
here, there = _core.alloc("a", CHUNK), native(second)
assert copy(here, there, second) == REFUSED
""")


def test_one_device_is_asked_nothing(run):
    run(
        """
block = _core.alloc("w", CHUNK)
_core.pause([])
_core.resume([])
_core.Frame().open_lease("w", "a test")
assert sim.calls("cuDevicePrimaryCtxGetState") == sim.calls("cuDeviceCanAccessPeer") == 0
assert sim.calls("cuMemSetAccess") == 2 and sim.calls("cuDeviceGetCount") == 1
""",
        EBBTIDE_SIM_DEVICES="1",
    )


def test_a_forked_child_may_exit_beside_another_threads_growth(run):
    run("""
import threading
over = threading.Event()

def churn():
    while not over.is_set():
        driver.cuDevicePrimaryCtxRelease_v2(1)
        wake(1)
        _core.Frame().open_lease("x", "a thread")

blocks = [_core.alloc("w", CHUNK) for _ in range(8)]
wake(1)
thread = threading.Thread(target=churn)
thread.start()
for _ in range(20):
    child = os.fork()
    if child == 0:
        try:
            _core.Frame().open_lease("w", "a child")
        except Exception as error:
            os._exit(0 if "forked child" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
over.set()
thread.join()
""")
