"""The clients as fixtures. preload_clients.py describes them."""

from collections.abc import Callable, Iterator

import pytest
from preload_clients import IS_SIMULATED, Clients, build_clients, make_drivers


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Clients]]:
    folder = tmp_path_factory.mktemp("preload")
    drivers = make_drivers(folder / "drivers") if IS_SIMULATED else None
    built: dict[str, Clients] = {}

    def build_once(optimisation: str) -> Clients:
        if optimisation not in built:
            built[optimisation] = build_clients(folder / optimisation.strip("-"), optimisation, drivers)
        return built[optimisation]

    yield build_once


@pytest.fixture(scope="session")
def clients(build: Callable[[str], Clients]) -> Clients:
    return build("-O2")


@pytest.fixture(scope="session", params=["-O0", "-O2"])
def each_clients(request: pytest.FixtureRequest, build: Callable[[str], Clients]) -> Clients:
    """The clients compiled without and with optimisation, because tail calls and stack frames differ."""
    return build(request.param)
