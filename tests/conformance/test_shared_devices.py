"""Simulated devices that several processes see as one (EBBTIDE_SIM_SHARED)."""

import ctypes
import fcntl
import os
import random
import resource
import time
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from driver_calls import GRANULE, OUT_OF_MEMORY, SUCCESS, Driver, properties
from other_process import Files, OtherProcess
from test_conformance_sharing import create_exportable, export, import_file, map_files, read

pytestmark = pytest.mark.sim_only


Start = Callable[..., OtherProcess]


@pytest.fixture
def name() -> Generator[str]:
    name = f"test-{os.getpid()}-{time.monotonic_ns()}"
    yield name
    file_of(name).unlink(missing_ok=True)


@pytest.fixture
def start(other: Start, name: str) -> Start:
    """Starts a process on the device of this test, which has 8 granules unless the first process says otherwise."""
    ours = {"EBBTIDE_SIM_SHARED": name, "EBBTIDE_SIM_CAPACITY": str(8 * GRANULE)}
    return lambda **variables: other(**{**ours, **variables})


def file_of(name: str) -> Path:
    return Path(f"/dev/shm/ebbtide-sim-{os.geteuid()}-{name}")


def granules(driver: Driver) -> tuple[int, int]:
    """Free, and in all."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    assert driver.cuMemGetInfo(free, total) == SUCCESS
    return free.value // GRANULE, total.value // GRANULE


def take(driver: Driver, count: int) -> int:
    return driver.create(count * GRANULE)


def take_code(driver: Driver, count: int) -> int:
    return driver.cuMemCreate(ctypes.c_uint64(), count * GRANULE, properties(), 0)


def take_linear(driver: Driver, count: int) -> int:
    return driver.allocate(count * GRANULE)


def release(driver: Driver, handle: int) -> None:
    assert driver.cuMemRelease(handle) == SUCCESS


def make_exported_handles(driver: Driver, count: int) -> Files:
    return Files([export(driver, create_exportable(driver)) for _ in range(count)])


def import_and_close(driver: Driver, files: list[int]) -> list[int]:
    handles = [import_file(driver, file) for file in files]
    for file in files:
        os.close(file)
    return handles


def reset(driver: Driver) -> None:
    driver.handle.ebbtide_sim_reset()
    assert driver.cuInit(0) == SUCCESS


def fork_and_use(driver: Driver) -> int:
    """The status of a child that takes memory and ends."""
    child = os.fork()
    if child == 0:
        os._exit(driver.cuMemCreate(ctypes.c_uint64(), GRANULE, properties(), 0))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def become(driver: Driver) -> None:
    os.execvp("sleep", ["sleep", "60"])


def take_at_random(driver: Driver, seed: int) -> None:
    """Until it is killed."""
    source, held = random.Random(seed), []
    while True:
        if held and source.random() < 0.5:
            release(driver, held.pop(source.randrange(len(held))))
        else:
            created = ctypes.c_uint64()
            exportable = properties()
            exportable.requested_handle_types = source.randrange(2)
            if driver.cuMemCreate(created, GRANULE, exportable, 0) == SUCCESS:
                held.append(created.value)


def test_processes_share_the_capacity_that_the_first_one_says(start: Start) -> None:
    first = start()
    assert first.run(granules) == (8, 8)
    second = start(EBBTIDE_SIM_CAPACITY="1GiB")
    handle = first.run(take, 3)
    second.run(take_linear, 4)
    assert first.run(granules) == second.run(granules) == (1, 8)
    assert second.run(take_code, 2) == first.run(take_code, 2) == OUT_OF_MEMORY
    first.run(release, handle)
    assert second.run(granules) == (4, 8)
    second.run(reset)
    assert first.run(granules) == (8, 8)


def test_another_name_is_another_device(start: Start) -> None:
    start().run(take, 8)
    alone = start(EBBTIDE_SIM_SHARED="")
    assert alone.run(granules) == (8, 8)


def test_memory_of_a_dead_process_is_free(start: Start) -> None:
    dead, alive = start(), start()
    dead.run(take, 5)
    alive.run(map_files, files=dead.run(make_exported_handles, 2))
    assert alive.run(granules) == (1, 8)
    dead.kill()
    assert alive.run(granules) == (6, 8)  # two are mapped here
    alive.run(take, 6)
    assert start().run(granules) == (0, 8)


def test_memory_that_two_hold_counts_once(start: Start) -> None:
    owner, importer = start(), start()
    handle = owner.run(create_exportable, 4 * GRANULE)
    files = owner.run(export_one, handle)
    [theirs] = importer.run(import_and_close, files=files)
    [again] = importer.run(import_and_close, files=files)
    assert importer.run(granules) == (4, 8)
    owner.run(release, handle)
    importer.run(release, theirs)
    assert owner.run(granules) == (4, 8)
    importer.run(release, again)
    assert owner.run(granules) == (8, 8)


def export_one(driver: Driver, handle: int) -> Files:
    return Files([export(driver, handle)])


def test_a_full_device_can_still_be_shared(start: Start) -> None:
    owner, importer = start(), start()
    files = owner.run(make_exported_handles, 8)
    addresses = importer.run(map_files, files=files)
    assert len(addresses) == 8 and importer.run(granules) == (0, 8)
    assert importer.run(read, addresses[7], 4) == bytes(4)


def test_a_forked_child_holds_nothing_and_an_exec_ends_what_was_held(start: Start) -> None:
    parent, watcher = start(), start()
    parent.run(take, 2)
    assert parent.run(fork_and_use) != SUCCESS
    assert parent.run(granules) == watcher.run(granules) == (6, 8)
    parent.start(become)
    deadline = time.monotonic() + 60
    while watcher.run(granules) != (8, 8):
        assert time.monotonic() < deadline
    parent.kill()


def test_a_process_may_be_killed_at_any_moment(start: Start) -> None:
    watcher, source, seen = start(), random.Random(1), set()
    for seed in range(4):
        workers = [start() for _ in range(2)]
        for number, worker in enumerate(workers):
            worker.run(granules)
            worker.start(take_at_random, 2 * seed + number)
        time.sleep(source.uniform(0, 0.02))
        seen.add(watcher.run(granules)[0])
        for worker in workers:
            worker.kill()
        assert watcher.run(granules) == (8, 8)
    assert len(seen) > 1


# --- what can't be shared ---


@pytest.mark.parametrize("bad", ["a/b", "*"])
def test_a_bad_name_is_reported_and_ignored(start: Start, capfd: pytest.CaptureFixture[str], bad: str) -> None:
    start().run(take, 8)
    assert start(EBBTIDE_SIM_SHARED=bad).run(granules) == (8, 8)
    assert "EBBTIDE_SIM_SHARED" in capfd.readouterr().err


def write_foreign(path: Path) -> None:
    path.write_bytes(b"not a table")


def link_elsewhere(path: Path) -> None:
    path.symlink_to("/dev/null")


@pytest.mark.parametrize("make", [write_foreign, link_elsewhere])
def test_a_foreign_file_is_left_alone(start: Start, name: str, make: Callable[[Path], None]) -> None:
    make(file_of(name))
    before = file_of(name).read_bytes()
    with pytest.raises(AssertionError, match="ended with 1"):
        start().run(granules)
    assert file_of(name).read_bytes() == before


def test_another_versions_file_is_left_alone(start: Start, name: str) -> None:
    start().run(take, 1)
    with file_of(name).open("r+b") as file:
        file.write(bytes(range(8)))
    with pytest.raises(AssertionError, match="ended with 1"):
        start().run(granules)


def test_too_many_processes_are_refused(start: Start, name: str) -> None:
    start().run(take, 1)
    with file_of(name).open("r+b") as file:
        fcntl.lockf(file, fcntl.LOCK_EX, 63, 2)  # as 63 others would
        with pytest.raises(AssertionError, match="ended with 1"):
            start().run(granules)
    assert start().run(granules) == (7, 8)


def test_a_limit_on_the_size_of_files_is_said(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        process = start()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with pytest.raises(AssertionError, match="ended with 1"):
        process.run(granules)
    assert "File too large" in capfd.readouterr().err


# --- names ---


def uuid(driver: Driver, device: int) -> bytes:
    name = ctypes.create_string_buffer(16)
    assert driver.cuDeviceGetUuid(name, device) == SUCCESS
    return name.raw


def test_shared_devices_have_the_same_uuid_in_all_processes(start: Start) -> None:
    two = {"EBBTIDE_SIM_DEVICES": "2"}
    one, another, alone = start(**two), start(**two), start(EBBTIDE_SIM_SHARED="")
    first, second = one.run(uuid, 0), one.run(uuid, 1)
    assert (another.run(uuid, 0), another.run(uuid, 1)) == (first, second)
    assert len({each[:4] for each in (first, second, alone.run(uuid, 0))}) == 3
