"""Clients written in C, which find the driver in every way known from real programs, and functions to run them.

On the simulated device, the simulator is on the library path as libcuda.so.1. On a GPU, the same clients run on the
real driver.
"""

import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from checks.toolchain import find_cuda_include

CLIENTS = Path(__file__).resolve().parent / "clients"
SIMULATOR = CLIENTS.parents[2] / "csrc/sim"
ACTIONS = ("actions", "captures", "faults", "mapped", "refusals")  # which call the driver by pointers that they get
IS_SIMULATED = os.environ.get("EBBTIDE_TEST_DRIVER", "sim") == "sim"
MIB = 1 << 20

# The beginning of Python programs that call the driver by ctypes. `take` is a call of the program's own, `torch.take`
# one of torch's allocator; sys.argv[1] is the folder of the libraries that play torch and NCCL.
PROGRAM = """
import ctypes, sys
from ebbtide import _core
cuda = ctypes.CDLL("libcuda.so.1")
MIB = 1 << 20

def check(code):
    assert code == 0, code

def take_by(call, size):
    address = ctypes.c_uint64()
    check(call(ctypes.byref(address), ctypes.c_size_t(size)))
    return address.value

def take(size):
    return take_by(cuda.cuMemAlloc_v2, size)

def free(address):
    check(cuda.cuMemFree_v2(ctypes.c_uint64(address)))

def free_mib():
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    check(cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)))
    return free.value // MIB

def write(address, data):
    check(cuda.cuMemcpyHtoD_v2(ctypes.c_uint64(address), data, ctypes.c_size_t(len(data))))

def read(address, size):
    data = ctypes.create_string_buffer(size)
    check(cuda.cuMemcpyDtoH_v2(data, ctypes.c_uint64(address), ctypes.c_size_t(size)))
    return data.raw

def held():
    return {tag.tag: tag.resident_bytes // MIB for tag in _core.tags() if tag.resident_bytes}

def use_torch(folder):
    global torch, torch_cuda, nccl
    names = ("c10_cuda.so", "torch_cuda.so", "nccl.so.2")
    torch, torch_cuda, nccl = (ctypes.CDLL(f"{folder}/lib{name}") for name in names)

context = ctypes.c_void_p()
check(cuda.cuInit(0))
check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
check(cuda.cuCtxSetCurrent(context))
"""

# How a client that opens libcuda.so.1 itself finds the functions.
LOADED_WAYS = (
    "names",
    "names-global",
    "names-default",
    "names-deepbind",
    "cudart12",
    "cudart12-for-11",
    "cudart11",
    "per-thread",
)
# Clients that are linked against it: a program, and a library that a program opens.
LINKED_WAYS = ("linked", "library-local", "library-global")
WAYS = (*LINKED_WAYS, *LOADED_WAYS)


def package() -> Path:
    import ebbtide

    return Path(ebbtide.__file__ or "").parent


@dataclass
class Clients:
    """The compiled clients, and functions to run them.

    Attributes:
        folder: contains the clients.
        drivers: a folder with libcuda.so.1 and libnvidia-ml.so.1, first on the library path; None for the system's.
    """

    folder: Path
    drivers: Path | None
    preload: str = field(default_factory=lambda: str(package() / "libebbtide_preload.so"))

    def command(self, way: str) -> list[str]:
        if way == "linked":
            return [str(self.folder / "linked"), way]
        if way.startswith("library-"):
            return [str(self.folder / "host"), way.removeprefix("library-"), str(self.folder / "liblinked.so"), way]
        return [str(self.folder / "loaded"), way]

    def environment(self, preload: str | None, settings: dict[str, str]) -> dict[str, str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("EBBTIDE_")}
        environment.pop("LD_PRELOAD", None)
        environment["EBBTIDE_SIM_CAPACITY"] = str(64 * MIB)
        environment.update(settings)
        if self.drivers is not None:
            environment["LD_LIBRARY_PATH"] = str(self.drivers)
        if preload:
            environment["LD_PRELOAD"] = preload
        return environment

    def start(
        self, command: list[str], preload: str | None = "ours", **settings: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs any command. preload is "ours", None, or the content of LD_PRELOAD."""
        libraries = self.preload if preload == "ours" else preload
        return subprocess.run(
            command,
            env=self.environment(libraries, settings),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            stdin=subprocess.DEVNULL,
        )

    def run(
        self, way: str, *words: object, preload: str | None = "ours", **settings: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs a client."""
        return self.start([*self.command(way), *map(str, words)], preload, **settings)


def compile_c(output: Path, sources: list[str], *options: str) -> None:
    command = ["cc", "-std=gnu11", "-Wall", "-Wextra", "-Werror", f"-I{find_cuda_include()}", f"-I{SIMULATOR}"]
    command += [str(CLIENTS / source) for source in sources]
    subprocess.run([*command, "-o", str(output), *options], check=True)


def make_drivers(folder: Path) -> Path:
    """Makes a folder with the simulator as libcuda.so.1, and with a stand-in for NVML, if it is not there."""
    if not folder.exists():
        part = folder.with_suffix(".part")
        part.mkdir()
        (part / "libcuda.so.1").symlink_to(package() / "libebbtide_sim.so")
        compile_c(part / "libnvidia-ml.so.1", ["nvml.c"], "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1")
        part.rename(folder)
    return folder


def make_link_library(folder: Path, without: str = "") -> Path:
    """Makes the library that clients are linked against: a libcuda.so.1 with all symbols but one, and without code."""
    names = subprocess.run(
        ["nm", "-D", "--defined-only", str(package() / "libebbtide_sim.so")], check=True, capture_output=True, text=True
    ).stdout.split()
    source = folder / "names.c"
    source.write_text(
        "".join(f"int {name}(void) {{ return 3; }}\n" for name in names if name.startswith("cu") and name != without)
    )
    library = folder / "libcuda.so"
    subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(library), "-Wl,-soname,libcuda.so.1"], check=True)
    return library


def build_clients(folder: Path, optimisation: str, drivers: Path | None) -> Clients:
    """The clients of this folder, which are compiled if it is not there."""
    if not folder.exists():
        part = folder.with_suffix(".part")
        part.mkdir()
        compile_clients(part, optimisation)
        part.rename(folder)
    return Clients(folder, drivers)


def compile_clients(folder: Path, optimisation: str) -> None:
    link_library = str(make_link_library(folder))
    for name in ACTIONS:
        compile_c(folder / f"{name}.o", [f"{name}.c"], optimisation, "-c", "-fPIC")
    actions = [str(folder / f"{name}.o") for name in ACTIONS]
    compile_c(folder / "loaded", ["main.c", "loaded.c"], *actions, optimisation, "-ldl")
    compile_c(folder / "linked", ["main.c", "linked.c"], *actions, optimisation, link_library, "-ldl")
    shared = ("-shared", "-fPIC", optimisation)
    compile_c(folder / "liblinked.so", ["library.c", "linked.c"], *actions, *shared, link_library, "-ldl")
    # torch's allocator is recognised by the name of its file.
    compile_c(folder / "libc10_cuda.so", ["library.c", "linked.c"], *actions, *shared, link_library, "-ldl")
    (folder / "torch").mkdir()
    for name in ("libc10_cuda.so", "libtorch_cuda.so", "libnccl.so.2"):
        compile_c(folder / "torch" / name, ["torch.c"], *shared, link_library)
    compile_c(folder / "host", ["host.c"], optimisation, "-ldl")
    compile_c(folder / "process", ["process.c"], optimisation, link_library, "-ldl", "-pthread")
    compile_c(folder / "liblate.so", ["late.c"], *shared, link_library, "-ldl")
    compile_c(folder / "libchain.so", ["chain.c"], *shared, "-ldl")
    compile_c(folder / "libchain_dlsym.so", ["chain_dlsym.c"], *shared, "-ldl")
