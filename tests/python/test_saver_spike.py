"""After a spike, no memory that torch caches is on the host, even if the same pool's cache fills the device."""

import threading

import pytest

torch = pytest.importorskip("torch")

import caches  # noqa: E402
from ebbtide import _core  # noqa: E402
from ebbtide.saver.pools import backends, region_pools  # noqa: E402
from ebbtide.saver.reclaim import spilled  # noqa: E402
from ebbtide.saver.regions import startup  # noqa: E402

MIB = 1 << 20


@pytest.fixture
def room(saver):
    """`room(mib)` leaves this much of device_limit for the next allocations. The limits are reset after the test."""

    def leave(mib):
        caches.release(saver)
        # Pools that captures of other tests have marked cannot be trimmed, and would make room in the middle of a test.
        startup.backend().give_back([pool.handle for _, pool in region_pools.registry.idle() if pool.is_captured])
        saver.configure(device_limit=_core.query_device(0).held_bytes + mib * MIB, reserve=0)

    yield leave
    saver.configure(device_limit=None, reserve=None)


def fill(saver, tag, *sizes_mib, **options):
    """Makes tensors of these sizes in one region, each filled with its number."""
    with saver.region(tag, overflow="split", **options):
        return [
            torch.full((mib * MIB,), number + 1, dtype=torch.uint8, device=saver.device)
            for number, mib in enumerate(sizes_mib)
        ]


def host_bytes(saver, tag):
    return saver.tags()[tag].host_bytes


def dissolved(tag):
    return [pool for key, pool in region_pools.registry.dissolved() if key.tag == tag]


def is_intact(tensors):
    return all(bool((tensor == number + 1).all()) for number, tensor in enumerate(tensors))


def test_narrow_wide_narrow_in_one_tag(saver, tag, room):
    room(100)
    narrow = fill(saver, tag, 30, 30, 30)
    assert host_bytes(saver, tag) == 0
    del narrow
    wide = fill(saver, tag, 60, 60, 60)
    assert host_bytes(saver, tag) >= 80 * MIB and is_intact(wide)
    del wide
    held = saver.stats()["host_bytes"]
    for _ in range(3):
        before = saver.stats()["spills"]
        narrow = fill(saver, tag, 30, 30, 30)
        assert is_intact(narrow)
        assert (host_bytes(saver, tag), saver.stats()["spills"]) == (0, before)
        del narrow
    assert held - saver.stats()["host_bytes"] >= 80 * MIB
    assert dissolved(tag) == []


def test_it_goes_when_the_region_is_left_if_nothing_lives(saver, tag, room):
    room(20)
    with saver.region(tag, overflow="split"):
        wide = torch.ones(60 * MIB, dtype=torch.uint8, device=saver.device)
        assert host_bytes(saver, tag) == 40 * MIB
        del wide
    status = saver.tags()[tag]
    assert (status.size_bytes, status.host_bytes) == (0, 0)


def test_pools_are_made_for_spikes_only(saver, tag, room):
    room(100)
    del fill(saver, tag, 30, 30, 30)[:]
    made = saver.stats()["pools_made"]
    for _ in range(5):
        del fill(saver, tag, 30, 30, 30)[:]
    assert saver.stats()["pools_made"] == made


@pytest.mark.parametrize("is_paused", [False, True])
def test_what_lives_in_the_pool_of_a_spike_stays(saver, tag, room, is_paused):
    room(100)
    first, gone, other = fill(saver, tag, 30, 90, 4)
    address = first.data_ptr()
    del gone
    fresh = fill(saver, tag, 30, 20)
    assert host_bytes(saver, tag) <= 20 * MIB  # at most the segment of `other`
    if is_paused:
        saver.pause(tag)
        saver.resume(tag)
    assert first.data_ptr() == address
    assert bool((first == 1).all()) and bool((other == 3).all()) and is_intact(fresh)
    del first, other
    with saver.region(tag, overflow="split"):
        pass
    assert saver.tags()[tag].size_bytes == 50 * MIB, "what got free in the earlier pool has gone too"
    assert dissolved(tag) == []


def test_trim_gives_back_what_got_free_in_the_pool_of_a_spike(saver, tag, room):
    room(60)
    keep, gone = fill(saver, tag, 30, 60)
    del gone
    with saver.region(tag, overflow="split"):
        pass
    assert host_bytes(saver, tag) == 0 and len(dissolved(tag)) == 1
    assert bool((keep == 1).all())
    del keep
    report = saver.trim(tag)
    assert (report.bytes, report.by_tag, report.by_device) == (30 * MIB, {tag: 30 * MIB}, {0: 30 * MIB})
    assert saver.tags()[tag].size_bytes == 0
    assert saver.trim(tag).bytes == 0


def test_what_was_trimmed_does_not_come_back_slow(saver, tag, room):
    room(40)
    wide = fill(saver, tag, 30, 30)
    assert host_bytes(saver, tag) == 20 * MIB
    del wide
    saver.trim(tag)
    with saver.region(tag, overflow="split"):
        status = saver.tags()[tag]
        assert (status.host_bytes, status.trimmed_bytes, status.size_bytes) == (0, 0, 0)


def test_a_region_without_a_policy_dissolves_nothing(saver, tag, room):
    with saver.region(tag):
        gone = torch.ones(30 * MIB, dtype=torch.uint8, device=saver.device)
    address = gone.data_ptr()
    del gone
    room(10)  # trims it, too
    with saver.region(tag, overflow="split"):
        pass
    saver.configure(device_limit=None)
    with saver.region(tag):
        again = torch.ones(30 * MIB, dtype=torch.uint8, device=saver.device)
    assert again.data_ptr() == address


def test_where_torch_can_not_dissolve_all_stays_as_it_is(saver, tag, room, monkeypatch):
    room(20)
    wide = fill(saver, tag, 60)
    monkeypatch.setattr(startup.backend(), "dissolve", lambda pool: False, raising=False)
    del wide
    again = fill(saver, tag, 60)
    assert host_bytes(saver, tag) == 40 * MIB and is_intact(again)
    assert dissolved(tag) == []


def test_a_flush_that_fails_is_made_up_for(saver, tag, room, monkeypatch):
    """Such as a flush during a capture, which releases nothing."""
    room(20)
    wide = fill(saver, tag, 60)
    del wide
    with monkeypatch.context() as patch:
        patch.setattr(startup.backend(), "give_back", lambda dissolved: None, raising=False)
        with saver.region(tag, overflow="split"):
            pass
        assert host_bytes(saver, tag) == 40 * MIB and len(dissolved(tag)) == 1
    assert is_intact(fill(saver, tag, 20))
    assert (host_bytes(saver, tag), dissolved(tag)) == (0, [])


def test_an_account_that_is_not_understood_gives_up_nothing(saver, tag, room, monkeypatch):
    room(20)
    wide = fill(saver, tag, 60)
    del wide
    monkeypatch.setattr(backends.existing_backend(), "segments_of", lambda pools: [None] * len(pools), raising=False)
    again = fill(saver, tag, 60)
    assert host_bytes(saver, tag) == 40 * MIB and is_intact(again)


def test_a_tag_that_is_entered_meanwhile_keeps_what_fits(saver, tag, room, monkeypatch):
    room(20)
    wide = fill(saver, tag, 60)
    room(100)
    del wide
    other = caches.lease_at_the_next_look(monkeypatch, tag)
    spilled.prefer_device(tag)
    spilled.release_free(tag)
    assert host_bytes(saver, tag) == 40 * MIB
    other.close()
    spilled.prefer_device(tag)
    assert host_bytes(saver, tag) == 0


def test_promote_moves_nothing_that_is_dead_in_the_pool_of_a_spike(saver, tag, room):
    room(20)
    keep, dead, gone = fill(saver, tag, 30, 40, 60)
    del gone
    with saver.region(tag, overflow="split"):
        pass
    assert len(dissolved(tag)) == 1
    del dead
    saver.configure(device_limit=None)
    assert saver.promote(tag).bytes == 10 * MIB
    assert (saver.tags()[tag].size_bytes, host_bytes(saver, tag)) == (30 * MIB, 0)
    assert bool((keep == 1).all())


def test_a_pause_copies_nothing_that_is_dead_in_the_pool_of_a_spike(saver, tag, room):
    room(100)
    keep, dead, gone = fill(saver, tag, 30, 30, 90)
    keep.random_()
    dead.random_()
    wanted = keep.clone()
    del gone
    with saver.region(tag, overflow="split"):
        pass
    assert len(dissolved(tag)) == 1
    del dead
    report = saver.pause(tag)
    assert (report.copied, report.unused) == (30 * MIB, 30 * MIB)
    saver.resume(tag)
    assert bool((keep == wanted).all())


def test_what_torch_fails_with_does_not_reach_who_enters_or_leaves(saver, tag, room, monkeypatch):
    """An error of the with block would be lost in it."""
    room(20)

    def fail(dissolved):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        patch.setattr(startup.backend(), "give_back", fail, raising=False)
        with pytest.raises(KeyError, match="of the program"), saver.region(tag, overflow="split"):
            del fill(saver, tag, 60)[:]
            raise KeyError("of the program")
        with saver.region(tag, overflow="split"):
            pass
        assert saver.tags()[tag].lease_count == 0
    with saver.region(tag, overflow="split"):
        pass
    assert dissolved(tag) == []


def test_spikes_of_many_threads(saver, tag, room):
    room(60)
    errors = []

    def spike(seed):
        try:
            for turn in range(6):
                tensors = fill(saver, tag, 10 + seed, 30 + turn % 3)
                assert is_intact(tensors)
                del tensors
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=spike, args=(seed,)) for seed in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert errors == []
    with saver.region(tag, overflow="split"):
        pass
    assert host_bytes(saver, tag) == 0
    saver.trim(tag)
    assert dissolved(tag) == []
