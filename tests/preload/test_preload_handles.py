"""Memory that a program makes with cuMemCreate and maps itself: a handle is on the device or on the host as a whole."""

import re

import pytest
from preload_clients import MIB, Clients

OUT_OF_MEMORY = 2
SUMMARY = r"ebbtide: summary of \S+ \(PID \d+\): "
LIMIT = {"EBBTIDE_DEVICE_LIMIT": str(24 * MIB), "EBBTIDE_RESERVE": "0"}
# 36 MiB: one and a half times the limit.
BLOCKS = (6, 6 * MIB)


def test_handles_count_and_are_refused_beyond_the_limit(clients: Clients) -> None:
    done = clients.run("cudart12", "handles", 6 * MIB, **LIMIT)
    assert [int(word) // MIB for word in done.stdout.split()] == [24, 18, 24], done.stderr
    refused = clients.run("cudart12", "handles", 26 * MIB, EBBTIDE_OVERFLOW="none", **LIMIT)
    assert refused.returncode == OUT_OF_MEMORY
    assert "ebbtide: cuMemCreate: device 0 has too little memory: 26 MiB wanted" in refused.stderr


@pytest.mark.parametrize(("mib", "there"), [(6, 18), (26, 24)], ids=["on the device", "on the host"])
def test_a_handle_that_is_retained_counts_until_all_is_given_back(clients: Clients, mib: int, there: int) -> None:
    done = clients.run("cudart12", "retained", mib * MIB, EBBTIDE_SUMMARY="1", **LIMIT)
    assert [int(word) // MIB for word in done.stdout.split()] == [24, there, there, there, there, 24], done.stderr


@pytest.mark.parametrize("policy", ["split", "whole", "managed"])
def test_memory_that_a_program_maps_lies_on_the_host_handle_by_handle(clients: Clients, policy: str) -> None:
    done = clients.run("cudart12", "fill", "mapped", *BLOCKS, EBBTIDE_OVERFLOW=policy, **LIMIT)
    assert "ebbtide: device 0 is full: all 6 MiB of a cuMemCreate lie in " in done.stderr
    assert done.stderr.count("ebbtide: ") == 1
    # If three or more handles are on the host, the first is reported, and the summary counts all.
    many = clients.run("cudart12", "fill", "mapped", 9, 6 * MIB, EBBTIDE_OVERFLOW=policy, EBBTIDE_SUMMARY="1", **LIMIT)
    first, summary = many.stderr.splitlines()
    assert first.startswith("ebbtide: device 0 is full: all 6 MiB of a cuMemCreate lie in ")
    went = r"at most 24 MiB on device 0; 30 MiB of 5 allocations went to the host, 0 bytes were promoted"
    assert re.fullmatch(SUMMARY + went, summary), summary
    took = clients.run("cudart12", "take", "mapped", 32 * MIB, EBBTIDE_OVERFLOW=policy, **LIMIT)
    assert [int(word) // MIB for word in took.stdout.split()] == [24, 24, 24], took.stderr


def test_memory_that_a_program_maps_counts_against_the_host_limit(clients: Clients) -> None:
    fits = clients.run("cudart12", "fill", "mapped", *BLOCKS, EBBTIDE_HOST_LIMIT=str(12 * MIB), **LIMIT)
    assert fits.returncode == 0, fits.stderr
    refused = clients.run("cudart12", "fill", "mapped", *BLOCKS, EBBTIDE_HOST_LIMIT=str(11 * MIB), **LIMIT)
    assert refused.returncode == OUT_OF_MEMORY
    assert (
        "ebbtide: cuMemCreate: memory that the program maps needs 6 MiB of host memory; 5 MiB are free"
        in refused.stderr
    ), refused.stderr
