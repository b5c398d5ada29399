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
ACTIONS = ("actions.c", "captures.c", "faults.c", "mapped.c", "refusals.c")
IS_SIMULATED = os.environ.get("EBBTIDE_TEST_DRIVER", "sim") == "sim"
MIB = 1 << 20

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
    """Makes a folder with the simulator as libcuda.so.1, and with a stand-in for NVML."""
    folder.mkdir()
    (folder / "libcuda.so.1").symlink_to(package() / "libebbtide_sim.so")
    compile_c(folder / "libnvidia-ml.so.1", ["nvml.c"], "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1")
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
    folder.mkdir()
    link_library = str(make_link_library(folder))
    compile_c(folder / "loaded", ["main.c", "loaded.c", *ACTIONS], optimisation, "-ldl")
    compile_c(folder / "linked", ["main.c", "linked.c", *ACTIONS], optimisation, link_library, "-ldl")
    shared = ("-shared", "-fPIC", optimisation)
    compile_c(folder / "liblinked.so", ["library.c", "linked.c", *ACTIONS], *shared, link_library, "-ldl")
    # torch's allocator is recognised by the name of its file.
    compile_c(folder / "libc10_cuda.so", ["library.c", "linked.c", *ACTIONS], *shared, link_library, "-ldl")
    compile_c(folder / "host", ["host.c"], optimisation, "-ldl")
    compile_c(folder / "process", ["process.c"], optimisation, link_library, "-ldl", "-pthread")
    compile_c(folder / "liblate.so", ["late.c"], *shared, link_library, "-ldl")
    compile_c(folder / "libchain.so", ["chain.c"], *shared, "-ldl")
    compile_c(folder / "libchain_dlsym.so", ["chain_dlsym.c"], *shared, "-ldl")
    return Clients(folder, drivers)
