"""Ledgers of runs: each run has one, and none stays behind for long."""

import fcntl
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from ebbtide.errors import StateError
from ebbtide.launch import ledger

# A process of a run: it holds a part of the file as long as it lives.
HOLD = """
import fcntl, os, struct, sys
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, int(sys.argv[2]), 64, 0))
print("holding", flush=True)
sys.stdin.read()
"""
SHOW_NAME = ["sh", "-c", "echo $EBBTIDE_LEDGER; echo $EBBTIDE_LEDGER"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder for ledgers in this test. No other folder is searched."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("EBBTIDE_LEDGER", raising=False)
    monkeypatch.setattr(ledger, "folders", lambda: [tmp_path])
    ledger.own_name.cache_clear()
    yield tmp_path
    ledger.own_name.cache_clear()


@pytest.fixture
def hold():
    """Starts a process that creates a ledger and holds a part of it. Returns the process."""
    started = []

    def hold(path, offset=0):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(path), str(offset)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        started.append(process)
        assert process.stdout.readline() == b"holding\n"
        return process

    yield hold
    for process in started:
        process.kill()
        process.communicate()


def run(*command):
    return subprocess.run(
        [sys.executable, "-m", "ebbtide.cli", "run", "--", *command], capture_output=True, text=True, check=True
    ).stdout.splitlines()


def test_a_run_has_one_name_and_two_runs_have_two(folder):
    first, second = run(*SHOW_NAME), run(*SHOW_NAME)
    assert len(set(first)) == len(set(second)) == 1
    assert first != second
    assert all(Path(name).parent == folder and Path(name).name.startswith(ledger.PREFIX) for name in first + second)
    outer, *inner = run("sh", "-c", f"echo $EBBTIDE_LEDGER; {sys.executable} -m ebbtide.cli run -- env")
    assert f"EBBTIDE_LEDGER={outer}" in inner
    assert list(folder.iterdir()) == []  # a name creates no file


def test_all_that_a_program_starts_is_one_run(folder):
    name = ledger.name_for({})
    assert ledger.name_for({}) == name != ledger.name_for({"EBBTIDE_LEDGER": "/its/own"}) == "/its/own"
    assert ledger.name_for({"EBBTIDE_LEDGER": ""}) == name
    assert ledger.name_for({"EBBTIDE_LEDGER": "relative"}) == str(Path("relative").absolute()), "children may move"


def test_only_what_no_process_holds_is_removed(folder, hold):
    path = folder / f"{ledger.PREFIX}0"
    first, second = hold(path), hold(path, 64)
    assert ledger.sweep() == []
    first.kill()
    first.wait()
    assert ledger.sweep() == [] and path.exists()
    second.kill()
    second.wait()
    assert ledger.sweep() == [path] and not path.exists()


def test_the_next_run_removes_what_the_last_one_left(folder, hold):
    left, held = folder / f"{ledger.PREFIX}left", folder / f"{ledger.PREFIX}held"
    left.touch(0o600)
    hold(held)
    run("true")
    assert list(folder.iterdir()) == [held]


def test_preloaded_removes_it_at_its_end(folder, hold):
    import ebbtide

    with ebbtide.preloaded() as added:
        child = hold(Path(added["EBBTIDE_LEDGER"]))
        assert ledger.sweep() == []
        child.kill()
        child.wait()
    assert list(folder.iterdir()) == []


def test_foreign_files_stay(folder, monkeypatch):
    target, link = folder / "data", folder / f"{ledger.PREFIX}link"
    target.touch()
    link.symlink_to(target)
    (folder / f"{ledger.PREFIX}folder").mkdir()
    os.mkfifo(folder / f"{ledger.PREFIX}pipe")
    others = folder / f"{ledger.PREFIX}others"
    others.touch()
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert ledger.sweep() == []
    monkeypatch.setattr(os, "geteuid", lambda: owner)
    assert ledger.sweep() == [others]
    assert len(list(folder.iterdir())) == 4


def test_a_file_that_lost_its_name_meanwhile_is_not_removed_twice(folder, monkeypatch):
    """Another run removed the file between open and lock, and a process created a new one of that name."""
    path = folder / f"{ledger.PREFIX}0"
    path.touch()
    plain = fcntl.fcntl

    def replace_first(*arguments):
        path.unlink()
        path.touch()
        return plain(*arguments)

    monkeypatch.setattr(fcntl, "fcntl", replace_first)
    assert ledger.sweep() == [] and path.exists()


def test_the_lock_is_the_kernels(folder, hold):
    assert len(ledger._whole_file_lock()) == struct.calcsize("hhqqi0q") == 32
    path = folder / f"{ledger.PREFIX}0"
    hold(path, 1 << 40)  # wherever the part lies
    assert ledger.sweep() == []


def test_where_ledgers_go(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert ledger.folders()[:2] == [tmp_path, Path("/dev/shm")]
    for unusable in (str(tmp_path / "missing"), "relative", ""):
        monkeypatch.setenv("XDG_RUNTIME_DIR", unusable)
        assert ledger.folders()[0] == Path("/dev/shm")


def test_without_a_folder_it_is_a_sentence(folder, monkeypatch):
    monkeypatch.setattr(ledger, "folders", list)
    with pytest.raises(StateError, match="set XDG_RUNTIME_DIR"):
        ledger.name_for({})
    assert ledger.sweep() == []
