"""Every way to find the driver leads to the hooks, and nothing else does."""

from pathlib import Path

import pytest
from preload_clients import MIB, WAYS, Clients, make_link_library

LIMIT = 24 * MIB


@pytest.mark.parametrize("way", WAYS)
def test_a_client_sees_the_hooks(each_clients: Clients, way: str) -> None:
    done = each_clients.run(way, "info", EBBTIDE_DEVICE_LIMIT=str(LIMIT))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == [str(LIMIT)] * 3


@pytest.mark.sim_only
@pytest.mark.parametrize("way", [*WAYS, "library-deepbind"])
def test_without_the_library_a_client_sees_the_driver(clients: Clients, way: str) -> None:
    done = clients.run(way, "info", preload=None, EBBTIDE_DEVICE_LIMIT=str(LIMIT))
    assert (done.returncode, done.stdout.split()) == (0, [str(64 * MIB)] * 3)


@pytest.mark.sim_only
def test_a_deep_bound_library_is_out_of_reach(clients: Clients) -> None:
    """Known limit: such a library finds its own libc and its own libcuda before any preloaded library."""
    done = clients.run("library-deepbind", "info", EBBTIDE_DEVICE_LIMIT=str(LIMIT))
    assert (done.returncode, done.stdout.split()) == (0, [str(64 * MIB)] * 3)


@pytest.mark.sim_only
@pytest.mark.parametrize("settings", [{"EBBTIDE_DRIVER": "sim"}, {"EBBTIDE_DRIVER": "off"}])
@pytest.mark.parametrize("way", WAYS)
def test_hooks_can_be_switched_off(clients: Clients, way: str, settings: dict[str, str]) -> None:
    done = clients.run(way, "info", EBBTIDE_DEVICE_LIMIT=str(LIMIT), **settings)
    assert (done.returncode, done.stdout.split()) == (0, [str(64 * MIB)] * 3)


@pytest.mark.parametrize("other", ["before libchain.so", "behind libchain.so", "behind libchain_dlsym.so"])
@pytest.mark.parametrize("way", WAYS)
def test_another_preloaded_library_works_beside_ours(each_clients: Clients, way: str, other: str) -> None:
    order, name = other.split()
    theirs = str(each_clients.folder / name)
    libraries = [theirs, each_clients.preload] if order == "before" else [each_clients.preload, theirs]
    done = each_clients.run(way, "info", preload=":".join(libraries), EBBTIDE_DEVICE_LIMIT=str(LIMIT))
    assert (done.returncode, done.stdout.split()) == (0, [str(LIMIT)] * 3), done.stderr
    assert done.stderr.startswith("chain: ")


@pytest.mark.parametrize("way", ["names", "cudart12"])
def test_a_hook_of_dlsym_behind_ours_is_called(clients: Clients, way: str) -> None:
    theirs = str(clients.folder / "libchain_dlsym.so")
    done = clients.run(way, "info", preload=f"{clients.preload}:{theirs}", EBBTIDE_DEVICE_LIMIT=str(LIMIT))
    assert int(done.stderr.removeprefix("chain: ")) > 0


@pytest.mark.sim_only
def test_a_hook_of_dlsym_before_ours_hides_ours(clients: Clients) -> None:
    """Known limit: such libraries request libc's dlsym by its version. `ebbtide run` puts our library first."""
    theirs = str(clients.folder / "libchain_dlsym.so")
    done = clients.run("names", "info", preload=f"{theirs}:{clients.preload}", EBBTIDE_DEVICE_LIMIT=str(LIMIT))
    assert (done.returncode, done.stdout.split()) == (0, [str(64 * MIB)] * 3)


@pytest.mark.parametrize("way", ["linked", "library-local", "library-global"])
def test_a_library_before_ours_sees_the_calls_of_linked_programs(clients: Clients, way: str) -> None:
    theirs = str(clients.folder / "libchain.so")
    done = clients.run(way, "info", preload=f"{theirs}:{clients.preload}", EBBTIDE_DEVICE_LIMIT=str(LIMIT))
    assert (done.stdout.split(), done.stderr) == ([str(LIMIT)] * 3, "chain: 3\n")


@pytest.mark.sim_only
def test_a_driver_that_lacks_a_hooked_function_leaves_no_error(clients: Clients, tmp_path: Path) -> None:
    """Our own look-ups of it fail, but the program's look-up succeeded, and programs query dlerror for that."""
    make_link_library(tmp_path, without="cuDeviceGetAttribute").rename(tmp_path / "libcuda.so.1")
    done = Clients(clients.folder, tmp_path).start([str(clients.folder / "process"), "look-up"])
    assert (done.returncode, done.stderr) == (0, "")
