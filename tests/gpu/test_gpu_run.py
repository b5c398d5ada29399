"""Real programs under `ebbtide run`: they compute on 1.5 times the device's limit, and some pause from inside.

The programs in programs/ do not use ebbtide, except for the lines that pause. JAX, CuPy and nvcc may be missing.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

GIB = 1 << 30
LIMIT = 4 * GIB
WANTED = 6 * GIB
HOST_LIMIT = 16 * GIB
PROGRAMS = Path(__file__).parent / "programs"
TIMEOUT = 240


def python(name: str, *words: object) -> list[str]:
    return [sys.executable, str(PROGRAMS / name), *map(str, words)]


def start(command: list[str], *options: object, is_preloaded: bool = True, **environment: str):
    """Runs a command under `ebbtide run` with these options, or without it."""
    if is_preloaded:
        command = [sys.executable, "-m", "ebbtide.cli", "run", *map(str, options), "--", *command]
    return subprocess.run(
        command,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


def assert_right(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert done.stdout.endswith("all is right\n")


def need(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")


def spilled_bytes(stderr: str) -> float:
    """The bytes that went to the host, from the line of --summary."""
    units = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": GIB}
    found = re.findall(
        r"^ebbtide: summary of .*; ([\d.]+) (\w+) of \d+ allocations? went to the host", stderr, re.MULTILINE
    )
    return sum(float(number) * units[unit] for number, unit in found)


@pytest.fixture(scope="module")
def native_program(tmp_path_factory: pytest.TempPathFactory) -> str:
    if shutil.which("nvcc") is None:
        pytest.skip("there is no nvcc")
    output = tmp_path_factory.mktemp("nvcc") / "overflow"
    subprocess.run(["nvcc", "-O2", str(PROGRAMS / "overflow.cu"), "-o", str(output)], check=True, capture_output=True)
    linked = subprocess.run(["ldd", str(output)], check=True, capture_output=True, text=True).stdout
    assert "libcudart" not in linked  # the runtime inside it is the static one
    return str(output)


@contextmanager
def full_device(left_bytes: int) -> Iterator[int]:
    """Another process holds the device except for this much. Returns how much is free then."""
    command = python("hold.py", left_bytes)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin is not None and holder.stdout is not None
        try:
            yield int(holder.stdout.readline())
        finally:
            holder.stdin.close()
            holder.wait(60)


# --- 1.5 times the limit ---


@pytest.mark.expected_skip("nvcc is only needed here")
@pytest.mark.parametrize("policy", ["split", "managed", "whole"])
def test_a_program_with_the_static_runtime(native_program: str, policy: str) -> None:
    command = [native_program, str(WANTED)]
    options = ("--device-limit", LIMIT, "--host-limit", HOST_LIMIT, "--summary")
    done = start(command, "--overflow", policy, *options)
    assert_right(done)
    assert "ebbtide: summary" in done.stderr
    if policy == "split":
        assert WANTED - LIMIT <= spilled_bytes(done.stderr) <= WANTED
    refused = start(command, "--overflow", "none", *options)
    assert refused.returncode == 3 and "out of memory" in refused.stderr


@pytest.mark.parametrize("policy", ["split", "managed", "whole"])
def test_torch(policy: str) -> None:
    command = python("torch_overflow.py", WANTED)
    options = ("--device-limit", LIMIT, "--host-limit", HOST_LIMIT, "--summary")
    done = start(command, "--overflow", policy, *options)
    assert_right(done)
    assert spilled_bytes(done.stderr) >= WANTED - LIMIT


def test_torch_without_a_policy_is_out_of_memory() -> None:
    refused = start(python("torch_overflow.py", WANTED), "--overflow", "none", "--device-limit", LIMIT)
    assert refused.returncode == 1 and "OutOfMemoryError" in refused.stderr


@pytest.mark.expected_skip("jax is only needed here")
def test_jax_with_the_platform_allocator() -> None:
    need("jax")
    command = python("jax_overflow.py", WANTED)
    options = ("--device-limit", LIMIT, "--host-limit", HOST_LIMIT, "--summary")
    done = start(command, *options, XLA_PYTHON_CLIENT_ALLOCATOR="platform")
    assert_right(done)
    assert spilled_bytes(done.stderr) > 0
    refused = start(command, "--overflow", "none", *options, XLA_PYTHON_CLIENT_ALLOCATOR="platform")
    assert refused.returncode != 0 and "RESOURCE_EXHAUSTED" in refused.stderr


@pytest.mark.expected_skip("jax is only needed here")
def test_jax_with_its_preallocation_needs_to_be_told_of_the_host() -> None:
    """JAX takes three quarters of the free memory that it sees, all at once, and no more later."""
    need("jax")
    command = python("jax_overflow.py", WANTED)
    options = ("--device-limit", LIMIT, "--host-limit", 8 * GIB, "--summary")
    done = start(command, "--report", "total", *options)
    assert_right(done)
    assert spilled_bytes(done.stderr) > 0
    refused = start(command, "--report", "device", *options)
    assert refused.returncode != 0 and "RESOURCE_EXHAUSTED" in refused.stderr


@pytest.mark.expected_skip("cupy is only needed here")
@pytest.mark.parametrize("allocator", ["pool", "async"])
def test_cupy(allocator: str) -> None:
    need("cupy")
    command = python("cupy_overflow.py", WANTED, allocator)
    options = ("--device-limit", LIMIT, "--host-limit", HOST_LIMIT, "--summary")
    done = start(command, *options)
    assert_right(done)
    assert spilled_bytes(done.stderr) > 0
    refused = start(command, "--overflow", "none", *options)
    assert refused.returncode != 0 and re.search("OutOfMemory|out of memory", refused.stderr)


# --- a device that other processes have filled ---


@pytest.mark.device_memory
def test_torch_where_others_have_the_device() -> None:
    """There is no limit: the driver itself refuses. Without ebbtide the program dies; with it, the program
    continues."""
    command = python("torch_overflow.py", WANTED)
    with full_device(5 * GIB) as free_bytes:
        assert free_bytes < WANTED
        plain = start(command, is_preloaded=False)
        assert plain.returncode != 0 and "OutOfMemoryError" in plain.stderr
        assert_right(start(command, "--host-limit", HOST_LIMIT))


@pytest.mark.device_memory
@pytest.mark.expected_skip("nvcc is only needed here")
def test_a_program_with_the_static_runtime_where_others_have_the_device(native_program: str) -> None:
    command = [native_program, str(WANTED)]
    with full_device(5 * GIB):
        plain = start(command, is_preloaded=False)
        assert plain.returncode == 3 and "out of memory" in plain.stderr
        assert_right(start(command, "--host-limit", HOST_LIMIT))


# --- two ranks on one device ---


def run_ranks(host_limit: int) -> tuple[list[tuple[int, bool, int]], str]:
    """For each rank: its pieces of 256 MiB, whether it was refused, and how much both held on the host. Also stderr."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, str(PROGRAMS / "rank_overflow.py"), str(3 * GIB)]
    variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}  # the name of this machine need not resolve
    done = start(command, "--device-limit", 2 * GIB, "--host-limit", host_limit, **variables)
    assert done.returncode == 0, f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
    lines = re.findall(r"rank \d: (\d+) pieces, refused (\w+), together (\d+) bytes", done.stdout)
    assert len(lines) == 2, done.stdout
    return [(int(pieces), refused == "True", int(held)) for pieces, refused, held in lines], done.stderr


def test_two_ranks_share_one_host_budget() -> None:
    ranks, stderr = run_ranks(8 * GIB)
    assert [rank[:2] for rank in ranks] == [(12, False)] * 2, stderr
    assert 2 * GIB <= ranks[0][2] <= 8 * GIB


def test_a_rank_that_the_budget_refuses_says_so() -> None:
    ranks, stderr = run_ranks(GIB)
    assert any(is_refused for _, is_refused, _ in ranks)
    assert ranks[0][2] <= GIB
    assert re.search(
        r"^ebbtide: .*can't spill: .* needs .* free for it \(limit .*--host-limit", stderr, re.MULTILINE
    ), stderr


# --- pauseable programs ---

PAUSEABLE = ("--pauseable", "--tag", "default", "--backup", "ram")


@pytest.mark.device_memory
def test_a_training_script_is_paused_by_three_lines() -> None:
    done = start(python("train_pause.py", "pause"), *PAUSEABLE)
    assert done.returncode == 0, done.stderr
    freed, losses = done.stdout.splitlines()
    state_bytes = 4 * 4 * (2 * 2048 * 8192 + 8192 + 2048)  # weights, gradients, two moments, in fp32
    assert int(freed.split()[1]) >= state_bytes
    assert losses == start(python("train_pause.py"), is_preloaded=False).stdout.strip()


@pytest.mark.device_memory
def test_graphs_in_torch_s_own_pool_are_paused_and_replay() -> None:
    assert_right(start(python("graph_pause.py"), *PAUSEABLE))


def test_a_pauseable_program_overflows_as_well() -> None:
    options = ("--device-limit", LIMIT, "--host-limit", HOST_LIMIT)
    assert_right(start(python("torch_overflow.py", WANTED), *PAUSEABLE, *options))
