"""saver.trim releases the memory behind free segments. It comes back before their pool is leased again."""

import threading

import pytest

torch = pytest.importorskip("torch")

import caches  # noqa: E402
from ebbtide import _core  # noqa: E402
from ebbtide.errors import DriverError, OutOfMemoryError, StateError  # noqa: E402
from ebbtide.saver.pools import region_pools  # noqa: E402
from random_memory import random_bytes  # noqa: E402

MIB = 1 << 20
UNKNOWN = 999


def noise(saver, tag, mib, **options):
    with saver.region(tag, **options):
        return random_bytes(mib * MIB, saver.device)


def test_free_segments_go_and_come_back_with_the_next_region(saver, tag):
    keep, gone = noise(saver, tag, 12), noise(saver, tag, 32)
    want, address = keep.cpu().clone(), gone.data_ptr()
    assert saver.trim(tag).bytes == 0
    del gone
    held = _core.query_device(0).held_bytes
    report = saver.trim(tag)
    assert (report.kind, report.bytes, report.by_tag) == ("trim", 32 * MIB, {tag: 32 * MIB})
    assert "freed 32.0 MiB" in str(report)
    assert held - _core.query_device(0).held_bytes == 32 * MIB
    status = saver.tags()[tag]
    assert (status.state, status.trimmed_bytes, status.resident_bytes, status.dropped_bytes) == (
        "resident",
        32 * MIB,
        12 * MIB,
        0,
    )
    assert "trimmed" in str(saver.tags())
    assert not saver.is_paused(tag)
    assert saver.trim(tag).bytes == 0
    again = noise(saver, tag, 32)
    assert again.data_ptr() == address
    assert saver.tags()[tag].trimmed_bytes == 0
    assert torch.equal(keep.cpu(), want)
    assert [event.kind for event in saver.timeline if event.tags == tag] == ["trim", "resume"]


def test_it_comes_back_as_zeros(saver, tag):
    gone = noise(saver, tag, 32)
    del gone
    saver.trim(tag)
    with saver.region(tag):
        again = torch.empty(32 * MIB, dtype=torch.uint8, device=saver.device)
    assert int(torch.count_nonzero(again)) == 0


def test_what_came_back_behind_one_handle_with_it_stays_as_it_is(saver, tag):
    keep, gone, other = noise(saver, tag, 12), noise(saver, tag, 32), noise(saver, tag, 20)
    saver.pause(tag)
    saver.resume(tag)
    wants = [keep.cpu().clone(), other.cpu().clone()]
    addresses = [keep.data_ptr(), other.data_ptr(), gone.data_ptr()]
    del gone
    held = _core.query_device(0).held_bytes
    assert saver.trim(tag).bytes == 32 * MIB
    assert held - _core.query_device(0).held_bytes == 32 * MIB
    assert all(torch.equal(tensor.cpu(), want) for tensor, want in zip((keep, other), wants, strict=True))
    assert [event.kind for event in saver.timeline if event.tags == tag][-2:] == ["separate", "trim"]
    assert saver.pause(tag).bytes == 32 * MIB
    saver.resume(tag)
    assert [keep.data_ptr(), other.data_ptr(), noise(saver, tag, 32).data_ptr()] == addresses
    assert all(torch.equal(tensor.cpu(), want) for tensor, want in zip((keep, other), wants, strict=True))


@pytest.mark.sim_only
@pytest.mark.parametrize(
    ("first", "times", "ends"), [(4, 1, "resume"), (5, 1, "pause"), (6, 1, "resume"), (4, 3, "pause")]
)
def test_what_could_not_be_mapped_again_is_counted_and_comes_back(saver, tag, first, times, ends):
    from core_sim import Sim

    sim = Sim()
    tensors = [noise(saver, tag, 12), noise(saver, tag, 20), noise(saver, tag, 32)]
    saver.pause(tag)
    saver.resume(tag)
    sizes = [tensor.numel() for tensor in tensors]
    wants = [tensor.cpu().clone() for tensor in tensors[:2]]
    del tensors[2]
    # The first three are for the memory that is copied into. Where the next is refused, the old memory is mapped again.
    sim.fail("cuMemSetAccess", first, UNKNOWN, times + (first == 4))
    try:
        with pytest.raises(DriverError):
            saver.trim(tag)
    finally:
        sim.clear_failures()
    status = saver.tags()[tag]
    detached = sum(sizes[first - 4 : first - 4 + times])
    assert (status.state, status.detached_bytes, status.resident_bytes) == ("partial", detached, sum(sizes) - detached)
    assert "detached" in str(saver.tags())
    log = []
    removers = [saver.on(f"{when}_{ends}", tag, lambda name: log.append(name)) for when in ("before", "after")]
    if ends == "pause":
        assert saver.pause(tag).bytes == sum(sizes)
        assert saver.tags()[tag].state == "paused"
    else:
        saver.resume(tag)
    assert log == [tag, tag]
    for remove in removers:
        remove()
    saver.resume(tag)
    status = saver.tags()[tag]
    assert (status.state, status.detached_bytes) == ("resident", 0)
    assert all(torch.equal(tensor.cpu(), want) for tensor, want in zip(tensors, wants, strict=True))


def test_where_the_device_has_no_room_to_separate_it_the_memory_stays(saver, tag):
    keep, gone = noise(saver, tag, 12), noise(saver, tag, 32)
    saver.pause(tag)
    saver.resume(tag)
    want = keep.cpu().clone()
    del gone
    held = _core.query_device(0).held_bytes
    saver.configure(device_limit=held + 40 * MIB)
    try:
        assert saver.trim(tag).bytes == 0
    finally:
        saver.configure(device_limit=None)
    assert _core.query_device(0).held_bytes == held
    assert torch.equal(keep.cpu(), want)
    assert saver.trim(tag).bytes == 32 * MIB


def test_without_shared_handles_nothing_is_separated(saver, tag):
    saver.configure(shared_handle=0)
    try:
        keep, gone = noise(saver, tag, 12), noise(saver, tag, 32)
        saver.pause(tag)
        saver.resume(tag)
        want = keep.cpu().clone()
        del gone
        assert saver.trim(tag).bytes == 32 * MIB
        assert torch.equal(keep.cpu(), want)
        assert "separate" not in [event.kind for event in saver.timeline if event.tags == tag]
    finally:
        saver.configure(shared_handle="1GiB")


def test_it_stays_away_over_pause_and_resume(saver, tag):
    keep, gone = noise(saver, tag, 12), noise(saver, tag, 32)
    want = keep.cpu().clone()
    del gone
    saver.trim(tag)
    for _ in range(2):
        assert saver.pause(tag).bytes == 12 * MIB
        assert saver.trim(tag).bytes == 0
        assert saver.resume(tag).bytes == 12 * MIB
    assert saver.tags()[tag].trimmed_bytes == 32 * MIB
    assert torch.equal(keep.cpu(), want)
    again = noise(saver, tag, 32)
    want_again = again.cpu().clone()
    assert saver.pause(tag).bytes == 44 * MIB
    saver.resume(tag)
    assert torch.equal(again.cpu(), want_again)


def test_a_region_entered_while_the_tag_is_away(saver, tag):
    keep, gone = noise(saver, tag, 12), noise(saver, tag, 32)
    want = keep.cpu().clone()
    del gone
    saver.trim(tag)
    saver.pause(tag)
    fresh = noise(saver, tag, 12)  # memory of the old pool is in use, so this is another pool
    want_fresh = fresh.cpu().clone()
    assert saver.tags()[tag].trimmed_bytes == 32 * MIB
    del fresh
    assert saver.trim(tag).bytes == 12 * MIB
    fresh = noise(saver, tag, 12)
    want_fresh = fresh.cpu().clone()
    saver.resume(tag)
    assert torch.equal(keep.cpu(), want) and torch.equal(fresh.cpu(), want_fresh)


def test_where_it_does_not_fit_the_region_is_not_entered(saver, tag):
    saver.trim()  # what other tests have cached would make room
    keep, gone = noise(saver, tag, 12), noise(saver, tag, 32)
    want = keep.cpu().clone()
    del gone
    saver.trim(tag)
    made = saver.stats()["pools_made"]
    saver.configure(device_limit=_core.query_device(0).held_bytes + 16 * MIB)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError) as error, saver.region(tag):
            raise AssertionError("entered")
        assert isinstance(error.value, OutOfMemoryError)
    status = saver.tags()[tag]
    assert (status.lease_count, status.trimmed_bytes, status.resident_bytes) == (0, 32 * MIB, 12 * MIB)
    ordinary = torch.ones(1000, device=saver.device)  # this thread is in no region
    assert _core.find(ordinary.data_ptr()) is None
    assert saver.pause(tag).bytes == 12 * MIB
    saver.resume(tag)
    saver.configure(device_limit=None)
    with saver.region(tag):
        pass
    assert saver.tags()[tag].trimmed_bytes == 0
    assert saver.stats()["pools_made"] == made
    assert torch.equal(keep.cpu(), want)


@pytest.mark.sim_only  # through a call of the extension for CPU tensors
def test_a_segment_that_torch_gave_back_meanwhile_is_not_missed(saver, tag, tag2):
    gone = noise(saver, tag, 32)
    del gone
    saver.trim(tag)
    from ebbtide import torch_extension

    pool = next(pool.handle for key, pool in region_pools.registry.idle() if key.tag == tag)
    assert torch_extension.load().pool_trim(pool) == 32 * MIB
    assert saver.tags()[tag].size_bytes == 0
    again = noise(saver, tag, 12)
    assert saver.tags()[tag].resident_bytes == 12 * MIB
    assert again.numel()


def test_only_wholly_free_segments(saver, tag):
    with saver.region(tag):  # one segment of 20 MiB
        first = torch.ones(4 * MIB, dtype=torch.uint8, device=saver.device)
        second = torch.ones(4 * MIB, dtype=torch.uint8, device=saver.device)
    del first
    assert saver.trim(tag).bytes == 0
    del second
    assert saver.trim(tag).bytes == 20 * MIB


def test_an_open_region_is_refused_and_nothing_moves(saver, tag):
    gone = noise(saver, tag, 32)
    del gone
    with saver.region(tag), pytest.raises(StateError, match="region"):
        saver.trim(tag)
    assert saver.tags()[tag].trimmed_bytes == 0
    with saver.region(tag):  # a second pool, so that the idle one has something to trim
        pass
    assert saver.trim(tag).bytes == 32 * MIB


def test_the_core_refuses_a_lease_that_came_in_between(saver, tag, monkeypatch):
    gone = noise(saver, tag, 32)
    del gone
    other = caches.lease_at_the_next_look(monkeypatch, tag)
    with pytest.raises(StateError, match="another thread"):
        saver.trim(tag)
    other.close()
    assert saver.tags()[tag].trimmed_bytes == 0
    assert saver.trim(tag).bytes == 32 * MIB


def test_several_tags_and_all(saver, tag, tag2):
    gone = [noise(saver, tag, 32), noise(saver, tag2, 12)]
    del gone
    assert saver.trim(tag, tag2).by_tag == {tag: 32 * MIB, tag2: 12 * MIB}
    gone = [noise(saver, tag, 32), noise(saver, tag2, 12)]
    del gone
    assert {tag, tag2} <= set(saver.trim().by_tag)
    with pytest.raises(StateError, match="no region"):
        saver.trim(tag, f"{tag}-unknown")
    assert saver.trim(tag, f"{tag}-unknown", missing_ok=True).bytes == 0
    with pytest.raises(ValueError):
        saver.trim("a/b")


def test_trims_and_regions_of_many_threads(saver, tag):
    errors = []

    def allocate(seed):
        try:
            for turn in range(30):
                with saver.region(tag):
                    tensor = torch.full((3 * MIB,), float(seed * 100 + turn), device=saver.device)
                assert bool((tensor == seed * 100 + turn).all())
                del tensor
        except BaseException as error:
            errors.append(error)

    def trim():
        try:
            for _ in range(60):
                try:
                    saver.trim(tag)
                except StateError:
                    pass  # a region is open
        except BaseException as error:
            errors.append(error)

    with saver.region(tag):
        pass
    threads = [threading.Thread(target=allocate, args=(seed,)) for seed in (1, 2)] + [threading.Thread(target=trim)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert errors == []
    saver.trim(tag)
    assert saver.tags()[tag].resident_bytes == 0


def test_what_died_behind_a_shared_handle_is_held_until_the_next_pause(saver, tag):
    living, dying = (_core.alloc(tag, 4 * MIB) for _ in range(2))
    saver.pause(tag)
    saver.resume(tag)
    counted, held = saver.stats()["device_bytes"], _core.query_device(0).held_bytes
    _core.free(dying)
    assert counted - saver.stats()["device_bytes"] == 4 * MIB
    assert _core.query_device(0).held_bytes == held
    saver.pause(tag)
    assert held - _core.query_device(0).held_bytes == 8 * MIB
    saver.resume(tag)
    assert held - _core.query_device(0).held_bytes == 4 * MIB
    _core.free(living)
