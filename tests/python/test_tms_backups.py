"""What torch_memory_saver's calls keep while memory is away: in host memory, on disk, retained. And the margin."""

import gc
import shutil

import pytest

torch = pytest.importorskip("torch")

from ebbtide import _core  # noqa: E402
from ebbtide.errors import StateError, StoreError  # noqa: E402

MIB = 1 << 20


def make(saver, value, count=MIB):
    return torch.full((count,), value, dtype=torch.uint8, device=saver.device)


@pytest.fixture
def disk_settings(saver):
    """They are as before afterwards."""
    yield
    saver.configure(disk_directory=None, disk_files="hidden")


@pytest.mark.parametrize("backend", ["mmap", "pinned", None])
def test_content_with_a_backup_stays_and_without_one_goes(saver, tms, tag, backend):
    """Both lie in one tag."""
    with tms.region(tag=tag, enable_cpu_backup=True, cpu_backup_backend=backend):
        kept = make(saver, 10)
        typed = torch.randn(10, 20, 30, device=saver.device)
    with tms.region(tag=tag):
        dropped = make(saver, 20)
    expected = typed.detach().to("cpu", copy=True)
    assert tms.get_cpu_backup(typed) is None
    tms.pause()
    copy, view = tms.get_cpu_backup(typed), tms.get_cpu_backup(typed, zero_copy=True)
    assert torch.equal(copy, expected) and torch.equal(view, expected)
    assert copy.data_ptr() != view.data_ptr() == tms.get_cpu_backup(typed, zero_copy=True).data_ptr()
    with pytest.raises(StateError, match=r"its content was dropped: .*enable_cpu_backup=True"):
        tms.get_cpu_backup(dropped)
    del view
    tms.resume()
    assert bool((kept == 10).all()) and not dropped.any()
    assert tms.get_cpu_backup(typed) is None
    assert _core.find(kept.data_ptr()).backup == {"mmap": 1}.get(backend, 2)


def test_tensors_outside_have_no_backup(saver, tms):
    assert tms.get_cpu_backup(make(saver, 1)) is None


@pytest.mark.parametrize("backend", ["mmap", "pinned"])
def test_what_is_retained_is_not_copied_again(saver, tms, tag, backend):
    tms.retain_cpu_backup = True
    with tms.region(tag=tag, enable_cpu_backup=True, cpu_backup_backend=backend):
        tensor = torch.arange(4 * MIB, dtype=torch.int32, device=saver.device)
    tms.pause(tag)
    tms.resume(tag)
    assert saver.tags()[tag].retained_bytes >= tensor.nbytes
    assert saver.pause(tag).copied == 0
    tms.retain_cpu_backup = False
    tms.resume(tag)
    assert saver.tags()[tag].retained_bytes == 0
    assert torch.equal(tensor.cpu(), torch.arange(4 * MIB, dtype=torch.int32))


@pytest.mark.parametrize("backend", ["mmap", "pinned"])
def test_a_retained_backup_is_read_at_one_address_from_cycle_to_cycle(saver, tms, tag, backend):
    def pattern(offset):
        return torch.arange(4096, dtype=torch.int64).add(offset).remainder(251).to(torch.uint8)

    with tms.region(tag=tag, enable_cpu_backup=True, cpu_backup_backend=backend):
        tensor = pattern(0).to(saver.device, copy=True)
    tms.pause(tag)
    address = tms.get_cpu_backup(tensor, zero_copy=True).data_ptr()
    tms.retain_cpu_backup = True
    for turn in range(3):
        expected = pattern(turn)
        tms.resume(tag)
        resident = tms.get_cpu_backup(tensor, zero_copy=True)
        assert resident.data_ptr() == address and torch.equal(resident, expected)
        assert torch.equal(tms.get_cpu_backup(tensor), expected)
        assert torch.equal(tensor.cpu(), expected)
        del resident
        tms.retain_cpu_backup = False  # concerns the next resume
        assert tms.get_cpu_backup(tensor) is not None
        tms.retain_cpu_backup = True
        tensor.copy_(pattern(turn + 1))
        tms.pause(tag)
        away = tms.get_cpu_backup(tensor, zero_copy=True)
        assert away.data_ptr() == address and torch.equal(away, pattern(turn + 1))
        del away
    tms.retain_cpu_backup = False
    tms.resume(tag)
    assert tms.get_cpu_backup(tensor) is None and torch.equal(tensor.cpu(), pattern(3))


def test_backups_on_disk_are_files_in_the_folder_that_was_set(saver, tms, tag, tmp_path, disk_settings):
    folder = tmp_path / "made" / "here"
    tms.set_disk_backup_dir(str(folder))
    with tms.region(tag=tag, enable_disk_backup=True):
        big = torch.arange(3 * MIB + 12345, dtype=torch.float32, device=saver.device)
    with tms.region(tag=f"{tag}-small", enable_disk_backup=True):
        small = make(saver, 10, 7)
    with tms.region(tag=tag):
        dropped = make(saver, 20)
    sizes = set()
    for _ in range(3):
        tms.pause()
        files = list(folder.iterdir())
        assert len(files) == 2
        sizes.add(sum(file.stat().st_size for file in files))
        assert torch.equal(tms.get_cpu_backup(big), torch.arange(3 * MIB + 12345, dtype=torch.float32))
        tms.resume()
        assert torch.equal(big.cpu(), torch.arange(3 * MIB + 12345, dtype=torch.float32))
        assert bool((small == 10).all()) and not dropped.any()
    assert len(sizes) == 1 and sizes.pop() >= big.nbytes


def test_the_variable_chooses_the_folder_once_and_ours_comes_first(tms_module, disk_settings, tmp_path, monkeypatch):
    def ask(folder):
        monkeypatch.setenv("TMS_DISK_BACKUP_DIR", str(folder))
        tms_module.TorchMemorySaver().region(enable_disk_backup=True)
        return _core.get_setting("disk_directory")

    first, second = tmp_path / "first", tmp_path / "second"
    monkeypatch.setattr("torch_memory_saver.implementation._is_disk_directory_read", False)
    assert ask(first) == str(first).encode() == ask(second)
    assert first.is_dir() and not second.exists()
    monkeypatch.setattr("torch_memory_saver.implementation._is_disk_directory_read", False)
    assert ask(second) == str(first).encode(), "what was chosen comes before variables"


def test_a_margin_refuses_what_would_leave_less(saver, tms, tag):
    gc.collect()
    saver.trim()  # what tests before have cached would make room
    free = _core.query_device(0).free_bytes
    tms.memory_margin_bytes = free - 8 * MIB
    try:
        kind = torch.OutOfMemoryError if saver.device == "cuda" else RuntimeError
        with tms.region(tag=tag), pytest.raises(kind) as refused:
            make(saver, 1, 64 * MIB)
        assert saver.device == "cuda" or "torch_memory_saver.memory_margin_bytes" in str(refused.value)
    finally:
        tms.memory_margin_bytes = 0
    with tms.region(tag=tag):
        assert bool((make(saver, 1, 64 * MIB) == 1).all())


def test_the_margin_can_be_set_and_not_read(tms):
    with pytest.raises(NotImplementedError):
        tms.memory_margin_bytes  # noqa: B018


def test_a_margin_that_is_none_is_an_error_and_the_old_one_stays(saver, tms):
    tms.memory_margin_bytes = 64 * MIB
    try:
        for wrong, error in ((-1, ValueError), (2**63, ValueError), (1.5, TypeError), (None, TypeError)):
            with pytest.raises(error, match=r"^memory_margin_bytes "):
                tms.memory_margin_bytes = wrong
            assert saver.settings()["device_margin"] == 64 * MIB
    finally:
        tms.memory_margin_bytes = 0


def test_a_folder_that_can_not_be_used_is_an_error_and_the_old_one_stays(saver, tms, tmp_path, disk_settings):
    tms.set_disk_backup_dir(str(tmp_path))
    with pytest.raises(ValueError, match="has no name"):
        tms.set_disk_backup_dir("")
    with pytest.raises(StoreError, match="no file for a backup can be made"):
        tms.set_disk_backup_dir("/proc/self")
    assert saver.settings()["disk_directory"] == str(tmp_path)


def test_the_variable_is_read_by_the_first_disk_backup_alone(saver, tms, tag, monkeypatch, tmp_path, disk_settings):
    monkeypatch.setattr("torch_memory_saver.implementation._is_disk_directory_read", False)
    monkeypatch.setenv("TMS_DISK_BACKUP_DIR", "/proc/nowhere")
    with tms.region(tag=tag, enable_cpu_backup=True):
        make(saver, 1)
    with pytest.raises(OSError, match="nowhere"), tms.region(tag=tag, enable_disk_backup=True):
        pass
    saver.configure(disk_directory=str(tmp_path))
    with tms.region(tag=tag, enable_disk_backup=True):
        kept = make(saver, 3)
    tms.pause(tag)
    assert len(list(tmp_path.iterdir())) >= 1
    tms.resume(tag)
    assert bool((kept == 3).all())


def test_the_files_of_a_relative_folder_go_after_the_program_moved(
    saver, tms, tag, tmp_path, monkeypatch, disk_settings
):
    monkeypatch.chdir(tmp_path)
    tms.set_disk_backup_dir("backups")
    with tms.region(tag=tag, enable_disk_backup=True):
        kept = make(saver, 5)
    tms.pause(tag)
    monkeypatch.chdir("/")
    assert len(list((tmp_path / "backups").iterdir())) == 1
    tms.resume(tag)
    assert list((tmp_path / "backups").iterdir()) == [] and bool((kept == 5).all())


@pytest.mark.parametrize("how", ["set", "variable"])
def test_the_folder_is_made_again_where_it_is_gone(saver, tms, tag, tmp_path, monkeypatch, disk_settings, how):
    folder = tmp_path / "run" / "backups"
    if how == "set":
        tms.set_disk_backup_dir(f"{folder}/")
    else:
        monkeypatch.setattr("torch_memory_saver.implementation._is_disk_directory_read", False)
        monkeypatch.setenv("TMS_DISK_BACKUP_DIR", str(folder))
    with tms.region(tag=tag, enable_disk_backup=True):
        kept = make(saver, 6)
    shutil.rmtree(tmp_path / "run")
    tms.pause(tag)
    assert len(list(folder.iterdir())) == 1
    tms.resume(tag)
    assert bool((kept == 6).all())
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(StoreError, match="No such file"):
        saver.pause(tag)
    saver.configure(disk_directory=None)
    tms.pause(tag)
    assert not folder.exists(), "another folder was chosen since"
    tms.resume(tag)


def test_a_pause_where_the_working_directory_is_gone(saver, tms, tag, tmp_path, monkeypatch):
    with tms.region(tag=tag, enable_cpu_backup=True):
        kept = make(saver, 10)
    gone = tmp_path / "job"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    try:
        tms.pause()
        tms.resume()
    finally:
        monkeypatch.chdir(tmp_path)
    assert int(kept[-1]) == 10
