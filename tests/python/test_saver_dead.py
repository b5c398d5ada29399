"""Tensors that die while their tag is paused: their backups are freed, and a resume brings back only the living."""

import pytest

torch = pytest.importorskip("torch")

from ebbtide import _core  # noqa: E402
from ebbtide.errors import OutOfMemoryError, StateError  # noqa: E402
from ebbtide.saver.pools import region_pools  # noqa: E402
from random_memory import random_bytes  # noqa: E402

MIB = 1 << 20


def noise(saver, tag, mib, **options):
    with saver.region(tag, **options):
        return random_bytes(mib * MIB, saver.device)


def backup_bytes(saver):
    stats = saver.stats()
    return stats["host_held_bytes"] - stats["staging_bytes"]


def test_a_pause_of_the_paused_tag_gives_up_the_backups_of_the_dead(saver, tag):
    keep, gone = noise(saver, tag, 12), noise(saver, tag, 32)
    want = keep.cpu().clone()
    before = backup_bytes(saver)
    saver.pause(tag)
    assert backup_bytes(saver) - before == 44 * MIB
    del gone
    assert saver.pause(tag).bytes == 0
    assert backup_bytes(saver) - before == 12 * MIB
    status = saver.tags()[tag]
    assert (status.state, status.stored_bytes, status.trimmed_bytes, status.dropped_bytes) == (
        "paused",
        12 * MIB,
        32 * MIB,
        0,
    )
    assert saver.resume(tag).bytes == 12 * MIB
    assert torch.equal(keep.cpu(), want)
    assert backup_bytes(saver) == before


@pytest.mark.parametrize("backup", ["ram", "pinned", "disk", None])
def test_a_resume_claims_nothing_for_the_dead(saver, tag, backup):
    keep, gone = noise(saver, tag, 12), noise(saver, tag, 32, backup=backup)
    want, address = keep.cpu().clone(), gone.data_ptr()
    saver.pause(tag)
    held = _core.query_device(0).held_bytes
    del gone
    saver.configure(device_limit=held + 12 * MIB)  # too little if the dead tensors came back
    try:
        report = saver.resume(tag)
    finally:
        saver.configure(device_limit=None)
    assert (report.bytes, report.copied) == (12 * MIB, 12 * MIB)
    assert torch.equal(keep.cpu(), want)
    assert saver.tags()[tag].trimmed_bytes == 32 * MIB
    with saver.region(tag, backup=backup):
        again = torch.empty(32 * MIB, dtype=torch.uint8, device=saver.device)
    assert again.data_ptr() == address
    assert int(torch.count_nonzero(again)) == 0


def test_an_asynchronous_resume_claims_nothing_for_the_dead(saver, tag):
    keep, gone = noise(saver, tag, 12), noise(saver, tag, 32)
    want = keep.cpu().clone()
    saver.pause(tag)
    del gone
    assert saver.resume(tag, wait=False).wait().bytes == 12 * MIB
    assert torch.equal(keep.cpu(), want)


def test_trim_reaches_paused_pools(saver, tag):
    keep, gone = noise(saver, tag, 12), noise(saver, tag, 32)
    want = keep.cpu().clone()
    before = backup_bytes(saver)
    saver.pause(tag)
    del gone
    assert saver.trim(tag).bytes == 0, "no device memory"
    assert backup_bytes(saver) - before == 12 * MIB
    assert saver.tags()[tag].trimmed_bytes == 32 * MIB
    saver.resume(tag)
    assert torch.equal(keep.cpu(), want)


def test_a_swap_looks_at_both_sides(saver, tag, tag2):
    left, dead_left = noise(saver, tag, 12), noise(saver, tag, 20)
    right, dead_right = noise(saver, tag2, 12), noise(saver, tag2, 32)
    wants = [left.cpu().clone(), right.cpu().clone()]
    saver.pause(tag2)
    del dead_right
    swapped = saver.swap(pause=tag, resume=tag2)
    assert (swapped.paused.bytes, swapped.resumed.bytes) == (32 * MIB, 12 * MIB)
    del dead_left
    assert saver.swap(pause=tag2, resume=tag).resumed.bytes == 12 * MIB
    assert torch.equal(left.cpu(), wants[0])
    saver.resume(tag2)
    assert torch.equal(right.cpu(), wants[1])


def test_prepare_and_a_region_look_too(saver, tag):
    keep, first, second = noise(saver, tag, 12), noise(saver, tag, 20), noise(saver, tag, 32)
    want = keep.cpu().clone()
    before = backup_bytes(saver)
    saver.pause(tag)
    del first
    saver.prepare(tag)
    assert backup_bytes(saver) - before == 44 * MIB
    del second
    with saver.region(tag):
        assert backup_bytes(saver) - before == 12 * MIB
        fresh = torch.ones(MIB, dtype=torch.uint8, device=saver.device)
        assert saver.resume(tag).bytes == 12 * MIB
    assert torch.equal(keep.cpu(), want)
    assert int(fresh.sum()) == MIB


def test_the_dead_go_while_the_region_is_open_in_a_fresh_pool(saver, tag):
    keep, gone = noise(saver, tag, 12), noise(saver, tag, 32)
    want = keep.cpu().clone()
    saver.pause(tag)
    with saver.region(tag):
        del gone
        assert saver.resume(tag).bytes == 12 * MIB
    assert torch.equal(keep.cpu(), want)


def test_where_all_are_dead_nothing_is_paused_any_more(saver, tag):
    gone = noise(saver, tag, 32)
    before = backup_bytes(saver)
    saver.pause(tag)
    del gone
    assert saver.resume(tag).bytes == 0
    assert backup_bytes(saver) < before + 32 * MIB
    assert not saver.is_paused(tag)
    again = noise(saver, tag, 32)
    want = again.cpu().clone()
    saver.pause(tag)
    saver.resume(tag)
    assert torch.equal(again.cpu(), want)


def test_what_died_in_a_segment_that_lives_on_is_not_copied_back(saver, tag):
    with saver.region(tag):
        block = [random_bytes(4 * MIB, saver.device) for _ in range(5)]
    want = block[4].cpu().clone()
    assert saver.pause(tag).copied == 20 * MIB
    del block[0:4]
    report = saver.resume(tag)
    assert (report.bytes, report.copied) == (20 * MIB, 4 * MIB)
    assert torch.equal(block[0].cpu(), want)


def test_a_view_of_a_dead_tensors_backup_stays(saver, tag):
    keep, gone = noise(saver, tag, 12), noise(saver, tag, 32)
    want = gone.cpu().clone()
    saver.pause(tag)
    view = saver.backup_of(gone)
    del gone
    saver.resume(tag)
    assert saver.tags()[tag].trimmed_bytes == 32 * MIB
    assert torch.equal(view, want)
    assert keep.numel() == 12 * MIB


def test_captured_pools_are_left_alone(saver, tag):
    keep, gone = noise(saver, tag, 12), noise(saver, tag, 32)
    captured = [pool for key, pool in region_pools.registry.idle() if key.tag == tag]
    for pool in captured:
        pool.is_captured = True
    try:
        saver.pause(tag)
        del gone
        saver.trim(tag)
        assert saver.resume(tag).bytes == 44 * MIB
    finally:
        for pool in captured:
            pool.is_captured = False
    assert keep.numel() == 12 * MIB


def test_what_torch_tells_that_is_not_understood_costs_memory_and_nothing_else(saver, tag, monkeypatch):
    keep, gone = noise(saver, tag, 12), noise(saver, tag, 32)
    want = keep.cpu().clone()
    saver.pause(tag)
    del gone

    def refuse(pool):
        raise KeyError("blocks")

    with monkeypatch.context() as patched:
        from ebbtide.saver.pools import backends

        patched.setattr(type(backends.existing_backend()), "segments_of", lambda self, pools: refuse(pools))
        assert saver.resume(tag).bytes == 44 * MIB
    assert torch.equal(keep.cpu(), want)


def test_a_pool_whose_dead_were_given_up_is_entered_again_after_the_resume(saver, tag):
    saver.trim()  # what other tests have cached would make room
    keep, gone = noise(saver, tag, 12), noise(saver, tag, 32)
    want = keep.cpu().clone()
    made = saver.stats()["pools_made"]
    for _ in range(3):
        saver.pause(tag)
        del gone
        saver.resume(tag)
        gone = noise(saver, tag, 32)
    assert saver.stats()["pools_made"] == made
    assert torch.equal(keep.cpu(), want)
    saver.pause(tag)
    del gone
    saver.resume(tag)
    held = _core.query_device(0).held_bytes
    saver.configure(device_limit=held + MIB)
    try:
        with pytest.raises(OutOfMemoryError), saver.region(tag):
            pass
    finally:
        saver.configure(device_limit=None)
    with saver.region(tag):
        pass


def test_a_capture_refuses_the_trim_and_not_the_program(saver, tag):
    keep, gone = noise(saver, tag, 12), noise(saver, tag, 32)
    saver.pause(tag)
    del gone
    capture = _core.Frame()
    capture.begin_capture()
    try:
        with pytest.raises(StateError):
            saver.resume(tag)
        with pytest.raises(StateError):
            saver.trim(tag)
    finally:
        capture.close()
    assert saver.resume(tag).bytes == 12 * MIB
    assert keep.numel() == 12 * MIB


@pytest.mark.parametrize("backup", ["ram", "pinned", "disk", None])
def test_what_died_while_resident_is_cached_memory_and_comes_back(saver, tag, tag2, backup):
    """It comes back because torch would otherwise map it anew in each cycle."""
    keep, gone, late = (noise(saver, tag, mib, backup=backup) for mib in (12, 32, 20))
    with saver.region(tag2):
        pass
    want = keep.cpu().clone()
    del gone
    for number in range(3):
        if number == 1:
            report = saver.swap(pause=tag, resume=tag2).paused
        else:
            report = saver.pause(tag)
        assert report.unused == (0 if backup is None else 32 * MIB)
        if number == 2:
            del late
        assert saver.pause(tag).bytes == 0
        assert saver.resume(tag).bytes == (44 if number == 2 else 64) * MIB
        assert saver.tags()[tag].trimmed_bytes == (20 * MIB if number == 2 else 0)
    assert backup is None or torch.equal(keep.cpu(), want)
    saver.configure(device_limit=_core.query_device(0).held_bytes + 20 * MIB)
    try:
        again = noise(saver, tag, 32, backup=backup)
    finally:
        saver.configure(device_limit=None)
    saver.pause(tag)
    del again
    # Entering the region brought the 20 MiB back, because they were free when they left.
    assert saver.resume(tag).bytes == 32 * MIB
    assert saver.tags()[tag].trimmed_bytes == 32 * MIB


@pytest.mark.parametrize("come_back", ["resume", "later", "swap", "paused"])
def test_cached_memory_gives_way_to_the_living(saver, tag, tag2, come_back):
    keep, gone = noise(saver, tag, 12), noise(saver, tag, 32)
    with saver.region(tag2):
        pass
    want = keep.cpu().clone()
    del gone
    scope = saver.paused(tag)
    scope.__enter__()
    saver.configure(device_limit=_core.query_device(0).held_bytes + 12 * MIB)
    try:
        if come_back == "resume":
            assert saver.resume(tag).bytes == 12 * MIB
        elif come_back == "later":
            assert saver.resume(tag, wait=False).wait().bytes == 12 * MIB
        elif come_back == "swap":
            assert saver.swap(pause=tag2, resume=tag).resumed.bytes == 12 * MIB
        scope.__exit__(None, None, None)
    finally:
        saver.configure(device_limit=None)
    assert not saver.is_paused(tag)
    assert saver.tags()[tag].trimmed_bytes == 32 * MIB
    assert torch.equal(keep.cpu(), want)


def test_what_a_pause_did_not_look_at_is_not_taken_for_cached(saver, tag):
    """A segment that was cached memory in one pause is in use in the next, which looks for no free memory. When it dies
    it counts as any other."""
    keep, gone = noise(saver, tag, 12), noise(saver, tag, 32)
    del gone
    saver.pause(tag)
    saver.resume(tag)
    used = noise(saver, tag, 32)
    saver.configure(skip_unused=False)
    try:
        saver.pause(tag)
    finally:
        saver.configure(skip_unused=True)
    del used
    assert saver.resume(tag).bytes == 12 * MIB
    assert keep.numel()
