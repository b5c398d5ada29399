"""The clients as fixtures. preload_clients.py describes them."""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from preload_clients import IS_SIMULATED, Clients, build_clients, make_drivers


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """The processes of a run build one after the other. The first one builds for all."""
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Clients]:
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "preload_clients"
    folder.mkdir(exist_ok=True)
    with alone(folder):
        drivers = make_drivers(folder / "drivers") if IS_SIMULATED else None

    def build_once(optimisation: str) -> Clients:
        with alone(folder):
            return build_clients(folder / optimisation.strip("-"), optimisation, drivers)

    return build_once


@pytest.fixture(scope="session")
def clients(build: Callable[[str], Clients]) -> Clients:
    return build("-O2")


@pytest.fixture(scope="session", params=["-O0", "-O2"])
def each_clients(request: pytest.FixtureRequest, build: Callable[[str], Clients]) -> Clients:
    """The clients compiled without and with optimisation, because tail calls and stack frames differ."""
    return build(request.param)
