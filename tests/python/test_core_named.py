"""Operations on named allocations that share handles, and refusals that touch nothing, on the core without torch."""

import itertools

import pytest
from core_sim import CHUNK, MIB, UNKNOWN, Sim, fill, is_filled
from ebbtide import _core
from ebbtide.errors import DriverError, StoreError
from ebbtide.saver.values.arguments import backup_code

pytestmark = [pytest.mark.sim_only, pytest.mark.usefixtures("saver")]


@pytest.fixture
def sim():
    simulator = Sim()
    yield simulator
    simulator.clear_failures()


@pytest.fixture
def alloc():
    """`alloc(tag, bytes, ...)`, each filled with its number from 1 on, and freed at the end."""
    made = []

    def make(tag, *sizes, **policy):
        addresses = [_core.alloc(tag, size, **policy) for size in sizes]
        for address, size in zip(addresses, sizes, strict=True):
            made.append(address)
            fill(address, size, len(made))
        return addresses

    yield make
    for address in made:
        _core.free(address)


def come_back(tag):
    """Chunks that return together share handles."""
    _core.pause([tag])
    _core.resume([tag])


def test_a_refused_pause_opens_no_backup(alloc, tag, tag2, tmp_path):
    """What has to be refused is refused before any file is made: a folder that is gone is never met."""
    alloc(tag, 4 * CHUNK, backup=backup_code("disk"))
    alloc(tag2, 64 * MIB)
    folder, before = tmp_path / "backups", _core.get_setting("disk_directory")
    folder.mkdir()
    _core.configure("disk_directory", str(folder).encode())
    folder.rmdir()
    _core.configure("host_limit", str(_core.stats()["host_held_bytes"] + MIB).encode())
    try:
        with pytest.raises(StoreError, match="host_limit"):
            _core.pause([tag, tag2])
        _core.configure("host_limit", None)
        with pytest.raises(StoreError, match="backups"):
            _core.pause([tag, tag2])
    finally:
        _core.configure("host_limit", None)
        _core.configure("disk_directory", before or None)
    assert _core.query_tag(tag).state == _core.query_tag(tag2).state == "resident"


def test_a_promotion_of_named_memory_separates_nothing(alloc, tag):
    shared_handle = _core.get_setting("shared_handle")
    _core.configure("shared_handle", b"4MiB")
    try:
        large, small = alloc(tag, 130 * MIB, CHUNK)
        come_back(tag)  # the last chunk of the large one shares a handle with the small one
        _core.demote([tag], max_bytes=128 * MIB)
        before = _core.events(0)[-1][0]
        _core.promote([tag], addresses=[large])
        assert [event[3] for event in _core.events(before)] == ["promote"]
        assert is_filled(large, 130 * MIB, 1) and is_filled(small, CHUNK, 2)
    finally:
        _core.configure("shared_handle", shared_handle or None)


def test_a_failure_after_a_separation_leaves_other_tags_whole(alloc, sim, tag, tag2):
    """The claim of the separation held all that shared. How the pause ends concerns the named allocations alone."""
    shared, single = alloc(tag, *[CHUNK] * 3), alloc(tag2, CHUNK)
    seen = set()
    for k in itertools.count(1):
        come_back(tag)
        sim.fail("cuMemUnmap", k, UNKNOWN)
        try:
            _core.pause([tag, tag2], addresses=[shared[0], single[0]])
            break
        except DriverError:
            sim.clear_failures()
        is_away = _core.find(shared[0]).resident_bytes == 0
        if is_away and _core.find(single[0]).resident_bytes:
            seen.add(_core.query_tag(tag).state)
        _core.resume([tag, tag2])
    assert seen == {"paused"}
    sim.clear_failures()
    _core.resume([tag, tag2])
    assert all(is_filled(each, CHUNK, number) for number, each in enumerate([*shared, *single], 1))


def test_invariant_4_no_call_without_a_driver_ends_the_process(run_python):
    done = run_python(
        """
        import ctypes
        from ebbtide import _core
        library = ctypes.CDLL(_core.loaded_library())
        for name in ("begin_capture", "end_capture", "trim_host_memory"):
            getattr(library, f"ebbtide_{name}")(None)
        """,
        EBBTIDE_DRIVER="off",
    )
    assert done.returncode == 0, done.stderr
