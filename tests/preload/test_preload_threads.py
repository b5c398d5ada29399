"""Which tag an allocation of a preloaded program gets: by who allocates, by the thread's policy, by the program's."""

import subprocess
import sys
from pathlib import Path

import pytest
from preload_clients import PROGRAM, Clients

ON = {"EBBTIDE_PAUSEABLE": "1"}
TMS = """
use_torch(sys.argv[1])
tms = ctypes.CDLL(None)
tms.tms_get_current_tag.restype = ctypes.c_char_p
tms.tms_get_cpu_backup_backend.restype = ctypes.c_char_p
tms.tms_get_interesting_region.restype = ctypes.c_bool
tms.tms_get_enable_cpu_backup.restype = ctypes.c_bool

def tag_thread(tag, cpu_backup=False):
    tms.tms_set_current_tag(tag.encode())
    tms.tms_set_interesting_region(True)
    tms.tms_set_enable_cpu_backup(cpu_backup)
"""


def start(clients: Clients, program: str, *words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM + TMS + program, str(clients.folder / "torch"), *words]
    done = clients.start(command, **settings)
    assert done.returncode == 0, done.stderr
    return done


def run(clients: Clients, program: str, *words: str, **settings: str) -> str:
    return start(clients, program, *words, **settings).stdout


CALLERS = """
by_torch = take_by(torch.take, 2 * MIB)
blocks = [take(4 * MIB), take_by(nccl.take, 8 * MIB)]
for outer in (torch, torch_cuda):
    address = ctypes.c_uint64()
    check(outer.take_through(nccl.take, ctypes.byref(address), ctypes.c_size_t(16 * MIB)))
    blocks.append(address.value)
print(held(), [_core.find(address) is None for address in blocks])
handle = ctypes.create_string_buffer(64)
shared = [cuda.cuIpcGetMemHandle(handle, ctypes.c_uint64(address)) for address in (by_torch, blocks[1])]
print(shared[0], shared[1] == 801)
for address in (by_torch, *blocks):
    free(address)
"""


def test_torchs_own_allocations_are_tagged(clients: Clients) -> None:
    """Not those of NCCL, and not those of an allocator that is plugged into torch. Their memory can be shared."""
    settings = {**ON, "EBBTIDE_SIM_CAPACITY": str(128 << 20)}
    done = start(clients, CALLERS, **settings)
    assert done.stdout == "{'default': 2} [True, True, True, True]\n801 False\n"
    why = "memory of the tag 'default' can't be shared with another process: allocate what you share in a "
    assert done.stderr == f"ebbtide: cuIpcGetMemHandle: {why}thread whose tagging is off\n"


def test_with_pauseable_all_every_allocation_is_tagged(clients: Clients) -> None:
    settings = {**ON, "EBBTIDE_PAUSEABLE_ALL": "1", "EBBTIDE_SIM_CAPACITY": str(128 << 20)}
    done = start(clients, CALLERS, **settings)
    assert done.stderr.count("whose tagging is off, or run without EBBTIDE_PAUSEABLE_ALL") == 2
    assert done.stdout == "{'default': 46} [False, False, False, False]\n801 True\n"


def test_pauseable_all_alone_makes_no_program_pauseable(clients: Clients) -> None:
    assert run(clients, "take(2 * MIB); take_by(torch.take, 2 * MIB); print(held())", EBBTIDE_PAUSEABLE_ALL="1") == (
        "{}\n"
    )


THREADS = """
import threading
first = take_by(torch.take, 2 * MIB)
tag_thread("kv/cache")
mine = take_by(torch.take, 4 * MIB)
native = take(4 * MIB)
other = []
thread = threading.Thread(target=lambda: (cuda.cuCtxSetCurrent(context), other.append(take_by(torch.take, 6 * MIB))))
thread.start(), thread.join()
tms.tms_set_interesting_region(False)
off = take_by(torch.take, 8 * MIB)
print(held(), _core.find(native), _core.find(off), tms.tms_get_current_tag())
"""


def test_a_threads_policy_is_above_the_programs(clients: Clients) -> None:
    """A thread that says nothing follows the program; what a thread says holds for itself."""
    expected = "None None b'kv/cache'\n"
    assert run(clients, THREADS, **ON) == "{'default': 8, 'kv%2Fcache': 4} " + expected
    assert run(clients, THREADS) == "{'kv%2Fcache': 4} " + expected


SEVERAL = """
data = bytes(range(256)) * (2 * MIB // 256)
blocks = {}
for tag, has_backup in (("default", True), ("weights", True), ("kv", False)):
    if tag != "default":
        tag_thread(tag, has_backup)
    blocks[tag] = take_by(torch.take, 2 * MIB)
    write(blocks[tag], data)
_core.pause(["weights"])
print(held(), read(blocks["default"], 4) == data[:4])
_core.pause(["kv", "default"])
print(held())
_core.resume(["kv"])
_core.resume([])
print(held(), {tag: read(address, len(data)) == data for tag, address in blocks.items()})
"""


def test_several_tags_of_one_pauseable_program_leave_and_return(clients: Clients) -> None:
    assert run(clients, SEVERAL, **ON).splitlines() == [
        "{'default': 2, 'kv': 2} True",
        "{}",
        "{'default': 2, 'kv': 2, 'weights': 2} {'default': True, 'weights': True, 'kv': False}",
    ]


FRAMES = """
import threading

def frame(tag=None):
    made = _core.Frame()
    if tag is None:
        made.leave_thread_untagged()
    else:
        made.open_lease(tag, "me")
        made.tag_thread(tag, 1, False)
    made.push()
    return made

def now():
    tagging, tag, _ = _core.thread_policy()
    return tag if tagging == _core.TAGGING_ON else tagging

seen = [now()]
outer = frame("outer"); seen.append(now())
off = frame(); seen.append(now())
inner = frame("inner"); seen.append(now())
plain = _core.Frame(); plain.push(); seen.append(now())
off.close(); seen.append(now())      # not in order
inner.close(); seen.append(now())
plain.close(); outer.close(); seen.append(now())
print(*seen)
tag_thread("mine")
outer, inner = frame("outer"), frame("inner")
outer.close(); inner.close()
print(now())
take_by(torch.take, 2 * MIB)
closed = frame("elsewhere")
thread = threading.Thread(target=closed.close)
thread.start(); thread.join()
take_by(torch.take, 4 * MIB)
print(now(), held())
region = frame("region")
take_by(torch.take, 6 * MIB)
print(held()["region"], sorted(tag.tag for tag in _core.tags() if tag.is_hooked))
"""


def test_a_region_sets_the_policy_of_its_thread(clients: Clients) -> None:
    """Nested, out of order, and closed by another thread."""
    assert run(clients, FRAMES, **ON).splitlines() == [
        "0 outer 1 inner inner inner outer 0",
        "mine",
        "0 {'default': 4, 'mine': 2}",
        "6 ['default', 'mine']",
    ]


PROGRAM_POLICY = """
print(*_core.program_policy(), tms.tms_get_interesting_region(), tms.tms_get_current_tag().decode(),
      tms.tms_get_enable_cpu_backup(), tms.tms_get_cpu_backup_backend().decode())
take_by(torch.take, 2 * MIB)
print(held())
"""


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "1 default 1 False default False pinned\n{}\n"),
        (ON, "2 default 1 True default True mmap\n{'default': 2}\n"),
        ({**ON, "EBBTIDE_TAG": "job", "EBBTIDE_BACKUP": "none"}, "2 job 0 True job False pinned\n{'job': 2}\n"),
        (
            {**ON, "EBBTIDE_TAG": "a/b", "EBBTIDE_BACKUP": "tape"},
            "2 default 1 True default True mmap\n{'default': 2}\n",
        ),
        ({"TMS_INIT_ENABLE": "1"}, "2 default 0 True default False pinned\n{'default': 2}\n"),
        (
            {"TMS_INIT_ENABLE": "1", "TMS_INIT_ENABLE_CPU_BACKUP": "1"},
            "2 default 2 True default True pinned\n{'default': 2}\n",
        ),
        (
            {"TMS_INIT_ENABLE": "1", "TMS_INIT_ENABLE_CPU_BACKUP": "1", "TMS_INIT_CPU_BACKUP_BACKEND": "mmap"},
            "2 default 1 True default True mmap\n{'default': 2}\n",
        ),
        (
            {"TMS_INIT_ENABLE": "1", "EBBTIDE_BACKUP": "ram", "EBBTIDE_TAG": "job"},
            "2 job 1 True job True mmap\n{'job': 2}\n",
        ),
        ({"TMS_INIT_ENABLE_CPU_BACKUP": "1"}, "1 default 1 False default True pinned\n{}\n"),
    ],
)
def test_what_holds_for_threads_that_say_nothing(clients: Clients, settings: dict[str, str], expected: str) -> None:
    """EBBTIDE_PAUSEABLE and TMS_INIT_ENABLE. Without a variable of its own, TMS keeps no backup."""
    assert run(clients, PROGRAM_POLICY, **settings) == expected


ON_DISK = """
import os
block = take_by(torch.take, 2 * MIB)
data = bytes(range(256)) * (2 * MIB // 256)
write(block, data)
print(_core.program_policy(), _core.get_setting("disk_directory") in (b"", sys.argv[2].encode()))
_core.pause([])
print(held(), len(os.listdir(sys.argv[2])))
_core.resume([])
print(read(block, len(data)) == data)
"""
TMS_DISK = {"TMS_INIT_ENABLE": "1", "TMS_INIT_ENABLE_DISK_BACKUP": "1"}


def test_tms_disk_backups_go_to_its_folder(clients: Clients, tmp_path: Path) -> None:
    folder, other = tmp_path / "tms", tmp_path / "ours"
    other.mkdir()  # TMS's own is made, as by TMS
    settings = {**TMS_DISK, "TMS_DISK_BACKUP_DIR": str(folder)}
    expected = "(2, 'default', 3) True\n{} 1\nTrue\n"
    assert run(clients, ON_DISK, str(folder), **settings) == expected
    assert run(clients, ON_DISK, str(other), EBBTIDE_DISK_DIRECTORY=str(other), **settings) == expected


@pytest.mark.parametrize(
    ("settings", "files"),
    [
        (TMS_DISK, "named"),  # TMS's users look for them
        ({**TMS_DISK, "EBBTIDE_DISK_FILES": "hidden"}, "hidden"),
        ({"TMS_INIT_ENABLE": "1"}, "hidden"),
        ({"TMS_INIT_ENABLE": "1", "TMS_INIT_ENABLE_CPU_BACKUP": "1"}, "hidden"),
        ({"TMS_INIT_ENABLE_DISK_BACKUP": "1"}, "hidden"),  # TMS's variables say nothing of the program
        ({**ON, "EBBTIDE_BACKUP": "disk"}, "hidden"),
    ],
)
def test_which_backups_have_files_with_names(
    clients: Clients, tmp_path: Path, settings: dict[str, str], files: str
) -> None:
    ask = 'take_by(torch.take, 2 * MIB)\nprint(_core.get_setting("disk_files").decode())'
    assert run(clients, ask, EBBTIDE_DISK_DIRECTORY=str(tmp_path), **settings) == f"{files}\n"


def test_a_tms_folder_that_no_pause_could_use_is_said_at_the_start(clients: Clients, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    missing = tmp_path / "file" / "missing"
    done = start(clients, "take_by(torch.take, 2 * MIB)", **TMS_DISK, TMS_DISK_BACKUP_DIR=str(missing))
    assert done.stderr.startswith(f"ebbtide: no file for a backup can be made in '{missing}'"), done.stderr


@pytest.mark.parametrize("settings", [{"EBBTIDE_DRIVER": "sim"}, {"EBBTIDE_DRIVER": "off"}])
def test_without_hooks_no_program_is_pauseable(clients: Clients, settings: dict[str, str]) -> None:
    command = [sys.executable, "-c", "from ebbtide import _core; print(_core.program_policy()[0])"]
    assert clients.start(command, **ON, **settings).stdout == "0\n"
    assert clients.start(command, preload=None, **ON).stdout == "0\n"
