"""The life of a preloaded program: starts, forks, threads, exits. Judged by exit status and output."""

import shutil
import sys

import pytest
from preload_clients import MIB, Clients

LIMIT = {"EBBTIDE_DEVICE_LIMIT": str(24 * MIB), "EBBTIDE_RESERVE": "0", "EBBTIDE_LOG": "error"}
ACTIONS = (
    "info",
    "leave",
    "leave-at-once",
    "leave-quickly",
    "atexit",
    "threads",
    "fork-exit",
    "fork-exec",
    "fork-use",
    "fork-threads",
    "vfork",
    "exec",
)


@pytest.mark.parametrize("action", ACTIONS)
def test_a_program_ends_in_peace(clients: Clients, action: str) -> None:
    done = clients.start([str(clients.folder / "process"), action], **LIMIT)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.sim_only
@pytest.mark.parametrize("report", ["device", "total"])
def test_nvml_in_a_parent_leaves_its_children_all_of_ebbtide(clients: Clients, report: str) -> None:
    """NVML starts no CUDA, so a child that is forked afterwards may use the device, here beyond its limit."""
    host = {"EBBTIDE_HOST_LIMIT": str(16 * MIB), "EBBTIDE_HOST_MARGIN": "0", "EBBTIDE_REPORT": report}
    done = clients.start([str(clients.folder / "process"), "fork-nvml"], **LIMIT, **host)
    assert (done.returncode, done.stderr) == (0, "")
    total = (24 if report == "device" else 40) * MIB
    assert done.stdout == f"{total}\n{total} {total}\n"


def test_a_child_of_a_program_that_used_cuda_says_so_once(clients: Clients) -> None:
    done = clients.start([str(clients.folder / "process"), "fork-use"], **(LIMIT | {"EBBTIDE_LOG": "warning"}))
    assert done.returncode == 0
    assert done.stderr.count("the parent of this forked process used CUDA") == 1


def test_a_thread_that_is_cancelled_in_a_hook_ends_alone(clients: Clients) -> None:
    done = clients.start([str(clients.folder / "process"), "cancel"], **LIMIT)
    assert done.returncode == 0, done.stderr


def test_a_program_keeps_its_status(clients: Clients) -> None:
    assert clients.start([str(clients.folder / "process"), "status"], **LIMIT).returncode == 7


@pytest.mark.parametrize("action", ["fork-exec", "vfork", "exec"])
def test_what_a_program_starts_is_preloaded_too(clients: Clients, action: str) -> None:
    done = clients.start([str(clients.folder / "process"), action], **LIMIT)
    assert done.stdout == f"{24 * MIB} {24 * MIB}\n"


@pytest.mark.sim_only
def test_a_child_need_not_inherit(clients: Clients) -> None:
    """One variable excludes a child, although LD_PRELOAD still reaches it."""
    command = ["env", "EBBTIDE_DRIVER=off", str(clients.folder / "process"), "info"]
    assert clients.start(command, **LIMIT).stdout == f"{64 * MIB} {64 * MIB}\n"


@pytest.mark.sim_only
def test_calls_before_our_constructors_and_after_our_destructors(clients: Clients) -> None:
    """The library after ours in LD_PRELOAD is initialised before ours and finalised after it."""
    late = str(clients.folder / "liblate.so")
    done = clients.start(["/bin/true"], preload=f"{clients.preload}:{late}", **LIMIT)
    assert done.returncode == 0
    assert done.stderr == f"late: took 0\nlate: freed 0, asked 0, {24 * MIB} of {24 * MIB}\n"


PROGRAMS = {
    "ls": ["/bin/ls", "/"],
    "shell": ["/bin/sh", "-c", "echo a | cat; (exit 3)"],
    "git": ["git", "--version"],
    "gcc": ["cc", "--version"],
    "python": [sys.executable, "-c", "import json, subprocess; print(json.dumps([1])); subprocess.run(['true'])"],
    "fails": ["/bin/ls", "/no/such/folder"],
    "ctypes": [sys.executable, "-c", "import ctypes; print(ctypes.CDLL(None).getpid() > 0)"],
    "workers": [
        sys.executable,
        "-c",
        "import multiprocessing as m; m.set_start_method('fork'); p = m.Pool(2); print(p.map(abs, [-1])); p.close()",
    ],
}


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_programs_run_the_same(clients: Clients, name: str) -> None:
    command = PROGRAMS[name]
    if shutil.which(command[0]) is None:
        pytest.fail(f"{command[0]} is missing")
    plain, preloaded = (clients.start(command, preload=preload) for preload in (None, "ours"))
    assert (preloaded.returncode, preloaded.stdout, preloaded.stderr) == (plain.returncode, plain.stdout, plain.stderr)


def test_torch_runs_the_same(clients: Clients) -> None:
    """What it prints is known, and importing it once more takes seconds."""
    pytest.importorskip("torch")
    multiply = "import torch; print((torch.ones(4, 4) @ torch.ones(4, 4)).sum())"
    done = clients.start([sys.executable, "-W", "ignore", "-c", multiply])
    assert (done.returncode, done.stdout, done.stderr) == (0, "tensor(64.)\n", "")


ONE_CORE = """
import ctypes
from ebbtide import _core
print(_core.loaded_library())
paths = {line.split()[-1] for line in open("/proc/self/maps") if "/libebbtide" in line}
print(len({path for path in paths if "/libebbtide_sim" not in path}))
"""


def test_one_core_in_one_process(clients: Clients) -> None:
    """Invariant 8: Python's module gets the core that is already loaded."""
    done = clients.start([sys.executable, "-c", ONE_CORE])
    assert done.stdout.split() == [clients.preload, "1"], done.stderr
