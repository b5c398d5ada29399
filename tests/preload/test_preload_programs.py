"""Programs of the driver API that know nothing of ebbtide: contexts of their own, regions beside their own memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from checks.toolchain import find_cuda_include
from preload_clients import MIB, Clients, make_link_library, package

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "09_driver_program.c"

OWN_CONTEXTS = """
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#define MIB ((size_t)1 << 20)
#define CHECK(call) if ((call) != CUDA_SUCCESS) { fprintf(stderr, "line %d: %s\\n", __LINE__, #call); exit(9); }
typedef CUresult (*Create)(CUcontext*, void*, unsigned, CUdevice);

int main(void) {
  CUcontext first, second;
  Create create;
  enum { COUNT = 6 };
  CUdeviceptr buffers[COUNT], copy;
  CHECK(cuInit(0));
  CHECK(cuGetProcAddress("cuCtxCreate", (void**)&create, 13000, 0, NULL));
  CHECK(create(&second, NULL, 0, 0));
  CHECK(create(&first, NULL, 0, 0));
  for (int i = 0; i < COUNT; ++i) {
    CHECK(cuMemAlloc(&buffers[i], 16 * MIB));
    CHECK(cuMemsetD8(buffers[i], 'a' + i, 16 * MIB));
  }
  CHECK(cuMemAlloc(&copy, 16 * MIB));
  for (int i = 0; i < COUNT; ++i) {
    char last;
    CHECK(cuMemcpyDtoD(copy, buffers[i], 16 * MIB));
    CHECK(cuMemcpyDtoH(&last, copy + 16 * MIB - 1, 1));
    if (last != 'a' + i) return 3;
  }
  for (int i = 0; i < COUNT; ++i) CHECK(cuMemFree(buffers[i]));
  CHECK(cuCtxDestroy(first)); /* with the copy, if that is the driver's */
  CHECK(cuCtxPushCurrent(second));
  CHECK(cuCtxSynchronize());
  if (cuMemFree(copy) == CUDA_SUCCESS) puts("kept");
  CHECK(cuCtxDestroy(second));
  return puts("whole") < 0;
}
"""

# In two processes, after one import of torch.
BOTH = """
import ctypes, os, sys
import torch
child = os.fork()
first = "driver" if child else "region"
if child:
    assert os.waitpid(child, 0)[1] == 0
torch.version.cuda = None  # a CPU build, whatever it is
from ebbtide import _core, driver_choice, saver

MIB = 1 << 20
_core.use_driver("cuda")  # the simulator under the driver's name, as the program's own calls
driver_choice._chosen = "sim"
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


taken = [take(4)] if first == "driver" else []
with saver.region("weights"):
    weights = torch.arange(2 * MIB, dtype=torch.int64)
taken += [take(4)] if first == "region" else []
print(first, seen(), end=" ")
saver.pause("weights")
print(seen(), end=" ")
taken.append(take(26))  # more than there is, but for a spill
saver.stats()["spills"] == 1 or sys.exit("it did not spill")
for address in taken:
    assert driver.cuMemFree_v2(address) == 0
saver.resume("weights")
print(seen(), torch.equal(weights, torch.arange(2 * MIB, dtype=torch.int64)))
"""


def compile_program(folder: Path, text: str) -> list[str]:
    source, program = folder / "program.c", folder / "program"
    source.write_text(text)
    command = ["cc", "-std=gnu11", "-Wall", "-Werror", f"-I{find_cuda_include()}", str(source), "-o", str(program)]
    subprocess.run([*command, str(make_link_library(folder)), "-ldl"], check=True)
    return [str(program)]


def capacity(mib: int) -> dict[str, str]:
    return {"EBBTIDE_SIM_CAPACITY": str(mib * MIB)}


@pytest.mark.sim_only
def test_the_example_of_a_driver_program_goes_on_past_the_device(clients: Clients, tmp_path: Path) -> None:
    program = compile_program(tmp_path, EXAMPLE.read_text())
    done = clients.start(program, **capacity(256))
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "6 buffers of 64 MiB held what was written")
    assert "lie in host memory" in done.stderr
    done = clients.start(program, **capacity(256), EBBTIDE_OVERFLOW="none")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "cuMemAlloc failed: 2")


@pytest.mark.sim_only
def test_a_spill_outlives_the_programs_own_context(clients: Clients, tmp_path: Path) -> None:
    """ebbtide makes such memory in the primary context."""
    program = compile_program(tmp_path, OWN_CONTEXTS)
    done = clients.start(program, **capacity(256))
    assert (done.returncode, done.stdout, done.stderr) == (0, "whole\n", "")
    done = clients.start(program, **capacity(64))
    assert (done.returncode, done.stdout) == (0, "kept\nwhole\n") and "lie in host memory" in done.stderr


@pytest.mark.sim_only
def test_regions_and_calls_of_the_driver_have_one_limit_whichever_comes_first(clients: Clients) -> None:
    pytest.importorskip("torch")
    variables = {"EBBTIDE_DEVICE_LIMIT": str(24 * MIB), "EBBTIDE_RESERVE": "0", "EBBTIDE_LOG": "error"}
    cache = {name: os.environ[name] for name in ("EBBTIDE_CACHE_DIR",) if name in os.environ}
    command = [sys.executable, "-c", BOTH]
    done = clients.start(command, f"{package() / 'libebbtide_preload.so'}", **capacity(64), **variables, **cache)
    seen = "(4, 24) (20, 24) (8, 24) True"
    assert (done.returncode, done.stdout) == (0, f"region {seen}\ndriver {seen}\n"), done.stderr
