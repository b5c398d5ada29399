"""`ebbtide run --simulate` and Python: regions of CPU tensors, and the program's own calls of the driver."""

import os
import subprocess
import sys

import pytest
from ebbtide import driver_choice


@pytest.fixture
def variables(tmp_path):
    """This process's environment without ebbtide's settings, and with a folder for ledgers of the test's own."""
    (tmp_path / "runtime").mkdir()
    ours = ("EBBTIDE_", "LD_PRELOAD", "LD_LIBRARY_PATH")
    plain = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**plain, "XDG_RUNTIME_DIR": str(tmp_path / "runtime")}


@pytest.fixture
def run(variables):
    """`ebbtide run ARGUMENTS`: status, stdout, stderr. Keywords are variables; None unsets one."""

    def run(*arguments, **environment):
        everything = {name: value for name, value in {**variables, **environment}.items() if value is not None}
        command = [sys.executable, "-m", "ebbtide.cli", "run", *map(str, arguments)]
        done = subprocess.run(command, env=everything, capture_output=True, text=True, timeout=120, check=False)
        return done.returncode, done.stdout, done.stderr

    return run


CPU_TENSORS = """
import ctypes
import torch
from ebbtide import saver

driver, free, total = ctypes.CDLL("libcuda.so.1"), ctypes.c_size_t(), ctypes.c_size_t()
with saver.region("weights"):
    weights = torch.ones(8 << 20, dtype=torch.uint8, device=saver.device)
context = ctypes.c_void_p()
assert driver.cuInit(0) == 0
assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert driver.cuCtxSetCurrent(context) == 0
assert driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
print(saver.device, total.value >> 20, total.value - free.value >= 8 << 20, torch.version.cuda)
"""


@pytest.mark.expected_skip("of the builds of torch, only those for the CPU work with --simulate")
def test_a_torch_without_cuda_has_its_regions_on_the_same_device(run):
    """A CPU build needs no line that says where its tensors are: it was asked for."""
    status, out, error = run("--simulate=64MiB", "--", sys.executable, "-c", CPU_TENSORS)
    if not out.endswith("None\n") and "leave --simulate out" in error:
        pytest.skip("this torch is built with CUDA")
    assert (status, out, error) == (0, "cpu 64 True None\n", "")


BOTH = """
import ctypes, sys
import torch
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
print(seen(), torch.equal(weights, torch.arange(2 * MIB, dtype=torch.int64)), torch.version.cuda)
"""


@pytest.mark.expected_skip("of the builds of torch, only those for the CPU work with --simulate")
@pytest.mark.parametrize("first", ["driver", "region"])
def test_regions_and_calls_of_the_driver_have_one_limit_whichever_comes_first(run, first):
    options = ["--simulate=64MiB", "--device-limit", "24MiB", "--reserve", "0", "--log", "error"]
    status, out, error = run(*options, "--", sys.executable, "-c", BOTH, first)
    if not out.endswith("None\n") and "leave --simulate out" in error:
        pytest.skip("this torch is built with CUDA")
    assert (status, out, error) == (0, "(4, 24) (20, 24) (8, 24) True None\n", "")


PARENT = """
import os, sys
import ebbtide
import torch
from ebbtide import saver

if sys.argv[1] == "env":
    os.environ.update(ebbtide.env(simulate="64MiB"))
with ebbtide.preloaded(simulate=True):
    with saver.region("weights"):
        kept = torch.ones(9)
print(saver.where(kept).tag, torch.version.cuda)
"""


@pytest.mark.expected_skip("of the builds of torch, only those for the CPU work with --simulate")
@pytest.mark.parametrize("way", ["preloaded", "env"])
def test_what_only_children_are_to_meet_leaves_the_parents_device(variables, way):
    command = [sys.executable, "-c", PARENT, way]
    variables = {**variables, "EBBTIDE_DRIVER": "auto"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)
    if "leave --simulate out" in done.stderr:
        pytest.skip("this torch is built with CUDA")
    assert (done.returncode, done.stdout) == (0, "weights None\n"), done.stderr


def test_a_simulated_driver_that_does_not_start_says_what_to_look_at(run):
    status, _, error = run("--simulate", "--", sys.executable, "-c", CPU_TENSORS, EBBTIDE_SIM_DEVICES="0")
    if "leave --simulate out" in error:
        pytest.skip("this torch is built with CUDA")
    assert status == 1 and "the simulated device does not start" in error and "nvidia-smi" not in error


WITH_CUDA = """
from ebbtide import driver_choice
driver_choice.installed_torch_kind = lambda: "cuda"
driver_choice.choose_for_tensors()
"""


def test_a_torch_with_cuda_is_refused_with_a_sentence(run):
    status, _, error = run("--simulate", "--", sys.executable, "-c", WITH_CUDA)
    assert status == 1
    assert error.splitlines()[-1].startswith("ebbtide.errors.StateError: torch is built with CUDA, whose kernels")
    assert "leave --simulate out" in error
    outcome = driver_choice.decide("auto", "cuda", driver_choice.SIMULATED)
    assert outcome.driver is None
    problem, advice = outcome.problem_and_advice()
    assert problem.endswith("`ebbtide run --simulate`") and advice.startswith("leave --simulate out")
