"""Deleters of region tensors that run without Python: after the interpreter, at a thread's end, and of raw pointers."""

import subprocess
import textwrap

import pytest
import torch
from ebbtide.torch_extension.build import find_compiler

pytestmark = pytest.mark.sim_only

PRELUDE = """
import ctypes, threading, time
import torch
from ebbtide import _core, torch_extension
_core.use_driver("sim")
T = torch_extension.load()
T.install()
H = ctypes.CDLL({holder!r})
H.raw_allocate.restype = ctypes.c_void_p
W = T.pool_create(_core.bind_slot("weights", 0, 1), "weights")
def make(build):
    T.pool_enter(W)
    build()
    T.pool_leave(W)
def used():
    return sum(size for _, _, blocks in T.pool_snapshot(W) for _, size, is_allocated in blocks if is_allocated)
"""

HOLDER = r"""
#include <c10/core/CPUAllocator.h>
#include <pthread.h>
#include <cstring>
static c10::DataPtr kept;
static pthread_key_t key;
extern "C" {
void hold(size_t size) { kept = c10::GetCPUAllocator()->allocate(size); }
// A value of thread-specific data, freed when the thread ends.
void hold_for_thread(size_t size) {
  pthread_key_create(&key, [](void* data) { delete static_cast<c10::DataPtr*>(data); });
  pthread_setspecific(key, new c10::DataPtr(c10::GetCPUAllocator()->allocate(size)));
}
void* raw_allocate(size_t size) { return c10::GetCPUAllocator()->raw_allocate(size); }
void raw_deallocate(void* data) { c10::GetCPUAllocator()->raw_deallocate(data); }
int clone_is_equal(size_t size) {
  auto* allocator = c10::GetCPUAllocator();
  c10::DataPtr first = allocator->allocate(size);
  std::memset(first.get(), 7, size);
  c10::DataPtr second = allocator->clone(first.get(), size);
  if (!allocator->is_simple_data_ptr(second) || second.get() == first.get()) return 0;
  return std::memcmp(first.get(), second.get(), size) == 0;
}
}
"""


@pytest.fixture(scope="module")
def holder(tmp_path_factory):
    """A library that keeps memory of torch's CPU allocator in a static object, which is freed after the interpreter."""
    folder = tmp_path_factory.mktemp("holder")
    source, library = folder / "holder.cpp", folder / "holder.so"
    source.write_text(HOLDER)
    torch_folder = torch.__path__[0]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    options = [*("-std=c++20", "-O1", "-DNDEBUG", "-fPIC", "-shared"), abi]
    options += [f"-I{torch_folder}/include", f"-L{torch_folder}/lib", "-lc10"]
    subprocess.run([*find_compiler(), str(source), *options, "-o", str(library)], check=True, timeout=300)
    return library


@pytest.fixture
def run_program(run_python, holder):
    """Runs a program that has the library as H. It must end with status 0 and print nothing."""

    def run(program: str) -> None:
        result = run_python(PRELUDE.format(holder=str(holder)) + textwrap.dedent(program), whole_exit=True)
        assert (result.returncode, result.stderr) == (0, "")

    return run


@pytest.mark.parametrize("pause", ["", "_core.pause(['weights'])"], ids=["resident", "paused"])
def test_invariant6_a_deleter_runs_after_the_interpreter_is_gone(run_program, pause):
    run_program(f"make(lambda: H.hold(ctypes.c_size_t(1000)))\n{pause}\n")


@pytest.mark.parametrize("pause", ["", "_core.pause(['weights'])"], ids=["resident", "paused"])
def test_invariant6_a_deleter_runs_as_its_thread_ends(run_program, pause):
    run_program(f"""
def work():
    make(lambda: H.hold_for_thread(ctypes.c_size_t(1000)))
    {pause}
    assert used() == 1024
thread = threading.Thread(target=work); thread.start(); thread.join()
deadline = time.monotonic() + 10
while used() and time.monotonic() < deadline: time.sleep(0.01)
assert used() == 0
""")


def test_raw_pointers_of_any_origin_are_given_back(run_program):
    run_program("""
ordinary = H.raw_allocate(ctypes.c_size_t(100))
def inside():
    global ours
    ours = H.raw_allocate(ctypes.c_size_t(100))
    assert _core.find(ours).tag == "weights" and _core.find(ordinary) is None
    H.raw_deallocate(ctypes.c_void_p(ordinary))
    assert H.clone_is_equal(ctypes.c_size_t(5000))
make(inside)
assert used() == 512
H.raw_deallocate(ctypes.c_void_p(ours))
H.raw_deallocate(None)
assert H.clone_is_equal(ctypes.c_size_t(5000))
assert used() == 0
""")
