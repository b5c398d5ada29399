"""torch's own allocator, played by a library of that name: it flushes its cache when it is refused, and asks again."""

import subprocess

import pytest
from preload_clients import MIB, Clients

LIMIT = {"EBBTIDE_DEVICE_LIMIT": str(28 * MIB), "EBBTIDE_RESERVE": "0"}


def run_torch(clients: Clients, size: int, policy: str) -> subprocess.CompletedProcess[str]:
    host, torch = str(clients.folder / "host"), str(clients.folder / "libc10_cuda.so")
    return clients.start([host, "local", torch, "linked", "cached", str(size)], EBBTIDE_OVERFLOW=policy, **LIMIT)


@pytest.mark.parametrize("policy", ["split", "whole", "managed"])
def test_torch_is_refused_once_and_what_it_gives_back_is_used(clients: Clients, policy: str) -> None:
    """Its cache keeps two blocks of 10 MiB. The third fits once they are freed."""
    done = run_torch(clients, 10 * MIB, policy)
    assert (done.returncode, done.stdout, done.stderr) == (0, "refused, then taken\n", "")


@pytest.mark.parametrize("policy", ["split", "whole", "managed"])
def test_torch_spills_when_it_has_nothing_to_give_back(clients: Clients, policy: str) -> None:
    done = run_torch(clients, 32 * MIB, policy)
    assert (done.returncode, done.stdout) == (0, "refused, then taken\n"), done.stderr


@pytest.mark.parametrize("policy", ["split", "whole", "managed"])
def test_others_are_not_refused(clients: Clients, policy: str) -> None:
    done = clients.run("library-local", "cached", 32 * MIB, EBBTIDE_OVERFLOW=policy, **LIMIT)
    assert (done.returncode, done.stdout) == (0, "taken\n"), done.stderr
