"""saver.prepare allocates memory for backups before the pause that needs it."""

import pickle

import pytest

torch = pytest.importorskip("torch")

from ebbtide.errors import StateError, StoreError  # noqa: E402
from random_memory import random_bytes  # noqa: E402

MIB = 1 << 20


def noise(saver, tag, mib, **options):
    with saver.region(tag, **options):
        return random_bytes(mib * MIB, saver.device)


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("backup", ["ram", "pinned", "disk"])
def test_the_next_pause_claims_nothing_more(saver, tag, backup, wait):
    keep = noise(saver, tag, 32, backup=backup)
    want = keep.cpu().clone()
    with saver.paused(f"{tag}-nothing", missing_ok=True):
        before = saver.stats()["host_held_bytes"] - saver.stats()["staging_bytes"]
    done = saver.prepare(tag, wait=wait)
    report = done if wait else done.wait()
    assert (report.kind, report.bytes, report.copied) == ("prepare", 32 * MIB, 0)
    assert "made ready 32.0 MiB" in str(report)
    assert not saver.is_paused(tag)
    held = saver.stats()["host_held_bytes"]
    # The ring of the copying threads is made as well, unless an earlier test made it.
    assert held - saver.stats()["staging_bytes"] - before == (0 if backup == "disk" else 32 * MIB)
    saver.configure(host_limit=held)
    saver.pause(tag)
    saver.configure(host_limit=None)
    saver.resume(tag)
    assert torch.equal(keep.cpu(), want)
    assert saver.timeline[-3].kind == "prepare"


def test_what_has_memory_is_left_alone(saver, tag):
    keep = noise(saver, tag, 16)
    assert saver.prepare(tag).bytes == 16 * MIB
    assert saver.prepare(tag).bytes == 0
    saver.pause(tag)
    assert saver.prepare(tag).bytes == 0
    saver.resume(tag)
    assert saver.prepare(tag).bytes == 16 * MIB  # the backup's memory went back to the system
    saver.pause(tag)
    saver.resume(tag, retain=True)
    assert saver.prepare(tag).bytes == 0
    assert keep.numel()


def test_nothing_where_there_is_no_backup(saver, tag):
    keep = noise(saver, tag, 16, backup=None)
    assert saver.prepare(tag).bytes == 0
    assert saver.prepare(tag, wait=False).wait().bytes == 0
    assert keep.numel()


def test_what_dies_gives_it_back(saver, tag):
    """The memory goes back at the latest with the backup: at a resume that does not retain it."""
    keep = noise(saver, tag, 16)
    held = saver.stats()["host_held_bytes"]
    saver.prepare(tag)
    saver.pause(tag)
    saver.resume(tag)
    assert saver.stats()["host_held_bytes"] <= held + 64 * MIB
    assert saver.tags()[tag].retained_bytes == 0
    assert keep.numel()


def test_too_little_room_takes_nothing(saver, tag):
    keep = noise(saver, tag, 64)
    saver.configure(host_limit=saver.stats()["host_held_bytes"] + 32 * MIB)
    held = saver.stats()["host_held_bytes"]
    with pytest.raises(StoreError):
        saver.prepare(tag)
    done = saver.prepare(tag, wait=False)
    for _ in range(2):
        with pytest.raises(StoreError):
            done.wait()
    assert done.done
    assert saver.stats()["host_held_bytes"] == held
    saver.configure(host_limit=None)
    assert saver.prepare(tag).bytes == 64 * MIB
    assert keep.numel()


def test_what_is_refused(saver, tag):
    for wait in (True, False):
        with pytest.raises(StateError, match="no region"):
            saver.prepare(f"{tag}-unknown", wait=wait)
        with pytest.raises(ValueError):
            saver.prepare("a/b", wait=wait)
    assert saver.prepare(f"{tag}-unknown", missing_ok=True).bytes == 0
    done = saver.prepare(f"{tag}-unknown", missing_ok=True, wait=False)
    assert done.wait().bytes == 0
    with pytest.raises(TypeError, match="cannot pickle a Preparation"):
        pickle.dumps(done)


def test_where_no_thread_starts_it_is_done_at_once(saver, tag, monkeypatch):
    from ebbtide.saver.operations import prepare

    class NoThread:
        def __init__(self, **_):
            pass

        def start(self):
            raise RuntimeError("can't start new thread")

    keep = noise(saver, tag, 16)
    monkeypatch.setattr(prepare.threading, "Thread", NoThread)
    done = saver.prepare(tag, wait=False)
    assert done.done
    assert done.wait().bytes == 16 * MIB
    assert keep.numel()


@pytest.mark.parametrize("ending", ["", "raise SystemExit(0)", "del done", "saver.pause('w')"])
def test_the_process_may_end_in_the_middle(run_python, ending):
    result = run_python(
        f"""
        import torch
        from ebbtide import saver
        with saver.region("w"):
            x = torch.zeros(200 << 20, dtype=torch.uint8, device=saver.device)
        done = saver.prepare("w", wait=False)
        {ending}
        """
    )
    assert (result.returncode, result.stderr) == (0, "")
