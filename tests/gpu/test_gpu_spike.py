"""A spike in one tag on a GPU: afterwards, torch caches no memory on the host, and the loop has its old speed."""

import statistics

import pytest

torch = pytest.importorskip("torch")

from ebbtide import _core  # noqa: E402
from ebbtide.saver.pools import region_pools  # noqa: E402

pytestmark = pytest.mark.device_memory

MIB = 1 << 20
LIMIT = 768 * MIB
NARROW, WIDE = (64 * MIB,) * 8, (256 * MIB,) * 5
WARM_STEPS, STEPS = 3, 30


@pytest.fixture
def limited(saver):
    """A device with room for the narrow phase, and for half of the wide one."""
    saver.configure(device_limit=_core.query_device(0).held_bytes + LIMIT, reserve=0)
    yield saver
    saver.configure(device_limit=None, reserve=None)


def phase(saver, tag, sizes, threads="own"):
    """Median seconds of a step that reads and writes all of its tensors, which are made in the region, and the bytes on
    the host."""
    with saver.region(tag, overflow="split", threads=threads):
        tensors = [torch.zeros(size, dtype=torch.uint8, device="cuda") for size in sizes]
        seconds = []
        for step in range(WARM_STEPS + STEPS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for tensor in tensors:
                tensor.add_(1)
            end.record()
            end.synchronize()
            if step >= WARM_STEPS:
                seconds.append(begin.elapsed_time(end) / 1e3)
        assert all(bool((tensor == WARM_STEPS + STEPS).all()) for tensor in tensors)
        return statistics.median(seconds), saver.tags()[tag].host_bytes


@pytest.mark.parametrize("threads", ["own", "all"])
def test_narrow_wide_narrow_in_one_tag(limited, tag, threads):
    saver = limited
    before, spilled = phase(saver, tag, NARROW, threads)
    assert spilled == 0
    host_before = saver.stats()["host_bytes"]
    during, spilled = phase(saver, tag, WIDE, threads)
    assert spilled >= 5 * 256 * MIB - LIMIT
    spills = saver.stats()["spills"]
    after, spilled = phase(saver, tag, NARROW, threads)
    assert (spilled, saver.stats()["spills"]) == (0, spills)
    assert saver.stats()["host_bytes"] == host_before
    assert during > 3 * before, "the wide phase was to be slow"
    assert after <= 1.1 * before
    phase(saver, tag, NARROW, threads)
    assert [pool for key, pool in region_pools.registry.dissolved() if key.tag == tag] == []


def test_what_lives_in_the_pool_of_a_spike_stays(limited, tag):
    saver = limited
    with saver.region(tag, overflow="split"):
        keep = torch.arange(16 * MIB, device="cuda")
        gone = torch.ones(LIMIT, dtype=torch.uint8, device="cuda")
    want, address = keep.cpu(), keep.data_ptr()
    assert saver.tags()[tag].host_bytes >= 128 * MIB
    del gone
    with saver.region(tag, overflow="split"):
        assert saver.tags()[tag].host_bytes == 0
        fresh = torch.full((256 * MIB,), 7, dtype=torch.uint8, device="cuda")
        with saver.region(f"{tag}-inner"):  # other pools are open while torch flushes
            pass
    saver.pause(tag)
    saver.resume(tag)
    assert keep.data_ptr() == address and torch.equal(keep.cpu(), want) and bool((fresh == 7).all())
    del keep
    torch.cuda.empty_cache()  # torch frees the rest by itself
    assert saver.tags()[tag].size_bytes == 256 * MIB


def test_a_spike_while_another_region_is_open(limited, tag):
    """Dissolving a pool while others are open must not end the process."""
    saver = limited
    with saver.region(f"{tag}-outer", threads="all"):
        outer = torch.ones(4 * MIB, dtype=torch.uint8, device="cuda")
        for sizes in (NARROW, WIDE, NARROW, WIDE, NARROW):
            _, spilled = phase(saver, tag, sizes)
            assert (spilled > 0) is (sizes is WIDE)
    assert bool((outer == 1).all())
