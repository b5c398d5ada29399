"""Memory that is already paused is skipped, whatever the arguments. That includes what a pause has left in host
memory."""

import pytest

torch = pytest.importorskip("torch")

import caches  # noqa: E402
from core_sim import UNKNOWN, Sim  # noqa: E402
from ebbtide import _core  # noqa: E402
from ebbtide.errors import DriverError, StoreError  # noqa: E402
from random_memory import random_bytes  # noqa: E402

MIB = 1 << 20


@pytest.fixture
def room(saver):
    """`room(mib)` leaves this much of device_limit for the next allocations."""

    def leave(mib):
        caches.release(saver)
        saver.configure(device_limit=_core.query_device(0).held_bytes + mib * MIB, reserve=0)

    yield leave
    saver.configure(device_limit=None, reserve=None)


def noise(saver, tag, mib, **options):
    with saver.region(tag, **options):
        return random_bytes(mib * MIB, saver.device)


@pytest.mark.parametrize("on_device", [16, 0])
def test_later_pauses_of_any_kind_leave_it(saver, tag, tag2, room, on_device):
    room(on_device)
    tensor = noise(saver, tag, 40, overflow="split")
    saver.configure(device_limit=None)
    other = noise(saver, tag2, 12)
    want = tensor.cpu().clone()
    on_host = saver.tags()[tag].host_bytes  # small allocations have room of their own beside the limit
    assert on_host > 0
    assert saver.pause(tag).bytes == 40 * MIB - on_host
    status = saver.tags()[tag]
    assert (status.state, status.host_bytes, status.paused_host_bytes) == ("paused", on_host, on_host)
    assert saver.is_paused(tag)
    for backup in (None, "disk", "pinned", "ram"):
        report = saver.pause(tag, backup=backup)
        assert (report.bytes, report.copied, report.skipped) == (0, 0, 0)
        assert not [held for held in report.remaining if held.tag == tag]
    with saver.paused(tag, backup=None):
        pass
    assert saver.is_paused(tag), "it was paused before"
    saver.resume(tag2)
    saver.swap(pause=tag, resume=tag2, backup=None)
    saver.prepare(tag)
    saver.trim(tag)
    assert saver.promote(tag).bytes == 0
    assert saver.tags()[tag].host_bytes == on_host
    saver.resume(tag)
    assert torch.equal(tensor.cpu(), want)
    assert not saver.is_paused(tag)
    assert saver.tags()[tag].paused_host_bytes == 0
    assert saver.promote(tag).bytes == on_host
    assert torch.equal(tensor.cpu(), want)
    assert other.numel() == 12 * MIB


def test_hooks_run_for_it_once_each_way(saver, tag, room):
    room(0)
    tensor = noise(saver, tag, 20, overflow="split")
    calls = []
    events = ("before_pause", "after_pause", "before_resume", "after_resume")
    forget = [saver.on(event, tag, lambda _, event=event: calls.append(event)) for event in events]
    try:
        saver.pause(tag)
        saver.pause(tag, backup=None)
        saver.resume(tag)
        saver.resume(tag)
    finally:
        for one in forget:
            one()
    assert calls == list(events)
    assert tensor.numel() == 20 * MIB


def test_dead_memory_that_was_left_on_the_host_goes(saver, tag, room):
    room(16)
    gone = noise(saver, tag, 40, overflow="split")
    keep = noise(saver, tag, 12, overflow="split")
    want = keep.cpu().clone()
    saver.pause(tag)
    del gone
    saver.pause(tag, backup=None)
    status = saver.tags()[tag]
    assert (status.trimmed_bytes, status.host_bytes) == (40 * MIB, 12 * MIB)
    saver.resume(tag)
    assert torch.equal(keep.cpu(), want)


def test_paused_brings_back_what_lay_on_the_host_as_a_whole(saver, tag, room):
    """None of it had to move, and yet it was paused."""
    room(0)
    tensor = noise(saver, tag, 20, overflow="split")
    with saver.paused(tag):
        assert saver.is_paused(tag)
    assert not saver.is_paused(tag)
    assert tensor.numel()


@pytest.mark.sim_only  # makes a driver call fail
def test_a_refused_paused_brings_nothing_back(saver, tag):
    """An allocation that a failure has left partly paused stays so if the pause in paused() is refused."""
    sim = Sim()
    tensor = noise(saver, tag, 256)
    want = tensor.clone()
    sim.fail("cuMemUnmap", 2, UNKNOWN)
    try:
        with pytest.raises(DriverError):
            saver.pause(tag)
    finally:
        sim.clear_failures()
    before = saver.tags()[tag]
    assert before.state == "partial" and before.stored_bytes and before.resident_bytes
    saver.configure(host_limit=1)
    try:
        with pytest.raises(StoreError):
            with saver.paused(tag):
                raise AssertionError
        assert saver.tags()[tag] == before
    finally:
        saver.configure(host_limit=None)
    saver.resume(tag)
    assert torch.equal(tensor, want)


@pytest.mark.sim_only  # makes a driver call fail
def test_paused_leaves_away_what_a_failed_pause_left_with_its_memory(saver, tag):
    sim = Sim()
    away, living = noise(saver, tag, 12), noise(saver, tag, 12)
    want = [away.clone(), living.clone()]
    sim.fail("cuMemRelease", 1, UNKNOWN)
    try:
        with pytest.raises(DriverError):
            saver.pause(tag)
    finally:
        sim.clear_failures()
    assert saver.tags()[tag].state == "partial"
    before = [_core.is_away(tensor.data_ptr(), tensor.nbytes) for tensor in (away, living)]
    assert any(before)  # else the failure came before any memory left, and the test shows nothing
    with saver.paused(tag):
        assert saver.tags()[tag].state == "paused"
    assert [_core.is_away(tensor.data_ptr(), tensor.nbytes) for tensor in (away, living)] == before
    saver.resume(tag)
    assert [torch.equal(one, two) for one, two in zip((away, living), want, strict=True)] == [True, True]
