"""Programs whose devices access each other's memory: enabling access also opens the memory that ebbtide has placed."""

import pytest
from preload_clients import MIB, Clients

pytestmark = pytest.mark.sim_only

TWO = {"EBBTIDE_SIM_DEVICES": "2", "EBBTIDE_DEVICE_LIMIT": str(24 * MIB), "EBBTIDE_RESERVE": "0"}
INVALID_VALUE, ALREADY_ENABLED = 1, 704


@pytest.mark.parametrize("is_pauseable", ["0", "1"])
@pytest.mark.parametrize("way", ["linked", "names", "cudart11", "cudart12", "per-thread"])
def test_a_peer_writes_what_was_placed_before_it_came(clients: Clients, way: str, is_pauseable: str) -> None:
    done = clients.run(
        way, "peers", 32 * MIB, 0, EBBTIDE_PAUSEABLE=is_pauseable, EBBTIDE_PAUSEABLE_ALL="1", EBBTIDE_LOG="error", **TWO
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert done.stdout == f"enabled 0, then {ALREADY_ENABLED}, copied 0: right\n"


@pytest.mark.parametrize("way", ["linked", "cudart12"])
def test_native_memory_is_the_drivers_business(clients: Clients, way: str) -> None:
    done = clients.run(way, "peers", 6 * MIB, 0, EBBTIDE_LOG="error", **TWO)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert done.stdout == f"enabled 0, then {ALREADY_ENABLED}, copied 0: right\n"


@pytest.mark.parametrize("way", ["linked", "cudart12"])
def test_what_cant_be_granted_is_a_line_and_no_failure_of_the_call(clients: Clients, way: str) -> None:
    """The device itself continues. The driver refuses a copy by the peer."""
    done = clients.run(way, "peers", 32 * MIB, 1, EBBTIDE_LOG="error", **TWO)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"enabled 0, then {ALREADY_ENABLED}, copied {INVALID_VALUE}: not there\n"
    own = [line for line in done.stderr.splitlines() if line.startswith("ebbtide: ")]
    assert len(own) == 1
    assert "cuCtxEnablePeerAccess: the device got no access to some of what ebbtide placed" in own[0]


@pytest.mark.parametrize("settings", [{"EBBTIDE_OVERFLOW": "none"}, {}], ids=["no overflow", "overflow"])
def test_without_memory_of_ours_enabling_says_nothing(clients: Clients, settings: dict[str, str]) -> None:
    """ebbtide has placed no memory, so the hook has nothing to do."""
    plain = clients.run("cudart12", "peers", 6 * MIB, 0, preload=None, EBBTIDE_SIM_DEVICES="2")
    hooked = clients.run("cudart12", "peers", 6 * MIB, 0, EBBTIDE_SIM_DEVICES="2", **settings)
    assert (hooked.stdout, hooked.stderr) == (plain.stdout, plain.stderr)
