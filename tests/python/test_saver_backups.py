"""The bytes of a paused tag: each kind of backup, with and without keeping it for the next pause."""

import gc

import pytest

torch = pytest.importorskip("torch")

from ebbtide.errors import StoreError  # noqa: E402

MIB = 1 << 20
KINDS = ["ram", "pinned", "disk"]
PAUSED_AND_THEN = """
import os, signal, sys, torch
from ebbtide import saver
with saver.region("w", backup="disk"):
    tensor = torch.ones(1 << 20, device=saver.device)
saver.pause("w")
print(len(os.listdir(os.environ["EBBTIDE_DISK_DIRECTORY"])), flush=True)
{}
"""


def build(saver, tag, **options):
    """Makes a module and its buffers: several segments, odd sizes, all kinds of content."""
    with saver.region(tag, **options):
        model = torch.nn.Sequential(torch.nn.Linear(700, 900), torch.nn.LayerNorm(900), torch.nn.Linear(900, 1500))
        model.to(saver.device)
        model.register_buffer("zeros", torch.zeros(MIB, device=saver.device))
        model.register_buffer("big", torch.randn(2_750_001, device=saver.device))  # a segment of its own
        model.register_buffer("nan", torch.full((MIB,), float("nan"), device=saver.device))
    return model


def copies(model):
    return {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict(keep_vars=True).items()}


def assert_same(model, want):
    for name, tensor in model.state_dict(keep_vars=True).items():
        got = tensor.detach().cpu().contiguous().view(torch.uint8)
        assert torch.equal(got, want[name].contiguous().view(torch.uint8)), name


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("backup", KINDS)
def test_invariant_2_bit_for_bit_over_cycles_with_changes_between(saver, tag, backup, retain):
    model = build(saver, tag, backup=backup, retain=retain)
    cycles = [
        [],
        [lambda: model.big[-1].add_(1), lambda: model.zeros[-1].fill_(1), lambda: model.nan[:7].fill_(3)],
        [lambda: model.big.fill_(2.5), lambda: model.zeros.zero_(), lambda: model[0].weight.data.normal_()],
        [lambda: model.big[2_000_000:].normal_()],
    ]
    for changes in cycles:
        for change in changes:
            change()
        want = copies(model)
        size = saver.tags()[tag].size_bytes
        paused = saver.pause(tag)
        assert paused.bytes == size
        assert paused.copied + paused.skipped == size
        assert paused.skipped == paused.clean + paused.unused + paused.constant
        assert saver.tags()[tag].resident_bytes == 0
        assert saver.resume(tag).bytes == size
        assert_same(model, want)


@pytest.mark.parametrize(
    ("backup", "retain", "is_kept"),
    [
        ("ram", False, False),
        ("ram", True, True),
        ("disk", False, False),
        ("disk", True, True),
        ("pinned", False, True),
        ("pinned", True, True),
    ],
)
def test_the_backup_kept_at_a_resume(saver, tag, backup, retain, is_kept):
    with saver.region(tag, backup=backup, retain=retain):
        keep = torch.randn(4 * MIB, device=saver.device)
    want = keep.cpu().clone()
    held = saver.stats()["host_held_bytes"]
    saver.pause(tag)
    assert saver.tags()[tag].retained_bytes == 0  # in use, and so not counted as retained
    saver.resume(tag)
    assert saver.tags()[tag].retained_bytes == (16 * MIB if is_kept else 0)
    if backup != "disk":
        assert saver.stats()["host_held_bytes"] - held >= (16 * MIB if is_kept else 0)
    again = saver.pause(tag)
    assert (again.clean, again.copied) == ((16 * MIB, 0) if is_kept else (0, 16 * MIB))
    saver.resume(tag)
    assert "retained" in str(saver.tags()) or not is_kept
    assert torch.equal(keep.cpu(), want)


def test_a_resume_may_say_otherwise(saver, tag, tag2):
    with saver.region(tag):
        first = torch.randn(4 * MIB, device=saver.device)
    with saver.region(tag2, retain=True):
        second = torch.randn(4 * MIB, device=saver.device)
    want = first.cpu().clone(), second.cpu().clone()
    saver.pause(tag, tag2)
    saver.resume(tag, retain=True)
    saver.resume(tag2, retain=False)
    assert saver.tags()[tag].retained_bytes == 16 * MIB
    assert saver.tags()[tag2].retained_bytes == 0
    held = saver.stats()["host_held_bytes"]
    again = saver.pause(tag)
    assert (again.copied, again.clean) == (
        16 * MIB,
        0,
    )  # into the memory that was kept; digests are made for tags that retain
    assert saver.stats()["host_held_bytes"] == held
    assert saver.pause(tag2).clean == 0
    saver.resume(tag, tag2)
    assert saver.tags()[tag].retained_bytes == 0
    assert torch.equal(first.cpu(), want[0]) and torch.equal(second.cpu(), want[1])


def test_a_pinned_backup_goes_when_the_resume_says_so(saver, tag):
    with saver.region(tag, backup="pinned"):
        keep = torch.randn(4 * MIB, device=saver.device)
    before = saver.stats()["pinned_bytes"]
    saver.pause(tag)
    assert saver.stats()["pinned_bytes"] >= before + 16 * MIB
    saver.resume(tag, retain=False)
    assert saver.tags()[tag].retained_bytes == 0
    assert saver.stats()["pinned_bytes"] < before + 16 * MIB
    assert keep.shape == (4 * MIB,)


@pytest.mark.parametrize("backup", [*KINDS, None])
@pytest.mark.parametrize("once", [*KINDS, None])
def test_another_backup_this_once(saver, tag, backup, once):
    with saver.region(tag, backup=backup, retain=backup == "ram"):
        keep = torch.randn(MIB, device=saver.device)
    want = keep.cpu().clone()
    for kind in (backup, once, backup, once):
        saver.pause(tag, backup=kind)
        saver.resume(tag)
        if kind is None:
            want.zero_()
        assert torch.equal(keep.cpu(), want)


def test_retain_needs_a_backup_and_a_bool(saver, tag):
    with pytest.raises(ValueError, match="retain=True keeps a backup"):
        saver.region(tag, backup=None, retain=True)
    for bad in (1, None, "yes"):
        with pytest.raises(TypeError, match="retain is"):
            saver.region(tag, retain=bad)
    for bad in (1, 0, "yes"):
        with pytest.raises(TypeError, match="retain is"):
            saver.resume(tag, retain=bad)
    assert saver.region(tag, backup=None, retain=False).retain is False
    assert "retain=True" in repr(saver.region(tag, retain=True))


def test_pools_of_two_policies_are_two(saver, tag):
    with saver.region(tag):
        plain = torch.randn(3 * MIB, device=saver.device)
    with saver.region(tag, retain=True):
        kept = torch.randn(3 * MIB, device=saver.device)
    saver.pause(tag)
    saver.resume(tag)
    assert saver.tags()[tag].retained_bytes == 12 * MIB
    assert saver.pause(tag).clean == 12 * MIB
    saver.resume(tag)
    assert plain.shape == kept.shape


def test_a_pinned_limit_stops_a_pause_before_anything_moves(saver, tag):
    with saver.region(tag, backup="pinned"):
        keep = torch.randn(8 * MIB, device=saver.device)
    want = keep.cpu().clone()
    saver.pause(tag, backup="ram")  # makes the ring, if no test before did
    saver.resume(tag)
    saver.configure(pinned_limit=saver.stats()["pinned_bytes"] + MIB)
    try:
        with pytest.raises(StoreError, match="pinned"):
            saver.pause(tag)
        assert not saver.is_paused(tag)
        assert saver.pause(tag, backup="ram").bytes == 32 * MIB
    finally:
        saver.configure(pinned_limit=None)
        saver.resume(tag)
    assert torch.equal(keep.cpu(), want)
    assert saver.pause(tag).bytes == 32 * MIB


def test_disk_backups_lie_where_they_are_told_to_and_leave_no_name(saver, tag, tmp_path):
    with saver.region(tag, backup="disk"):
        keep = torch.randn(3 * MIB, device=saver.device)
    want = keep.cpu().clone()
    folder = tmp_path / "folder"
    folder.mkdir()
    saver.configure(disk_directory=folder)
    try:
        folder.rmdir()
        with pytest.raises(StoreError, match=r"folder.*saver\.configure\(disk_directory=\.\.\.\)"):
            saver.pause(tag)
        assert not saver.is_paused(tag)
        folder.mkdir()
        saver.pause(tag)
        assert list(folder.iterdir()) == []
        saver.resume(tag)
    finally:
        saver.configure(disk_directory=None)
    assert torch.equal(keep.cpu(), want)


@pytest.fixture
def named_files(saver, tmp_path):
    saver.configure(disk_files="named", disk_directory=tmp_path)
    yield tmp_path
    saver.configure(disk_files="hidden", disk_directory=None)


def test_named_files_show_stored_allocations_alone(saver, tag, named_files):
    with saver.region(tag, backup="disk"):
        large = torch.randn(3 * MIB, device=saver.device)
        small = torch.full((7,), 10, dtype=torch.uint8, device=saver.device)
    want = large.cpu().clone()
    sizes = set()
    for _ in range(3):
        saver.pause(tag)
        files = list(named_files.iterdir())
        assert len(files) == 2 and all(file.name.startswith("ebbtide_backup_") for file in files)
        sizes.add(sum(file.stat().st_size for file in files))
        saver.resume(tag)
        assert list(named_files.iterdir()) == []
        assert torch.equal(large.cpu(), want) and small.tolist() == [10] * 7
    assert len(sizes) == 1 and sizes.pop() >= large.nbytes
    saver.pause(tag)
    assert list(named_files.iterdir())
    del large, small
    gc.collect()
    saver.resume(tag)
    saver.trim(tag)
    assert list(named_files.iterdir()) == []


def test_named_files_of_retained_backups_stay_and_take_the_same_space(saver, tag, named_files):
    with saver.region(tag, backup="disk", retain=True):
        tensor = torch.randn(3 * MIB, device=saver.device)
    saver.pause(tag)
    (file,) = named_files.iterdir()
    before = file.stat().st_blocks
    for _ in range(3):
        saver.resume(tag)
        tensor.add_(1)
        saver.pause(tag)
        assert [file] == list(named_files.iterdir())
        assert file.stat().st_blocks <= before
    saver.resume(tag, retain=False)
    assert list(named_files.iterdir()) == []


def test_named_files_go_at_exit_and_those_of_a_killed_process_with_the_next(run_python, tmp_path):
    environment = {"EBBTIDE_DISK_DIRECTORY": str(tmp_path), "EBBTIDE_DISK_FILES": "named"}
    ended = run_python(PAUSED_AND_THEN.format("sys.exit(3)"), **environment)
    assert (ended.returncode, ended.stdout) == (3, "1\n")
    assert list(tmp_path.iterdir()) == []
    killed = run_python(PAUSED_AND_THEN.format("os.kill(os.getpid(), signal.SIGKILL)"), **environment)
    assert killed.stdout == "1\n"
    (left,) = tmp_path.iterdir()
    (tmp_path / "ebbtide_backup_list").write_text("a file of the user")
    last = "print(sorted(os.listdir(os.environ['EBBTIDE_DISK_DIRECTORY'])))"
    again = run_python(PAUSED_AND_THEN.format(last), **environment)
    assert left.name not in again.stdout
    assert [file.name for file in tmp_path.iterdir()] == ["ebbtide_backup_list"]


def test_files_in_a_relative_folder_go_after_the_program_moved_to_another(saver, tag, tmp_path, monkeypatch):
    (tmp_path / "backups").mkdir()
    monkeypatch.chdir(tmp_path)
    saver.configure(disk_files="named", disk_directory="backups")
    try:
        assert saver.settings()["disk_directory"] == str(tmp_path / "backups")
        with saver.region(tag, backup="disk"):
            tensor = torch.arange(MIB, device=saver.device)
        saver.pause(tag)
        monkeypatch.chdir("/")
        saver.resume(tag)
        assert list((tmp_path / "backups").iterdir()) == [] and torch.equal(tensor.cpu(), torch.arange(MIB))
        saver.pause(tag)
        assert len(list((tmp_path / "backups").iterdir())) == 1
        saver.resume(tag, retain=False)
    finally:
        saver.configure(disk_files="hidden", disk_directory=None)


def test_files_in_a_relative_folder_go_at_the_exit_of_a_program_that_moved(run_python, tmp_path, monkeypatch):
    (tmp_path / "backups").mkdir()
    monkeypatch.chdir(tmp_path)
    environment = {"EBBTIDE_DISK_DIRECTORY": "backups", "EBBTIDE_DISK_FILES": "named"}
    ended = run_python(PAUSED_AND_THEN.format("os.chdir('/')"), **environment)
    assert (ended.returncode, ended.stdout) == (0, "1\n"), ended.stderr
    assert list((tmp_path / "backups").iterdir()) == []


def test_a_small_backup_in_ram_that_is_kept_is_pinned_at_its_second_pause(saver, tag):
    def cycle():
        before = tensor.clone()
        saver.pause(tag)
        saver.resume(tag)
        assert torch.equal(tensor, before)
        return saver.stats()["pinned_bytes"]

    with saver.region(tag, retain=True):
        tensor = torch.arange(4 * MIB, device=saver.device)
    first = cycle()
    tensor.add_(1)
    host_bytes = saver.stats()["host_held_bytes"]
    assert cycle() - first >= tensor.nbytes
    assert saver.stats()["host_held_bytes"] == host_bytes, "the same memory"
    tensor.add_(1)
    saver.pause(tag)
    saver.resume(tag, retain=False)
    assert saver.stats()["pinned_bytes"] == first
    assert int(tensor[7]) == 9


def test_without_pinned_memory_to_spare_it_stays_as_it_is(saver, tag):
    with saver.region(tag, retain=True):
        tensor = torch.arange(4 * MIB, device=saver.device)
    saver.pause(tag)
    saver.resume(tag)
    held = saver.stats()["pinned_bytes"]
    saver.configure(pinned_limit=held + (64 << 20))
    try:
        for _ in range(2):
            tensor.add_(1)
            saver.pause(tag)
            saver.resume(tag)
            assert saver.stats()["pinned_bytes"] <= held
    finally:
        saver.configure(pinned_limit=None)
    assert int(tensor[7]) == 9
