"""Limits of the machine are reported before anything is taken, and no data is lost to them."""

import resource

import pytest

torch = pytest.importorskip("torch")

from ebbtide import _core  # noqa: E402
from ebbtide.errors import StoreError  # noqa: E402
from ebbtide.saver.pools import backends  # noqa: E402
from random_memory import random_bytes  # noqa: E402

MIB = 1 << 20


def noise(saver, tag, mib, **options):
    with saver.region(tag, **options):
        return random_bytes(mib * MIB, saver.device)


@pytest.fixture
def file_limit():
    """`file_limit(size)`: until the end of the test, no file may grow beyond this size."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size_bytes: resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_pool_beyond_the_machine_is_refused_and_nothing_is_set(saver):
    before = _core.get_setting("host_pool"), _core.get_setting("device_limit")
    with pytest.raises(ValueError, match=r"host_pool is 100\.0 TiB, and this machine has .* of RAM: ask for less"):
        saver.configure(device_limit="1GiB", host_pool="100TiB")
    assert (_core.get_setting("host_pool"), _core.get_setting("device_limit")) == before


RING_LIMITS = """
import torch
from ebbtide import saver

saver.configure(disk_directory=folder, host_limit=host_limit)
with saver.region("weights", backup=backup, retain=True):
    tensor = torch.randint(0, 256, (32 << 20,), dtype=torch.uint8, device=saver.device)
for copied in (32, later):
    report = saver.pause("weights")
    saver.resume("weights")
    assert report.copied == copied << 20, report
assert ("no memory could be pinned for the tables" in report.note) == (later == 32), report
"""


@pytest.mark.parametrize(
    ("backup", "host_limit", "later"),
    [("disk", "8MiB", 0), ("disk", "16MiB", 0), ("ram", "48MiB", 0), ("ram", "36MiB", 32)],
)
def test_the_ring_leaves_room_to_find_out_what_has_not_changed(run_python, tmp_path, backup, host_limit, later):
    given = f"folder, backup, host_limit, later = {str(tmp_path)!r}, {backup!r}, {host_limit!r}, {later}\n"
    result = run_python(given + RING_LIMITS)
    assert result.returncode == 0, result.stderr


@pytest.mark.device_memory
def test_the_pool_gives_way_to_a_backup(saver, tag):
    tensor = noise(saver, tag, 32)
    want = tensor.cpu().clone()
    assert backends.existing_backend() is not None
    saver.configure(host_pool="128MiB")
    try:
        kept = saver.stats()["host_pool_bytes"]
        assert kept == 128 * MIB * len(backends.existing_backend().devices()) or kept == 128 * MIB
        saver.configure(host_limit=saver.stats()["host_held_bytes"])
        assert saver.pause(tag).bytes == 32 * MIB
        assert saver.stats()["host_pool_bytes"] < kept
        saver.resume(tag)
        assert torch.equal(tensor.cpu(), want)
    finally:
        saver.configure(host_pool=0, host_limit=None)


@pytest.mark.parametrize("backup", ["ram", "pinned"])
def test_a_limit_on_files_is_none_on_memory(saver, tag, backup, file_limit):
    tensor = noise(saver, tag, 32, backup=backup)
    want = tensor.cpu().clone()
    file_limit(MIB)
    saver.pause(tag)
    view = saver.backup_of(tensor).clone()
    saver.resume(tag)
    assert torch.equal(view, want)
    assert torch.equal(tensor.cpu(), want)


def test_a_disk_backup_beyond_the_limit_is_refused_and_nothing_is_lost(saver, tag, file_limit):
    tensor = noise(saver, tag, 32, backup="disk", retain=True)
    want = tensor.cpu().clone()
    file_limit(MIB)
    with pytest.raises(StoreError, match="ulimit -f"):
        saver.pause(tag)
    assert not saver.is_paused(tag)
    assert torch.equal(tensor.cpu(), want)


def test_a_limit_that_was_lowered_below_a_kept_backup_refuses_the_pause(saver, tag, file_limit):
    tensor = noise(saver, tag, 32, backup="disk", retain=True)
    saver.pause(tag)
    saver.resume(tag)
    tensor += 1
    want = tensor.cpu().clone()
    file_limit(MIB)
    with pytest.raises(StoreError, match="ulimit -f"):
        saver.pause(tag)
    saver.resume(tag)
    assert torch.equal(tensor.cpu(), want)


@pytest.mark.sim_only
def test_a_hard_limit_on_files_is_said_where_the_device_starts(run_python):
    done = run_python(
        """
        import torch
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 26, 1 << 26))
        from ebbtide import saver
        from ebbtide.errors import DriverError

        try:
            with saver.region("weights"):
                pass
        except DriverError as error:
            print(error)
        """
    )
    assert "ulimit -f" in done.stdout, done.stderr


@pytest.mark.sim_only
def test_a_simulated_device_that_is_not_there_names_its_own_variables(run_python):
    code = "import torch\nfrom ebbtide import saver\nwith saver.region('weights'):\n    pass"
    done = run_python(code, EBBTIDE_SIM_DEVICES="0")
    assert done.returncode == 1
    assert "the simulated device does not start: cuInit gives" in done.stderr
    assert "Look at EBBTIDE_SIM_DEVICES and EBBTIDE_SIM_CAPACITY" in done.stderr and "nvidia-smi" not in done.stderr
