"""EBBTIDE_PAUSEABLE=1: everything that an unmodified program allocates has a tag, and can be paused from inside."""

import sys

import pytest
from preload_clients import MIB, PROGRAM, Clients

ALL = {"EBBTIDE_PAUSEABLE": "1", "EBBTIDE_PAUSEABLE_ALL": "1"}  # the programs call the driver themselves

CYCLE = """
data = bytes(range(256)) * (6 * MIB // 256)
blocks = [take(6 * MIB), take(4 * MIB)]
write(blocks[0], data)
tags = [(tag.tag, tag.resident_bytes // MIB) for tag in _core.tags()]
_core.pause([sys.argv[1]])  # from here on ebbtide and the driver have made everything that they make once
_core.resume([sys.argv[1]])
write(blocks[0], data)
before = free_mib()
_core.pause([sys.argv[1]])
away = free_mib()
_core.resume([sys.argv[1]])
print(tags, away - before, read(blocks[0], len(data)) == data, free_mib() == before)
assert [cuda.cuMemFree_v2(ctypes.c_uint64(block)) for block in blocks] == [0, 0]
print(free_mib() - before)
"""


@pytest.mark.device_memory
@pytest.mark.parametrize(("tag", "backup"), [("default", "ram"), ("job", "pinned"), ("job", "disk")])
def test_a_program_is_paused_from_inside(clients: Clients, tag: str, backup: str) -> None:
    settings = {**ALL, "EBBTIDE_BACKUP": backup}
    if tag != "default":
        settings["EBBTIDE_TAG"] = tag
    done = clients.start([sys.executable, "-c", PROGRAM + CYCLE, tag], **settings)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"[('{tag}', 10)] 10 True True\n10\n"


@pytest.mark.device_memory
def test_without_a_backup_the_content_goes(clients: Clients) -> None:
    done = clients.start([sys.executable, "-c", PROGRAM + CYCLE, "default"], EBBTIDE_BACKUP="none", **ALL)
    assert done.stdout == "[('default', 10)] 10 False True\n10\n", done.stderr


SPILL = """
data = bytes(range(256)) * (32 * MIB // 256)
block = take(32 * MIB)
write(block, data)
before = free_mib()
_core.pause(["default"])
away = free_mib()
_core.resume(["default"])
print(before, away, read(block, len(data)) == data)
assert cuda.cuMemFree_v2(ctypes.c_uint64(block)) == 0
"""


def test_a_pauseable_program_overflows(clients: Clients) -> None:
    done = clients.start(
        [sys.executable, "-c", PROGRAM + SPILL],
        **ALL,
        EBBTIDE_DEVICE_LIMIT=str(24 * MIB),
        EBBTIDE_RESERVE="0",
    )
    assert done.stdout == "0 24 True\n", done.stderr


GIVEN_BACK = """
blocks = [take(6 * MIB) for _ in range(4)]
_core.pause(["default"])
_core.resume(["default"])
before = free_mib()
assert cuda.cuMemFree_v2(ctypes.c_uint64(blocks[1])) == 0
given = free_mib() - before
take(6 * MIB)
print(before, given, _core.tags()[0].resident_bytes // MIB, _core.stats()["spills"])
"""


@pytest.mark.parametrize(("overflow", "spare"), [("none", 0), ("split", 0), ("whole", 6)])
def test_what_the_program_gives_back_after_a_cycle_is_room(clients: Clients, overflow: str, spare: int) -> None:
    """With whole, the last of the four fits a share of more than itself."""
    done = clients.start(
        [sys.executable, "-c", PROGRAM + GIVEN_BACK],
        **ALL,
        EBBTIDE_OVERFLOW=overflow,
        EBBTIDE_DEVICE_LIMIT=str((24 + spare) * MIB),
        EBBTIDE_RESERVE="0",
    )
    assert done.stdout == f"{spare} 6 24 0\n", done.stderr


REFUSED = """
code = cuda.cuMemAlloc_v2(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(32 * MIB))
print(code)
"""


def test_a_pauseable_program_may_be_refused(clients: Clients) -> None:
    done = clients.start(
        [sys.executable, "-c", PROGRAM + REFUSED],
        **ALL,
        EBBTIDE_OVERFLOW="none",
        EBBTIDE_DEVICE_LIMIT=str(24 * MIB),
    )
    assert done.stdout == "2\n"
    assert done.stderr.count("ebbtide: cuMemAlloc: device 0 has too little memory: 32 MiB wanted") == 1


NATIVE = """
blocks = [take(6 * MIB), take(4 * MIB)]
print(_core.allocations(), _core.stats()["alloc_calls"])
report = _core.pause([])
print(report.size_bytes if hasattr(report, "size_bytes") else report.bytes)
"""


def test_without_it_memory_stays_native(clients: Clients) -> None:
    done = clients.start([sys.executable, "-c", PROGRAM + NATIVE])
    assert (done.returncode, done.stdout) == (0, "[] 0\n0\n"), done.stderr


NESTED = """
outer = take(6 * MIB)
inner = _core.alloc("inner", 4 * MIB)
_core.pause(["inner"])
print([(tag.tag, tag.resident_bytes // MIB) for tag in _core.tags()])
_core.pause([])
print([(tag.tag, tag.resident_bytes // MIB) for tag in _core.tags()], cuda.cuMemFree_v2(ctypes.c_uint64(outer)))
_core.free(inner)
"""


def test_a_region_in_a_pauseable_program_keeps_its_own_tag(clients: Clients) -> None:
    """Paused memory may also be freed."""
    done = clients.start([sys.executable, "-c", PROGRAM + NESTED], **ALL)
    assert done.stdout == "[('default', 6), ('inner', 0)]\n[('default', 0), ('inner', 0)] 0\n", done.stderr


SAVER = """
from ebbtide import saver
tag = sys.argv[1]
print(saver.tags()[tag].state, saver.pause(tag).bytes, saver.is_paused(tag))
data = bytes(range(256)) * (6 * MIB // 256)
block = take(6 * MIB)
write(block, data)
saver.pause(tag)
saver.resume(tag)
saver.on("before_pause", tag, lambda *_: print("hook"))
before = free_mib()
report = saver.pause()
print(report.bytes // MIB, free_mib() - before, report.remaining, saver.is_paused(tag))
meanwhile = take(4 * MIB)
print([(held.tag, held.bytes // MIB) for held in saver.pause("other", missing_ok=True).remaining])
saver.resume(tag)
print(read(block, len(data)) == data, saver.pause(tag).bytes // MIB)
"""


@pytest.mark.device_memory
@pytest.mark.parametrize("tag", ["default", "job"])
def test_the_saver_knows_the_programs_tag_from_the_start(clients: Clients, tag: str) -> None:
    done = clients.start(
        [sys.executable, "-c", PROGRAM + SAVER, tag],
        **ALL,
        **({"EBBTIDE_TAG": tag} if tag != "default" else {}),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "empty 0 False",
        "hook",
        "6 6 () True",
        f"[('{tag}', 4)]",
        "hook",
        "True 10",
    ]


def test_without_it_the_saver_knows_no_tag(clients: Clients) -> None:
    done = clients.start([sys.executable, "-c", PROGRAM + "from ebbtide import saver; print(list(saver.tags()))"])
    assert done.stdout == "[]\n", done.stderr


REFUSED_ONCE = """
torch = ctypes.CDLL(sys.argv[1])
def run(*words):
    sys.stdout.flush()
    array = (ctypes.c_char_p * len(words))(*(word.encode() for word in words))
    assert torch.run_client(len(words), array) == 0
    ctypes.CDLL(None).fflush(None)
keep = take(2 * MIB)
run("linked", "cached", str(32 * MIB))
_core.pause(["default"])
run("linked", "cached", str(32 * MIB))
_core.resume(["default"])
run("linked", "cached", str(32 * MIB))
"""


@pytest.mark.parametrize("policy", ["split", "whole", "managed"])
def test_torch_is_not_refused_while_the_tag_is_away(clients: Clients, policy: str) -> None:
    """Its pool is open for all threads then, and such a pool neither flushes nor asks again."""
    done = clients.start(
        [sys.executable, "-c", PROGRAM + REFUSED_ONCE, str(clients.folder / "libc10_cuda.so")],
        **ALL,
        EBBTIDE_OVERFLOW=policy,
        EBBTIDE_DEVICE_LIMIT=str(24 * MIB),
        EBBTIDE_RESERVE="0",
    )
    assert done.stdout == "refused, then taken\ntaken\nrefused, then taken\n", done.stderr
