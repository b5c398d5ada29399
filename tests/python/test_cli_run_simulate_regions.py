"""`ebbtide run --simulate` and Python: regions of CPU tensors, and the program's own calls of the driver."""

import subprocess
import sys

import pytest
from ebbtide import driver_choice

CPU_TENSORS = """
import ctypes
import torch
torch.version.cuda = None  # whatever it is: a CPU build works with --simulate
from ebbtide import saver

driver, free, total = ctypes.CDLL("libcuda.so.1"), ctypes.c_size_t(), ctypes.c_size_t()
with saver.region("weights"):
    weights = torch.ones(8 << 20, dtype=torch.uint8, device=saver.device)
context = ctypes.c_void_p()
assert driver.cuInit(0) == 0
assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert driver.cuCtxSetCurrent(context) == 0
assert driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
print(saver.device, total.value >> 20, total.value - free.value >= 8 << 20)
"""


@pytest.mark.sim_only
def test_a_torch_without_cuda_has_its_regions_on_the_same_device(ebbtide_run):
    """A CPU build needs no line that says where its tensors are: it was asked for."""
    status, out, error = ebbtide_run("--simulate=64MiB", "--", sys.executable, "-c", CPU_TENSORS)
    assert (status, out, error) == (0, "cpu 64 True\n", "")


BOTH = """
import ctypes, sys
import torch
torch.version.cuda = None  # whatever it is: a CPU build works with --simulate
from ebbtide import saver

MIB = 1 << 20
driver, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
assert driver.cuInit(0) == 0
assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert driver.cuCtxSetCurrent(context) == 0


def take(mib):
    address = ctypes.c_uint64()
    assert driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(mib * MIB)) == 0
    return address


def seen():
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    assert driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
    return free.value // MIB, total.value // MIB


taken = [take(4)] if sys.argv[1] == "driver" else []
with saver.region("weights"):
    weights = torch.arange(2 * MIB, dtype=torch.int64)
taken += [take(4)] if sys.argv[1] == "region" else []
print(seen(), end=" ")
saver.pause("weights")
print(seen(), end=" ")
taken.append(take(26))  # more than there is, but for a spill
saver.stats()["spills"] == 1 or sys.exit("it did not spill")
for address in taken:
    assert driver.cuMemFree_v2(address) == 0
saver.resume("weights")
print(seen(), torch.equal(weights, torch.arange(2 * MIB, dtype=torch.int64)))
"""


@pytest.mark.sim_only
@pytest.mark.parametrize("first", ["driver", "region"])
def test_regions_and_calls_of_the_driver_have_one_limit_whichever_comes_first(ebbtide_run, first):
    options = ["--simulate=64MiB", "--device-limit", "24MiB", "--reserve", "0", "--log", "error"]
    status, out, error = ebbtide_run(*options, "--", sys.executable, "-c", BOTH, first)
    assert (status, out, error) == (0, "(4, 24) (20, 24) (8, 24) True\n", "")


PARENT = """
import os, sys
import ebbtide
import torch
torch.version.cuda = None  # whatever it is: a CPU build works with --simulate
from ebbtide import saver

if sys.argv[1] == "env":
    os.environ.update(ebbtide.env(simulate="64MiB"))
with ebbtide.preloaded(simulate=True):
    with saver.region("weights"):
        kept = torch.ones(9)
print(saver.where(kept).tag)
"""


@pytest.mark.sim_only
@pytest.mark.parametrize("way", ["preloaded", "env"])
def test_what_only_children_are_to_meet_leaves_the_parents_device(run_variables, way):
    command = [sys.executable, "-c", PARENT, way]
    variables = {**run_variables, "EBBTIDE_DRIVER": "auto"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "weights\n"), done.stderr


@pytest.mark.sim_only
def test_a_simulated_driver_that_does_not_start_says_what_to_look_at(ebbtide_run):
    status, _, error = ebbtide_run("--simulate", "--", sys.executable, "-c", CPU_TENSORS, EBBTIDE_SIM_DEVICES="0")
    assert status == 1 and "the simulated device does not start" in error and "nvidia-smi" not in error


WITH_CUDA = """
from ebbtide import driver_choice
driver_choice.installed_torch_kind = lambda: "cuda"
driver_choice.choose_for_tensors()
"""


def test_a_torch_with_cuda_is_refused_with_a_sentence(ebbtide_run):
    status, _, error = ebbtide_run("--simulate", "--", sys.executable, "-c", WITH_CUDA)
    assert status == 1
    assert error.splitlines()[-1].startswith("ebbtide.errors.StateError: torch is built with CUDA, whose kernels")
    assert "leave --simulate out" in error
    outcome = driver_choice.decide("auto", "cuda", driver_choice.SIMULATED)
    assert outcome.driver is None
    problem, advice = outcome.problem_and_advice()
    assert problem.endswith("`ebbtide run --simulate`") and advice.startswith("leave --simulate out")
