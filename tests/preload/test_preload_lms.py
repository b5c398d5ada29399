"""Large model support in a preloaded program: torch's memory is never sent to the host, and its limit is for tags."""

import sys

import pytest
from preload_clients import MIB, PROGRAM, Clients

ASK = """
use_torch(sys.argv[1])

def ask(call, size):
    return call(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(size))
"""


def run(clients: Clients, program: str, **settings: str) -> tuple[str, str]:
    command = [sys.executable, "-c", PROGRAM + ASK + program, str(clients.folder / "torch")]
    done = clients.start(command, EBBTIDE_SIM_CAPACITY=str(128 * MIB), **settings)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize("overflow", ["split", "whole", "managed", "none"])
def test_what_torch_finds_no_room_for_is_refused_without_a_word(clients: Clients, overflow: str) -> None:
    """Large model support makes room then. Others overflow as before."""
    program = """
_core.leave_torch_to_lms(True)
for _ in range(3):
    print(ask(torch.take, 60 * MIB), held())
print(ask(torch.take, 20 * MIB), ask(torch.take, 20 * MIB), held())
"""
    output, said = run(clients, program, EBBTIDE_DEVICE_LIMIT=str(32 * MIB), EBBTIDE_OVERFLOW=overflow)
    assert output == "2 {}\n" * 3 + "0 2 {}\n" and said == ""


def test_handles_of_expandable_segments_are_refused_in_the_same_way(clients: Clients) -> None:
    program = """
_core.leave_torch_to_lms(True)
print([ask(torch.create, 24 * MIB) for _ in range(3)], _core.stats()["host_bytes"])
print(ask(nccl.create, 24 * MIB))
_core.leave_torch_to_lms(False)
print(ask(torch.create, 24 * MIB), ask(torch.create, 24 * MIB))  # torch is to free its cache first
"""
    output, said = run(clients, program, EBBTIDE_DEVICE_LIMIT=str(32 * MIB), EBBTIDE_OVERFLOW="split")
    assert output == "[0, 2, 2] 0\n0\n2 0\n" and "all 24 MiB of a cuMemCreate lie in host memory" in said


def test_others_overflow_beside_it_and_torch_again_once_it_is_off(clients: Clients) -> None:
    program = """
_core.leave_torch_to_lms(True)
print(ask(nccl.take, 60 * MIB), held())
_core.leave_torch_to_lms(False)
print(ask(torch.take, 60 * MIB), ask(torch.take, 60 * MIB), held())  # torch is to free its cache first
"""
    output, _ = run(clients, program, EBBTIDE_DEVICE_LIMIT=str(32 * MIB), EBBTIDE_OVERFLOW="split")
    assert output == "0 {'overflow': 60}\n2 0 {'overflow': 120}\n"


def test_the_limit_counts_what_ebbtide_holds_and_not_what_the_program_got(clients: Clients) -> None:
    program = """
_core.set_lms_limit(8 * MIB)
by_torch = take_by(torch.take, 24 * MIB)
print(_core.query_device(0).room_bytes // MIB, _core.query_device(0).held_bytes // MIB)
_core.set_lms_limit(_core.UNLIMITED)
print(_core.query_device(0).room_bytes // MIB)
free(by_torch)
print(_core.query_device(0).held_bytes)
"""
    limits = {"EBBTIDE_DEVICE_LIMIT": str(64 * MIB), "EBBTIDE_RESERVE": "0"}
    assert run(clients, program, **limits)[0] == "8 24\n40\n0\n"
