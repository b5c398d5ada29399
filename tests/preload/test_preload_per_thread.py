"""Functions with names that only a real driver has: those for per-thread default streams, and captures into a graph.

The simulator is behind a library that adds them.
"""

import pytest
from preload_clients import MIB, Clients, compile_c, make_link_library, package

pytestmark = pytest.mark.sim_only

SETTINGS = {
    "EBBTIDE_DEVICE_LIMIT": str(24 * MIB),
    "EBBTIDE_RESERVE": "0",
    "EBBTIDE_REPORT": "total",
    "EBBTIDE_HOST_LIMIT": str(64 * MIB),
    "EBBTIDE_HOST_MARGIN": "0",
}


@pytest.fixture(scope="module")
def per_thread(tmp_path_factory: pytest.TempPathFactory) -> Clients:
    folder = tmp_path_factory.mktemp("per_thread")
    (folder / "drivers").mkdir()
    simulator = package() / "libebbtide_sim.so"
    shared = ("-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", str(simulator), f"-Wl,-rpath,{simulator.parent}")
    compile_c(folder / "drivers" / "libcuda.so.1", ["per_thread_driver.c"], *shared)
    compile_c(folder / "per_thread", ["per_thread.c"], str(make_link_library(folder)), "-ldl")
    return Clients(folder, folder / "drivers")


@pytest.mark.parametrize("policy", ["split", "managed"])
@pytest.mark.parametrize("action", ["capture", "allocate"])
def test_every_variant_is_hooked(per_thread: Clients, action: str, policy: str) -> None:
    command = [str(per_thread.folder / "per_thread"), action, str(32 * MIB)]
    done = per_thread.start(command, EBBTIDE_OVERFLOW=policy, **SETTINGS)
    assert done.returncode == 0, done.stderr
