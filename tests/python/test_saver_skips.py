"""Blocks that a pause skips (clean, unused or constant) are counted, come back correctly, and can be switched off."""

import logging

import pytest

torch = pytest.importorskip("torch")

from ebbtide import _core  # noqa: E402
from ebbtide.saver.pools import backends, region_pools  # noqa: E402
from ebbtide.saver.reclaim.look import Look  # noqa: E402
from ebbtide.saver.values.arguments import AS_ALLOCATED_CODE, PauseRequest  # noqa: E402
from random_memory import random_bytes  # noqa: E402

MIB = 1 << 20
BLOCK = 2 * MIB


@pytest.fixture
def switches(saver):
    yield saver
    saver.configure(skip_clean=True, skip_unused=True, skip_constant=True)


def noise(saver, tag, mib, **options):
    with saver.region(tag, **options):
        return random_bytes(mib * MIB, saver.device)


def cycle(saver, *tags):
    report = saver.pause(*tags)
    saver.resume(*tags)
    return report


def test_clean_blocks_are_counted_and_one_bit_makes_a_block_dirty(switches, tag):
    saver = switches
    data = noise(saver, tag, 16, retain=True)
    assert cycle(saver, tag).copied == 16 * MIB
    again = cycle(saver, tag)
    assert (again.clean, again.copied, again.skipped) == (16 * MIB, 0, 16 * MIB)
    for position in (0, BLOCK - 1, 16 * MIB - 1):
        data[position] ^= 1
        want = data.cpu().clone()
        report = cycle(saver, tag)
        assert (report.clean, report.copied) == (14 * MIB, BLOCK)
        assert torch.equal(data.cpu(), want)


def test_clean_switched_off(switches, tag):
    saver = switches
    data = noise(saver, tag, 8, retain=True)
    want = data.cpu().clone()
    cycle(saver, tag)
    saver.configure(skip_clean=False)
    report = cycle(saver, tag)
    assert (report.clean, report.copied) == (0, 8 * MIB)
    assert torch.equal(data.cpu(), want)
    saver.configure(skip_clean=True)
    cycle(saver, tag)  # makes the digests that were skipped
    assert cycle(saver, tag).clean == 8 * MIB


@pytest.mark.parametrize("value", [0.0, 1.0, float("nan"), -0.0])
def test_constant_blocks_are_counted_and_come_back(switches, tag, value):
    saver = switches
    with saver.region(tag):
        data = torch.full((4 * MIB,), value, device=saver.device)
    report = cycle(saver, tag)
    assert (report.constant, report.copied) == (16 * MIB, 0)
    assert torch.equal(data.cpu().view(torch.int32), torch.full((4 * MIB,), value).view(torch.int32))
    data.view(torch.uint8)[-1] ^= 1  # all equal but the last byte
    want = data.cpu().clone().view(torch.int32)
    report = cycle(saver, tag)
    assert (report.constant, report.copied) == (14 * MIB, BLOCK)
    assert torch.equal(data.cpu().view(torch.int32), want)


def test_constant_switched_off(switches, tag):
    saver = switches
    saver.configure(skip_constant=False)
    with saver.region(tag):
        data = torch.zeros(4 * MIB, device=saver.device)
    report = cycle(saver, tag)
    assert (report.constant, report.copied) == (0, 16 * MIB)
    assert int(torch.count_nonzero(data)) == 0


def test_free_blocks_are_unused(switches, tag):
    saver = switches
    keep, gone = noise(saver, tag, 12), noise(saver, tag, 32)
    want = keep.cpu().clone()
    del gone
    report = cycle(saver, tag)
    assert (report.unused, report.copied, report.bytes) == (32 * MIB, 12 * MIB, 44 * MIB)
    assert "32.0 MiB unused" in str(report)
    assert torch.equal(keep.cpu(), want)


def test_the_free_part_of_a_segment_is_unused(switches, tag):
    saver = switches
    with saver.region(tag):  # segments of 20 MiB: two tensors of 4 MiB, one of which dies
        first = random_bytes(4 * MIB, saver.device)
        second = random_bytes(4 * MIB, saver.device)
    want = second.cpu().clone()
    del first
    report = cycle(saver, tag)
    assert report.bytes == 20 * MIB
    assert report.copied == 4 * MIB
    assert report.unused == 16 * MIB
    assert torch.equal(second.cpu(), want)


def test_unused_switched_off(switches, tag, monkeypatch):
    saver = switches
    saver.configure(skip_unused=False)
    keep, gone = noise(saver, tag, 12), noise(saver, tag, 32)
    del gone
    asked = []
    monkeypatch.setattr(backends.existing_backend(), "segments_of", asked.append, raising=False)
    report = cycle(saver, tag)
    assert (report.unused, report.copied) == (0, 44 * MIB)
    assert asked == []
    assert keep.numel()


def test_a_pool_is_looked_at_once_a_pause(switches, tag, tag2, monkeypatch):
    saver = switches
    keep = noise(saver, tag, 12, backup=None), noise(saver, tag2, 12)
    asked = []

    def segments_of(pools):
        asked.extend(pools)
        return [None] * len(pools)

    monkeypatch.setattr(backends.existing_backend(), "segments_of", segments_of, raising=False)
    assert saver.pause(tag).unused == 0
    saver.pause(tag2, backup=None)
    # Also without a backup: memory that is free by now comes back, and memory that dies later does not.
    assert len(asked) == 2
    saver.resume()
    asked.clear()  # what died meanwhile need not come back
    saver.pause(tag, backup="ram")
    assert len(asked) == 1
    saver.pause(tag)  # already paused: only what died meanwhile is searched for
    assert len(asked) == 2
    del keep


def test_a_block_that_is_handed_out_again_is_kept(switches, tag):
    saver = switches
    keep, gone = noise(saver, tag, 12, retain=True), noise(saver, tag, 32, retain=True)
    address = gone.data_ptr()
    del gone
    assert cycle(saver, tag).unused == 32 * MIB
    again = noise(saver, tag, 32, retain=True)
    assert again.data_ptr() == address  # the very block that was unused
    want = again.cpu().clone()
    report = cycle(saver, tag)
    assert (report.unused, report.clean, report.copied) == (0, 12 * MIB, 32 * MIB)
    assert torch.equal(again.cpu(), want)
    del again
    report = cycle(saver, tag)
    assert (report.unused, report.clean) == (32 * MIB, 12 * MIB)
    assert keep.numel()


def as_allocated(*tags):
    return PauseRequest(list(tags), AS_ALLOCATED_CODE)


def test_a_lease_between_snapshot_and_claim_makes_the_ranges_void(switches, tag):
    saver = switches
    keep, gone = noise(saver, tag, 12), noise(saver, tag, 32)
    address = gone.data_ptr()
    del gone
    ranges, as_of = Look([tag]).unused(as_allocated(tag))
    assert (address, 32 * MIB) in ranges
    again = noise(saver, tag, 32)  # another thread might do this
    assert again.data_ptr() == address
    want = again.cpu().clone()
    report = _core.pause([tag], unused=ranges, unused_as_of=as_of)
    assert (report.unused, report.copied) == (0, 44 * MIB)
    saver.resume(tag)
    assert torch.equal(again.cpu(), want)
    assert keep.numel()


def test_a_lease_that_is_open_at_the_snapshot_gives_no_ranges(switches, tag, tag2):
    """The lease may end before the claim, with a block in use that the snapshot called free."""
    saver = switches
    keep = noise(saver, tag, 12), noise(saver, tag2, 12)
    gone = noise(saver, tag, 32)
    del gone
    with saver.region(tag):
        assert Look([tag]).unused(as_allocated(tag)) == ([], 0)
        assert Look([]).unused(as_allocated()) == ([], 0)
        assert Look([tag2]).unused(as_allocated(tag2))[1] > 0
    assert Look([tag]).unused(as_allocated(tag))[0]
    del keep


def idle_pools(tag):
    return [pool for key, pool in region_pools.registry.idle() if key.tag == tag]


@pytest.fixture
def no_captures_left(tag, tag2):
    """No graph was captured, so what the pools cache may go."""
    yield
    for pool in idle_pools(tag) + idle_pools(tag2):
        pool.is_captured = False


def test_pools_that_a_capture_reached_are_never_unused(switches, no_captures_left, tag, tag2):
    saver = switches
    with saver.region(tag, threads="all"):  # open for all threads during a capture
        keep = random_bytes(12 * MIB, saver.device)
        with _core.Frame() as capture:
            region_pools.registry.begin_capture(capture)
    with saver.region(tag2):  # open for its own thread only, so the capture allocates elsewhere
        with _core.Frame() as capture:
            region_pools.registry.begin_capture(capture)
    gone = noise(saver, tag, 32), noise(saver, tag2, 32)
    del gone
    assert [pool.is_captured for pool in idle_pools(tag)] == [True]
    assert [pool.is_captured for pool in idle_pools(tag2)] == [False]
    report = cycle(saver, tag, tag2)
    assert report.unused == 32 * MIB
    assert report.copied == 44 * MIB
    assert saver.trim(tag).bytes == 0
    assert saver.trim(tag2).bytes == 32 * MIB
    assert keep.numel()


def test_a_pool_that_is_opened_during_a_capture_is_marked(switches, no_captures_left, tag, tag2):
    saver = switches
    with _core.Frame() as capture:
        region_pools.registry.begin_capture(capture)
        with saver.region(tag):
            pass
    with saver.region(tag2):
        pass
    assert [pool.is_captured for pool in idle_pools(tag) + idle_pools(tag2)] == [True, False]


def test_a_pool_that_a_capture_names_is_marked():
    class Pool:
        def __init__(self, number):
            self.id = (0, number)

    registry = region_pools.RegionPools()
    pools = [region_pools.RegionPool(Pool(number), 0, 0, number) for number in (1, 2)]
    for pool in pools:
        registry.add(region_pools.PoolKey("a", 1, 0), pool)
    with _core.Frame() as capture:
        registry.begin_capture(capture, (0, 2))
    assert [pool.is_captured for pool in pools] == [False, True]


@pytest.mark.parametrize("answer", [RuntimeError("planted"), KeyError("blocks"), None, []], ids=repr)
def test_a_snapshot_that_fails_or_is_strange_only_means_that_more_is_copied(switches, tag, monkeypatch, caplog, answer):
    saver = switches
    keep, gone = noise(saver, tag, 12), noise(saver, tag, 32)
    want = keep.cpu().clone()
    del gone

    def segments_of(pools):
        if isinstance(answer, Exception):
            raise type(answer)(*answer.args)  # a new one: a parameter would keep the frame alive
        return [answer] * len(pools)

    with monkeypatch.context() as patch, caplog.at_level(logging.DEBUG, "ebbtide"):
        patch.setattr(backends.existing_backend(), "segments_of", segments_of, raising=False)
        report = saver.pause(tag)
    assert (report.unused, report.copied) == (0, 44 * MIB)
    said = [record for record in caplog.records if record.name != "ebbtide"]  # which has a line for each pause
    assert not any(record.levelno > logging.DEBUG for record in said)
    assert bool(said) == isinstance(answer, Exception)
    saver.resume(tag)
    assert torch.equal(keep.cpu(), want)


def test_stats_count_the_reasons(switches, tag):
    saver = switches
    before = saver.stats()
    with saver.region(tag, retain=True):
        keep = random_bytes(12 * MIB, saver.device)
        zeros = torch.zeros(12 * MIB, dtype=torch.uint8, device=saver.device)
        gone = torch.ones(32 * MIB, dtype=torch.uint8, device=saver.device)
    del gone
    cycle(saver, tag)
    cycle(saver, tag)
    after = saver.stats()
    grown = {name: after[f"bytes_{name}"] - before[f"bytes_{name}"] for name in ("clean", "unused", "constant")}
    assert grown == {"clean": 12 * MIB, "unused": 64 * MIB, "constant": 24 * MIB}
    assert keep.numel() + zeros.numel()
